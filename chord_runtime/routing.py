"""From a router's choice to the three layouts that the operators take, and back.

Everything is plain tensor arithmetic of fixed shapes: nothing waits for the device, so it can be captured in a CUDA
graph. A *routed index* is token · top_k + choice. Choices of −1, and experts that ``expert_map`` sends to −1 (another
rank's), are routed nowhere. Rows of one expert keep the order of their routed indices, in all three layouts.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from chord_runtime.errors import UsageError
from chord_runtime.ops.validate import RUN_ROWS


@dataclass(frozen=True)
class ContiguousRouting:
    """Arguments of :func:`chord_runtime.contiguous`."""

    m_indices: Tensor
    """int32 [M], expert of each row, −1 for padding."""
    routed: Tensor
    """int64 [M], routed index of each row, −1 for padding: gather activations and weights by it."""
    rows: Tensor
    """int64 [T, top_k], row of each choice, −1 if it is routed nowhere: gather results by it."""


@dataclass(frozen=True)
class MaskedRouting:
    """Arguments of :func:`chord_runtime.masked`."""

    masked_m: Tensor
    """int32 [G], rows of each expert."""
    routed: Tensor
    """int64 [G·max_m], routed index of each row, −1 for rows beyond ``masked_m``."""
    rows: Tensor
    """int64 [T, top_k], row of each choice, −1 if it is routed nowhere."""
    max_m: int
    expected_m: int


@dataclass(frozen=True)
class IndexedRouting:
    """Arguments of :func:`chord_runtime.indexed`, laid out as vLLM's ``moe_align_block_size`` does."""

    sorted_ids: Tensor
    """int32 [capacity], routed indices in blocks of one expert; padding is T · top_k."""
    expert_ids: Tensor
    """int32 [capacity / block_size], expert of each block; −1 beyond the used ones."""
    num_tokens_padded: Tensor
    """int32 [1], used part of ``sorted_ids``."""
    block_size: int
    rows: Tensor
    """int64 [T, top_k], row of the output of each choice: its routed index, −1 if it is routed nowhere."""


def contiguous(topk_ids: Tensor, num_experts: int, expert_map: Tensor | None = None) -> ContiguousRouting:
    """Rows sorted by expert, every expert's run starting at a multiple of 128.

    Args:
        topk_ids: int32 or int64 [T, top_k], experts chosen, −1 for none.
        num_experts: experts on this rank.
        expert_map: int32 [global experts] → local expert or −1; without it ids are local already.

    M is the most that any choice of T · top_k experts can need, whatever the values are.
    """
    local = _local(topk_ids, num_experts, expert_map)
    capacity = _capacity(local.numel(), num_experts, RUN_ROWS)
    counts = _counts(local, num_experts)
    padded = (counts + RUN_ROWS - 1) // RUN_ROWS * RUN_ROWS
    row = _rows(local, counts, padded.cumsum(0) - padded, capacity)
    m_indices = _scatter(capacity, -1, row, local.to(torch.int32))
    return ContiguousRouting(m_indices, _routed(capacity, -1, row), _choices(row, local, topk_ids))


def masked(
    topk_ids: Tensor, num_experts: int, max_m: int | None = None, expert_map: Tensor | None = None
) -> MaskedRouting:
    """``max_m`` rows for each expert; by default T, enough when a token chooses an expert at most once.

    Arguments are those of :func:`contiguous`. Raises UsageError when an expert was chosen more than ``max_m`` times, on
    the CPU; on CUDA, where that is not read, its last choices are routed nowhere.
    """
    local = _local(topk_ids, num_experts, expert_map)
    max_m = topk_ids.shape[0] if max_m is None else max_m
    counts = _counts(local, num_experts)
    if counts.is_cpu and counts.numel() and int(counts.max()) > max_m:
        raise UsageError(f"an expert was chosen {int(counts.max())} times: max_m must be at least that, found {max_m}")
    first = torch.arange(num_experts, device=local.device) * max_m
    row = _rows(local, counts, first, num_experts * max_m)
    fits = row < (local + 1) * max_m
    local = torch.where(fits, local, -1)
    row = torch.where(fits, row, num_experts * max_m)
    return MaskedRouting(
        masked_m=counts.clamp(max=max_m).to(torch.int32),
        routed=_routed(num_experts * max_m, -1, row),
        rows=_choices(row, local, topk_ids),
        max_m=max_m,
        expected_m=max(1, -(-local.numel() // max(1, num_experts if expert_map is None else expert_map.numel()))),
    )


def indexed(
    topk_ids: Tensor, num_experts: int, block_size: int = 16, expert_map: Tensor | None = None
) -> IndexedRouting:
    """Blocks of ``block_size`` routed indices of one expert. Other arguments are those of :func:`contiguous`."""
    local = _local(topk_ids, num_experts, expert_map)
    capacity = _capacity(local.numel(), num_experts, block_size)
    counts = _counts(local, num_experts)
    padded = (counts + block_size - 1) // block_size * block_size
    ends = padded.cumsum(0)
    row = _rows(local, counts, ends - padded, capacity)
    blocks = torch.where(row < capacity, row // block_size, capacity // block_size)
    index = torch.arange(local.numel(), device=local.device)
    return IndexedRouting(
        sorted_ids=_routed(capacity, local.numel(), row).to(torch.int32),
        expert_ids=_scatter(capacity // block_size, -1, blocks, local.to(torch.int32)),
        num_tokens_padded=ends[-1:].to(torch.int32),
        block_size=block_size,
        rows=torch.where(local >= 0, index, -1).view(topk_ids.shape),
    )


def _local(topk_ids: Tensor, num_experts: int, expert_map: Tensor | None) -> Tensor:
    """int64 [T · top_k]: local expert of each routed index, −1 for none."""
    if topk_ids.dim() != 2 or topk_ids.dtype not in (torch.int32, torch.int64):
        raise UsageError(f"topk_ids must be int32 or int64 [T, top_k]; found {topk_ids.dtype} {list(topk_ids.shape)}")
    ids = topk_ids.reshape(-1).long()
    known = num_experts if expert_map is None else expert_map.numel()
    if ids.is_cpu and ids.numel() and not (int(ids.min()) >= -1 and int(ids.max()) < known):
        raise UsageError(f"topk_ids are {int(ids.min())}..{int(ids.max())}: experts are 0..{known - 1}, −1 for none")
    if expert_map is not None:
        ids = torch.where(ids >= 0, expert_map[ids.clamp(min=0)].long(), -1)
    return ids


def _capacity(routed: int, num_experts: int, align: int) -> int:
    """The most rows that ``routed`` choices can need when every expert's rows are padded to ``align``."""
    touched = min(routed, num_experts)
    return max(align, (routed + touched * (align - 1)) // align * align)


def _counts(local: Tensor, num_experts: int) -> Tensor:
    """int64 [num_experts]: routed indices of each expert. (``bincount`` would wait for the device.)"""
    counts = torch.zeros(num_experts + 1, dtype=torch.int64, device=local.device)
    slot = torch.where(local >= 0, local, num_experts)
    return counts.scatter_add_(0, slot, torch.ones_like(slot))[:num_experts]


def _rows(local: Tensor, counts: Tensor, first: Tensor, capacity: int) -> Tensor:
    """Row of each routed index when expert e's rows start at ``first[e]``; ``capacity`` for those routed nowhere."""
    last = counts.numel()
    order = torch.where(local >= 0, local, last).argsort(stable=True)
    place = torch.empty_like(order)
    place[order] = torch.arange(order.numel(), device=order.device)
    shift = first - (counts.cumsum(0) - counts)
    return torch.where(local >= 0, place + shift[local.clamp(min=0)], capacity)


def _scatter(size: int, padding: int, row: Tensor, value: Tensor) -> Tensor:
    """[size] filled with ``padding``, ``value`` at the rows; what is routed nowhere lands in a last place, cut off."""
    out = torch.full((size + 1,), padding, dtype=value.dtype, device=row.device)
    out[row] = value
    return out[:size]


def _routed(size: int, padding: int, row: Tensor) -> Tensor:
    return _scatter(size, padding, row, torch.arange(row.numel(), device=row.device))


def _choices(row: Tensor, local: Tensor, topk_ids: Tensor) -> Tensor:
    return torch.where(local >= 0, row, -1).view(topk_ids.shape)
