"""The one check that reads data: are all scales finite and within what the packed format can hold?

Packing refuses a bad scale anyway; this finds all of them beforehand, from a fiftieth of the checkpoint's bytes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch

from chord_convert.checkpoint import PROJECTIONS, Checkpoint
from chord_convert.report import Problem, name, show
from chord_convert.source import LocalSource, Source
from chord_convert.source.headers import TensorInfo
from chord_convert.source.parallel import map_in_threads
from chord_runtime.errors import ScaleError
from chord_runtime.format.packing import check_scales


def scan_scales(
    source: Source, checkpoint: Checkpoint, workers: int = 8, progress: Callable[[int], object] | None = None
) -> list[Problem]:
    """Read every expert's ``weight_scale`` and, from a directory, ``weight_shape``; return what is wrong with them.

    From the Hub the shapes are left out: they are 8 bytes each, and would take a request each. Memory stays at one
    tensor a worker. ``progress`` is called with the bytes of each tensor read.

    Raises:
        SourceError: a tensor cannot be read.
    """
    kinds = {"weight_scale": _bad_scale, "weight_shape": _bad_shape}
    if not isinstance(source, LocalSource):
        del kinds["weight_shape"]
    wanted = [
        (checkpoint.expert(layer, expert, projection, kind), check, checkpoint.shape(projection))
        for layer in checkpoint.layers
        for expert in range(checkpoint.num_experts)
        for projection in PROJECTIONS
        for kind, check in kinds.items()
    ]
    wanted.sort(key=lambda item: (item[0].file, item[0].start))
    buffers = threading.local()

    def attempt(item: tuple[TensorInfo, Callable[..., Problem | None], tuple[int, int]]) -> Problem | None:
        info, check, shape = item
        buffer = getattr(buffers, "held", None)
        if buffer is None or len(buffer) < info.nbytes:
            buffer = buffers.held = bytearray(info.nbytes)
        data = source.read(info.file, info.start, info.stop, buffer)
        if progress is not None:
            progress(info.nbytes)
        return check(info, data, shape)

    found = map_in_threads(attempt, wanted, workers, "scales")
    return [problem for problem in found if problem is not None]


def _bad_scale(info: TensorInfo, data: memoryview, shape: tuple[int, int]) -> Problem | None:
    scale = torch.frombuffer(data, dtype=torch.bfloat16).view(info.shape)
    try:
        check_scales(scale)
    except ScaleError as error:
        found, _, rest = str(error).partition(": supported are ")
        supported, _, _ = rest.partition(";")
        step = "Re-quantize this tensor, or download the file again."
        return Problem("scale-value", info.file, name(info.name), found, supported, step)
    return None


def _bad_shape(info: TensorInfo, data: memoryview, shape: tuple[int, int]) -> Problem | None:
    recorded = torch.frombuffer(data, dtype=torch.int32 if info.dtype == "I32" else torch.int64).tolist()
    if tuple(recorded) == shape:
        return None
    return Problem(
        "recorded-shape", info.file, name(info.name), show(recorded), f"{list(shape)}, as config and tensors say",
        "Download the file again, or take another checkpoint.",
    )  # fmt: skip
