"""Launches of the small kernels around the GEMMs: align, gather, combine. Each is one launch on the current stream."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from chord_runtime.cuda.compile import arch_of, compile_kernel
from chord_runtime.cuda.parameters import Parameters
from chord_runtime.errors import UsageError
from chord_runtime.ops.route import MAX_EXPERTS, Layout, align_outputs

if TYPE_CHECKING:
    from chord_runtime.cuda.handle import Handle

_ALIGN = Parameters("QQQQQQQQiiiiii")
_GATHER = Parameters("QQQiii")
_COMBINE = Parameters("QQQiii")

CONFIGS: list[tuple[str, dict[str, int]]] = [
    *(("align", {"CHORD_LAYOUT": layout, "CHORD_IDS_64": wide}) for layout in Layout for wide in (0, 1)),
    ("gather", {}),
    ("combine", {}),
]
"""Every instantiation, for compiling ahead."""


def align(
    topk_ids: Tensor,
    expert_map: Tensor | None,
    topk_weights: Tensor | None,
    layout: int,
    num_experts: int,
    align: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """``chord::align`` (see :mod:`chord_runtime.ops.route`)."""
    known = num_experts if expert_map is None else expert_map.numel()
    if max(num_experts, known) > MAX_EXPERTS:
        raise UsageError(f"{max(num_experts, known)} experts: the align kernel counts at most {MAX_EXPERTS}")
    outputs = align_outputs(topk_ids, topk_weights, Layout(layout), num_experts, align)
    topk_ids = topk_ids.contiguous()
    weights = None if topk_weights is None else topk_weights.contiguous()
    choices = topk_ids.numel()
    kernel, constants = _kernel("align", topk_ids.get_device(), (layout, int(topk_ids.dtype is torch.int64)))
    threads = constants["chord_align_threads"]
    padding = choices if layout == Layout.INDEXED else -1
    tensors = (topk_ids, expert_map, weights, *outputs)
    kernel.launch(
        max(1, -(-choices // threads)),
        1,
        threads,
        (*map(_pointer, tensors), choices, known, num_experts, align, outputs[0].numel(), padding),
        _ALIGN,
    )
    return outputs


def gather(x: Tensor, routed: Tensor, choices: int, top_k: int) -> Tensor:
    """``chord::gather``: row i of the result is row ``routed[i] // top_k`` of ``x``; unset where that is no row."""
    x = x.contiguous()
    out = x.new_empty((routed.shape[0], x.shape[1]))
    _check_alignment(x)
    kernel, constants = _kernel("gather", x.get_device())
    arguments = (x.data_ptr(), routed.data_ptr(), out.data_ptr(), choices, top_k, x.shape[1])
    kernel.launch(routed.shape[0], 1, constants["chord_gather_threads"], arguments, _GATHER)
    return out


def combine(results: Tensor, rows: Tensor, out: Tensor, overlap: bool = False) -> None:
    """``chord::combine``: ``out[t]`` = Σ of rows ``rows[t]`` of ``results``, −1 for none."""
    tokens, top_k = rows.shape
    columns = results.shape[1]
    _check_alignment(results, out)
    kernel, constants = _kernel("combine", results.get_device())
    blocks = -(-columns // constants["chord_combine_columns"])
    arguments = (results.data_ptr(), rows.data_ptr(), out.data_ptr(), top_k, columns, int(overlap))
    kernel.launch(tokens, blocks, constants["chord_combine_threads"], arguments, _COMBINE)


@cache
def _kernel(name: str, device: int, align: tuple[int, int] | None = None) -> tuple[Handle, dict[str, int]]:
    defines = {} if align is None else {"CHORD_LAYOUT": align[0], "CHORD_IDS_64": align[1]}
    from chord_runtime.cuda.handle import Handle

    cubin = compile_kernel(name, defines, arch_of(torch.cuda.get_device_capability(device)))
    return Handle(cubin, device), cubin.constants


def _check_alignment(*tensors: Tensor) -> None:
    for tensor in tensors:
        if tensor.data_ptr() & 15:
            raise UsageError(
                f"activations must start at multiples of 16 bytes; found {tensor.data_ptr():#x}: pass tensors that do "
                "not start inside another one, or copies of them"
            )


def _pointer(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()
