"""Compile ahead, in parallel, every kernel instantiation that selection can choose: for first calls, and for CI."""

from __future__ import annotations

import atexit
import os
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from chord_runtime.cuda.compile import SHARED_LIMIT, Cubin, arch_of, compile_kernel
from chord_runtime.errors import ChordError, KernelError
from chord_runtime.format.layout import Mode

Instantiation = tuple[str, Mapping[str, int], str]
"""Kernel name, defines, architecture."""


@dataclass(frozen=True)
class Outcome:
    """What became of one instantiation."""

    name: str
    defines: Mapping[str, int]
    arch: str
    cubin: Cubin | None  # None if it does not compile
    problems: tuple[str, ...]
    seconds: float  # of this call: a compile, or a read of the cache


def detected_archs() -> list[str]:
    """The architectures of this machine's GPUs, each once.

    Raises:
        KernelError: there is no GPU, or one that Chord does not support.
    """
    import torch

    count = torch.cuda.device_count()
    if not count:
        raise KernelError(
            f"no CUDA device is visible, so the architecture must be named: --arch, one of {', '.join(SHARED_LIMIT)}"
        )
    return list(dict.fromkeys(arch_of(torch.cuda.get_device_capability(index)) for index in range(count)))


def instantiations(archs: Iterable[str]) -> list[Instantiation]:
    """Everything that ``select`` can choose on these architectures, and the small kernels around it."""
    from chord_runtime.cuda import route, select

    return [(name, defines, arch) for arch in archs for name, defines in [*select.all_configs(arch), *route.CONFIGS]]


def warm_up(
    work: Iterable[Instantiation], *, jobs: int | None = None, root: Path | None = None, keep: bool = False
) -> Iterator[Outcome]:
    """Compile each instantiation into the cache; outcomes come in the order of ``work``, as they are ready.

    Args:
        work: from ``instantiations``.
        jobs: compiles at once; by default one for each core this process may use.
        root: source root, as for ``compile_kernel``.
        keep: stop at the first kernel that cannot be kept.

    Raises:
        OutputError: with ``keep``, the cache cannot be written.
        UsageError: as ``compile_kernel`` does.
    """
    with ThreadPoolExecutor(jobs or len(os.sched_getaffinity(0))) as pool:
        yield from pool.map(lambda item: _one(item, root, keep), work)


@cache
def start_layer(hidden: int, intermediate: int, experts: int, mode: Mode, device: int) -> None:
    """Start compiling what :func:`chord_runtime.moe_layer` calls for a rank's layers, behind whatever comes next.

    A server has much to do between the start and its first batch, and most of that leaves cores idle. Once for the same
    arguments. A kernel that is wanted sooner is compiled by who wants it; what fails here is told there.
    """
    import torch

    from chord_runtime.cuda import route, select

    try:
        arch = arch_of(torch.cuda.get_device_capability(device))
        sms = torch.cuda.get_device_properties(device).multi_processor_count
        waiting = deque(
            (
                *select.configs(mode.value, 2 * intermediate, hidden, experts, select.SWIGLU, arch, sms),
                *select.configs(mode.value, hidden, intermediate, experts, select.PLAIN, arch, sms),
                *route.CONFIGS,
            )
        )
    except ChordError:
        return

    def compile_some() -> None:
        with suppress(IndexError, ChordError):  # of those that wait there are no more; or none can be kept
            while True:
                _one((*waiting.popleft(), arch), None, True)

    # Daemons, for the interpreter waits for others before it calls ``end``; and NVRTC may not be left at work.
    threads = [threading.Thread(target=compile_some, name="chord-compile", daemon=True) for _ in range(_BEHIND)]

    def end() -> None:
        waiting.clear()
        for thread in threads:
            thread.join()

    atexit.register(end)
    for thread in threads:
        thread.start()


_BEHIND = 4
"""Compiles at once beside a server that starts: eight ranks share a host."""


def _one(item: Instantiation, root: Path | None, keep: bool) -> Outcome:
    name, defines, arch = item
    started = time.perf_counter()
    cubin, problems = None, []
    try:
        cubin = compile_kernel(name, defines, arch, root=root, warn=False, keep=keep)
        problems = cubin.problems()
    except KernelError as error:
        problems = [str(error)]
    return Outcome(name, defines, arch, cubin, tuple(problems), time.perf_counter() - started)
