"""The three operators in plain PyTorch: what the CPU runs, and what the GPU kernels are held against.

They round exactly where the kernels do: the dequantised weight to BF16, sums in FP32, SwiGLU and the row's weight in
FP32, and the result to BF16 once. One expert's weight is dequantised at a time. Like the kernels they are
batch-invariant: a row gives the same bits in every mode, whatever rows stand beside it.

Arguments are those of the operators in :mod:`chord_runtime.ops.library`; routing values are taken as valid
(:mod:`chord_runtime.ops.validate` checks them), rows that no expert owns are neither read nor written.
"""

from __future__ import annotations

import torch
from torch import Tensor

from chord_runtime.format.packing import deinterleave, dequantize


def contiguous(
    a: Tensor, w: Tensor, m_indices: Tensor, row_weight: Tensor | None, out: Tensor, n: int, gate_up: bool, swiglu: bool
) -> None:
    """Row i of ``a`` [M, K] times expert ``m_indices[i]``; −1 is padding."""
    for expert, rows in _groups(m_indices):
        weight = None if row_weight is None else row_weight[rows]
        out[rows] = expert_rows(a[rows], w[expert], weight, n, gate_up, swiglu)


def masked(
    a: Tensor,
    w: Tensor,
    masked_m: Tensor,
    expected_m: int,
    row_weight: Tensor | None,
    out: Tensor,
    n: int,
    gate_up: bool,
    swiglu: bool,
) -> None:
    """The first ``masked_m[g]`` rows of group g of ``a`` [G, max_m, K] or [G·max_m, K] times expert g."""
    counts = masked_m.tolist()
    a = a.view(-1, a.shape[-1])
    capacity = a.shape[0] // len(counts)
    for expert, count in enumerate(counts):
        if count > 0:
            rows = slice(expert * capacity, expert * capacity + count)
            weight = None if row_weight is None else row_weight.view(-1)[rows]
            out[rows] = expert_rows(a[rows], w[expert], weight, n, gate_up, swiglu)


def indexed(
    x: Tensor,
    w: Tensor,
    sorted_ids: Tensor,
    expert_ids: Tensor,
    num_tokens_padded: Tensor,
    top_k: int,
    block_size: int,
    topk_weights: Tensor | None,
    out: Tensor,
    n: int,
    gate_up: bool,
    swiglu: bool,
    num_experts: int = 0,
    overlap: bool = False,
) -> None:
    """Row id // top_k of ``x`` [T, K] times the expert of the block that id stands in, to row id of ``out``."""
    used = int(num_tokens_padded)
    ids = sorted_ids[:used].long()
    experts = expert_ids[: -(-used // block_size)].repeat_interleave(block_size)[:used]
    experts = torch.where(ids < x.shape[0] * top_k, experts, -1)
    for expert, places in _groups(experts):
        rows = ids[places]
        weight = None if topk_weights is None else topk_weights.view(-1)[rows]
        out[rows] = expert_rows(x[rows // top_k], w[expert], weight, n, gate_up, swiglu)


_TILE_ROWS = 32
"""Rows multiplied at a time, always so many: a matrix product of another shape may sum in another order."""


def expert_rows(rows: Tensor, packed: Tensor, row_weight: Tensor | None, n: int, gate_up: bool, swiglu: bool) -> Tensor:
    """Rows [R, K] times one packed expert: [R, n], or [R, n/2] after SwiGLU, in the dtype of ``rows``."""
    weight = dequantize(packed, n, rows.shape[1])
    if gate_up:
        weight = torch.cat(deinterleave(weight))
    result = _product(rows, weight)
    if swiglu:
        gate, up = result.chunk(2, 1)
        result = torch.nn.functional.silu(gate) * up
    if row_weight is not None:
        result = result * row_weight.unsqueeze(1)
    return result.to(rows.dtype)


def _product(rows: Tensor, weight: Tensor) -> Tensor:
    """float32 [R, n] = rows [R, K] · weight [n, K]ᵀ, summed in FP32."""
    if rows.is_cuda:
        # What the kernels are checked against there. Tensor cores sum BF16 products in FP32, 15 times as fast as FP32.
        return torch.mm(rows, weight.T, out_dtype=torch.float32)
    columns = weight.float().T
    padded = rows.new_zeros(-(-len(rows) // _TILE_ROWS) * _TILE_ROWS, rows.shape[1], dtype=torch.float32)
    padded[: len(rows)] = rows
    tiles = padded.view(-1, _TILE_ROWS, rows.shape[1]).unbind()
    return torch.cat([tile @ columns for tile in tiles])[: len(rows)]


def _groups(experts: Tensor) -> list[tuple[int, Tensor]]:
    """(expert, its places, ascending) for every expert ≥ 0 that occurs in a list of experts."""
    order = torch.argsort(experts, stable=True)
    found, counts = torch.unique_consecutive(experts[order], return_counts=True)
    groups = zip(found.tolist(), order.split_with_sizes(counts.tolist()), strict=True)
    return [(expert, places) for expert, places in groups if expert >= 0]
