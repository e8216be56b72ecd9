"""The small operators around the GEMMs on CUDA: ``torch.ops.chord.align``, ``.gather`` and ``.combine``.

On the CPU :mod:`chord_runtime.routing` does the same in plain tensor arithmetic, and is what they are held against;
call them through it. Each is one kernel, reads nothing back, and gives equal bits for equal inputs.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum
from typing import Any

import torch
from torch import Tensor

_library = torch.library.Library("chord", "FRAGMENT")  # type: ignore[no-untyped-call]


class Layout(IntEnum):
    """How rows are sorted: ``CHORD_LAYOUT`` of csrc/kernels/align.cu."""

    INDEXED = 0
    CONTIGUOUS = 1
    MASKED = 2


MAX_EXPERTS = 512
"""Experts, on this rank and on all, that the align kernel counts in shared memory."""


def capacity(routed: int, num_experts: int, align: int) -> int:
    """The most rows that ``routed`` choices can need when every expert's rows are padded to ``align``."""
    touched = min(routed, num_experts)
    return max(align, (routed + touched * (align - 1)) // align * align)


def align_outputs(
    topk_ids: Tensor, topk_weights: Tensor | None, layout: Layout, num_experts: int, align: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Uninitialised outputs of ``chord::align``."""
    choices = topk_ids.numel()
    rows = num_experts * align if layout == Layout.MASKED else capacity(choices, num_experts, align)
    owners = {Layout.INDEXED: rows // align, Layout.CONTIGUOUS: rows, Layout.MASKED: num_experts}[layout]
    sizes = (rows, owners, 1)
    routed, owner, used = (topk_ids.new_empty(size, dtype=torch.int32) for size in sizes)
    row_of_choice = topk_ids.new_empty(topk_ids.shape, dtype=torch.int32)
    row_weight = topk_ids.new_empty(0 if topk_weights is None else rows, dtype=torch.float32)
    return routed, owner, used, row_of_choice, row_weight


# routed [rows]; owner: expert of each block or row, or masked_m; used [1]; row of each choice; row weights.
_library.define(  # type: ignore[no-untyped-call]
    "align(Tensor topk_ids, Tensor? expert_map, Tensor? topk_weights, int layout, int num_experts, int align) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor)"
)
_library.define("gather(Tensor x, Tensor routed, int choices, int top_k) -> Tensor")  # type: ignore[no-untyped-call]
_library.define("combine(Tensor results, Tensor rows, Tensor(a!) out, bool overlap=False) -> ()")  # type: ignore[no-untyped-call]


def _cuda(name: str) -> Callable[..., Any]:
    """The CUDA kernel of an operator, found at its first call."""
    kernel: Callable[..., Any] | None = None

    def run(*args: Any) -> Any:
        nonlocal kernel
        if kernel is None:
            from chord_runtime.cuda import route

            kernel = getattr(route, name)
        return kernel(*args)

    return run


def _fake_align(
    topk_ids: Tensor,
    expert_map: Tensor | None,
    topk_weights: Tensor | None,
    layout: int,
    num_experts: int,
    align: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    return align_outputs(topk_ids, topk_weights, Layout(layout), num_experts, align)


def _fake_gather(x: Tensor, routed: Tensor, choices: int, top_k: int) -> Tensor:
    return x.new_empty((routed.shape[0], x.shape[1]))


def _fake_combine(results: Tensor, rows: Tensor, out: Tensor, overlap: bool = False) -> None:
    return None


for _name, _fake in (("align", _fake_align), ("gather", _fake_gather), ("combine", _fake_combine)):
    _library.impl(_name, _cuda(_name), "CUDA")  # type: ignore[no-untyped-call]
    torch.library.register_fake(f"chord::{_name}", _fake, lib=_library)
