"""From a router's choice to the three layouts that the operators take, and back.

On CUDA one kernel sorts the choices, one gathers rows where the layout wants them sorted, and one adds a token's rows;
the plain tensor arithmetic here is what the CPU runs and what those kernels are held against. Shapes are fixed and
nothing waits for the device, so it can be captured in a CUDA graph. What values there are is checked on the CPU only,
and not under ``torch.compile``: an expert or a row that does not exist is an error there, and undefined elsewhere.

A *routed index* is token · top_k + choice. Choices of −1, and experts that ``expert_map`` sends to −1 (another rank's),
are routed nowhere. Rows of one expert keep the order of their routed indices, in all three layouts.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import torch
from torch import Tensor

from chord_runtime.errors import UsageError
from chord_runtime.format.layout import Mode
from chord_runtime.ops.api import check_block_size, check_out, integer
from chord_runtime.ops.library import refuse_grad
from chord_runtime.ops.route import MAX_EXPERTS, Layout, capacity
from chord_runtime.ops.validate import RUN_ROWS

_OPS = torch.ops.chord


@dataclass(frozen=True)
class ContiguousRouting:
    """Arguments of :func:`chord_runtime.contiguous`."""

    m_indices: Tensor
    """int32 [M], expert of each row, −1 for padding."""
    routed: Tensor
    """int32 [M], routed index of each row, −1 for padding: :func:`gather` activations by it."""
    rows: Tensor
    """int32 [T, top_k], row of each choice, −1 if it is routed nowhere: :func:`combine` results by it."""
    row_weight: Tensor | None
    """float32 [M], the choice's weight, 0 for padding; None if no weights were given."""


@dataclass(frozen=True)
class MaskedRouting:
    """Arguments of :func:`chord_runtime.masked`."""

    masked_m: Tensor
    """int32 [G], rows of each expert."""
    routed: Tensor
    """int32 [G·max_m], routed index of each row, −1 for rows beyond ``masked_m``."""
    rows: Tensor
    """int32 [T, top_k], row of each choice, −1 if it is routed nowhere."""
    row_weight: Tensor | None
    """float32 [G·max_m], as in contiguous."""
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
    num_experts: int
    """Of all ranks."""
    rows: Tensor
    """int32 [T, top_k], row of the output of each choice: its routed index, −1 if it is routed nowhere."""


def convention(modes: Collection[Mode]) -> Mode:
    """How a layer whose weights were packed for ``modes`` runs, unless told otherwise; a row's bits are the same.

    Indexed wherever it can, faster at every size measured (docs/layer.md); else contiguous; else masked.
    """
    return next((mode for mode in (Mode.INDEXED, Mode.CONTIGUOUS, Mode.MASKED) if mode in modes), Mode.INDEXED)


def block_rows(routed: int, num_experts: int) -> int:
    """Block size to ask of :func:`indexed`: small, for the kernels merge blocks of one expert, and padding costs."""
    return 8 if routed < 8 * num_experts else 16


def contiguous(
    topk_ids: Tensor, num_experts: int, expert_map: Tensor | None = None, topk_weights: Tensor | None = None
) -> ContiguousRouting:
    """Rows sorted by expert, every expert's run starting at a multiple of 128.

    Args:
        topk_ids: int32 or int64 [T, top_k], experts chosen, −1 for none.
        num_experts: experts on this rank.
        expert_map: int32 [global experts] → local expert or −1; without it ids are local already.
        topk_weights: float32 [T, top_k], to be laid out as ``row_weight``.

    M is the most that any choice of T · top_k experts can need, whatever the values are. Raises UsageError for ids,
    weights or a map of another dtype, shape or device.
    """
    check(topk_ids, expert_map, topk_weights)
    num_experts = integer("num_experts", num_experts)
    if _kernel_takes(topk_ids, num_experts, expert_map):
        refuse_grad(topk_ids, topk_weights)
        routed, m_indices, _, rows, weights = _OPS.align(
            topk_ids, expert_map, topk_weights, Layout.CONTIGUOUS, num_experts, RUN_ROWS
        )
        return ContiguousRouting(m_indices, routed, rows, None if topk_weights is None else weights)
    local = _local(topk_ids, num_experts, expert_map)
    size = capacity(local.numel(), num_experts, RUN_ROWS)
    counts = _counts(local, num_experts)
    padded = (counts + RUN_ROWS - 1) // RUN_ROWS * RUN_ROWS
    row = _rows(local, counts, padded.cumsum(0) - padded, size)
    m_indices = _scatter(size, -1, row, local.to(torch.int32))
    routed = _routed(size, -1, row)
    return ContiguousRouting(m_indices, routed, _choices(row, local, topk_ids), _weights(routed, topk_weights))


def masked(
    topk_ids: Tensor,
    num_experts: int,
    max_m: int | None = None,
    expert_map: Tensor | None = None,
    topk_weights: Tensor | None = None,
) -> MaskedRouting:
    """``max_m`` rows for each expert; by default T, enough when a token chooses an expert at most once.

    Arguments are those of :func:`contiguous`. Raises UsageError when an expert was chosen more than ``max_m`` times, on
    the CPU; on CUDA, where that is not read, its last choices are routed nowhere.
    """
    check(topk_ids, expert_map, topk_weights)
    num_experts = integer("num_experts", num_experts)
    max_m = topk_ids.shape[0] if max_m is None else integer("max_m", max_m)
    if max_m < min(1, topk_ids.numel()):
        raise UsageError(f"max_m, the rows of each expert, must be at least 1; found {max_m}")
    expected_m = max(1, -(-topk_ids.numel() // _all_experts(num_experts, expert_map)))
    if _kernel_takes(topk_ids, num_experts, expert_map):
        refuse_grad(topk_ids, topk_weights)
        routed, masked_m, _, rows, weights = _OPS.align(
            topk_ids, expert_map, topk_weights, Layout.MASKED, num_experts, max_m
        )
        return MaskedRouting(masked_m, routed, rows, None if topk_weights is None else weights, max_m, expected_m)
    local = _local(topk_ids, num_experts, expert_map)
    counts = _counts(local, num_experts)
    if _reads_values(counts) and int(counts.max()) > max_m:
        raise UsageError(f"an expert was chosen {int(counts.max())} times: max_m must be at least that, found {max_m}")
    first = torch.arange(num_experts, device=local.device) * max_m
    row = _rows(local, counts, first, num_experts * max_m)
    fits = row < (local + 1) * max_m
    local = torch.where(fits, local, -1)
    row = torch.where(fits, row, num_experts * max_m)
    routed = _routed(num_experts * max_m, -1, row)
    return MaskedRouting(
        masked_m=counts.clamp(max=max_m).to(torch.int32),
        routed=routed,
        rows=_choices(row, local, topk_ids),
        row_weight=_weights(routed, topk_weights),
        max_m=max_m,
        expected_m=expected_m,
    )


def indexed(
    topk_ids: Tensor, num_experts: int, block_size: int = 16, expert_map: Tensor | None = None
) -> IndexedRouting:
    """Blocks of ``block_size`` routed indices of one expert. Other arguments are those of :func:`contiguous`."""
    check(topk_ids, expert_map, None)
    num_experts, block_size = integer("num_experts", num_experts), check_block_size(block_size)
    total = _all_experts(num_experts, expert_map)
    if _kernel_takes(topk_ids, num_experts, expert_map):
        sorted_ids, expert_ids, used, rows, _ = _OPS.align(
            topk_ids, expert_map, None, Layout.INDEXED, num_experts, block_size
        )
        return IndexedRouting(sorted_ids, expert_ids, used, block_size, total, rows)
    local = _local(topk_ids, num_experts, expert_map)
    size = capacity(local.numel(), num_experts, block_size)
    counts = _counts(local, num_experts)
    padded = (counts + block_size - 1) // block_size * block_size
    ends = padded.cumsum(0)
    row = _rows(local, counts, ends - padded, size)
    blocks = torch.where(row < size, row // block_size, size // block_size)
    index = torch.arange(local.numel(), dtype=torch.int32, device=local.device)
    return IndexedRouting(
        sorted_ids=_routed(size, local.numel(), row),
        expert_ids=_scatter(size // block_size, -1, blocks, local.to(torch.int32)),
        num_tokens_padded=ends[-1:].to(torch.int32),
        block_size=block_size,
        num_experts=total,
        rows=torch.where(local >= 0, index, -1).view(topk_ids.shape),
    )


def gather(x: Tensor, routed: Tensor, topk_ids: Tensor) -> Tensor:
    """Row i of the result, [len(routed), hidden], is row ``routed[i] // top_k`` of ``x`` [T, hidden]; padding rows,
    which the operators neither read nor write, are anything.
    """
    top_k = topk_ids.shape[-1]
    if x.dim() != 2 or routed.dim() != 1 or topk_ids.dim() != 2 or topk_ids.shape[0] != x.shape[0]:
        raise UsageError(
            f"x is [T, hidden], routed [M] and topk_ids [T, top_k]; found {list(x.shape)}, {list(routed.shape)} and "
            f"{list(topk_ids.shape)}"
        )
    if _reads_values(routed) and int(routed.max()) >= topk_ids.numel():
        raise UsageError(f"routed holds {int(routed.max())}: routed indices are below {topk_ids.numel()} here")
    if x.is_cuda:
        refuse_grad(x, None)
        gathered: Tensor = _OPS.gather(x, routed, topk_ids.numel(), top_k)
        return gathered
    if not topk_ids.numel():
        return x.new_empty((routed.shape[0], x.shape[1]))
    return x[routed.clamp(min=0) // top_k]


def combine(results: Tensor, rows: Tensor, out: Tensor, *, overlap: bool = False) -> Tensor:
    """``out[t]`` = Σ over j of ``results[rows[t, j]]``, −1 for none: in FP32, in the order of j, rounded once.

    ``overlap`` promises that the kernel launched last on this stream did not write ``rows``, and waited for the one
    before it, as Chord's do: it may still be running while they are read.
    """
    if results.dim() != 2 or rows.dim() != 2:
        raise UsageError(f"results are [M, hidden], rows [T, top_k]; found {list(results.shape)}, {list(rows.shape)}")
    check_out(out, (rows.shape[0], results.shape[1]), results)
    if _reads_values(rows) and int(rows.max()) >= results.shape[0]:
        raise UsageError(f"rows holds {int(rows.max())}: there are {results.shape[0]} results")
    if not results.shape[0]:
        return out.zero_()
    if results.is_cuda:
        refuse_grad(results, None)
        _OPS.combine(results, rows, out, overlap)
        return out
    total = torch.zeros(rows.shape[0], results.shape[1], dtype=torch.float32, device=results.device)
    for row in rows.unbind(1):
        # Rows that no expert wrote may hold anything, so they are replaced rather than multiplied by zero.
        total += torch.where((row >= 0).unsqueeze(1), results[row.clamp(min=0)], 0)
    return out.copy_(total)


def _all_experts(num_experts: int, expert_map: Tensor | None) -> int:
    """Experts of all ranks, over which choices are spread."""
    return max(1, num_experts if expert_map is None else expert_map.numel())


def check(topk_ids: Tensor, expert_map: Tensor | None, topk_weights: Tensor | None) -> None:
    """Raise UsageError for what does not fit the choices, by shape, dtype and device alone."""
    if topk_ids.dim() != 2 or topk_ids.dtype not in (torch.int32, torch.int64):
        raise UsageError(f"topk_ids must be int32 or int64 [T, top_k]; found {topk_ids.dtype} {list(topk_ids.shape)}")
    if topk_weights is not None and (
        topk_weights.dtype != torch.float32
        or topk_weights.shape != topk_ids.shape
        or topk_weights.device != topk_ids.device
    ):
        raise UsageError(
            f"topk_weights must be float32 {list(topk_ids.shape)} on {topk_ids.device}, like topk_ids; "
            f"found {topk_weights.dtype} {list(topk_weights.shape)} on {topk_weights.device}"
        )
    if expert_map is not None and (
        expert_map.dtype != torch.int32 or expert_map.dim() != 1 or expert_map.device != topk_ids.device
    ):
        raise UsageError(
            f"expert_map must be int32 [global experts] on {topk_ids.device}; "
            f"found {expert_map.dtype} {list(expert_map.shape)} on {expert_map.device}"
        )


def _kernel_takes(topk_ids: Tensor, num_experts: int, expert_map: Tensor | None) -> bool:
    """Whether the align kernel does it: on CUDA, unless there are more experts than it counts."""
    return topk_ids.is_cuda and max(num_experts, 0 if expert_map is None else expert_map.numel()) <= MAX_EXPERTS


def _local(topk_ids: Tensor, num_experts: int, expert_map: Tensor | None) -> Tensor:
    """int64 [T · top_k]: local expert of each routed index, −1 for none."""
    ids = topk_ids.reshape(-1).long()
    known = num_experts if expert_map is None else expert_map.numel()
    if _reads_values(ids) and not (int(ids.min()) >= -1 and int(ids.max()) < known):
        raise UsageError(f"topk_ids are {int(ids.min())}..{int(ids.max())}: experts are 0..{known - 1}, −1 for none")
    if expert_map is not None:
        ids = torch.where(ids >= 0, expert_map[ids.clamp(min=0)].long(), -1)
    return ids


def _reads_values(tensor: Tensor) -> bool:
    """Whether values are checked: not on CUDA, where reading waits, nor while compiling, when there are none."""
    return tensor.is_cpu and not torch.compiler.is_compiling() and tensor.numel() > 0


def _counts(local: Tensor, num_experts: int) -> Tensor:
    """int64 [num_experts]: routed indices of each expert. (``bincount`` would wait for the device.)"""
    counts = torch.zeros(num_experts + 1, dtype=torch.int64, device=local.device)
    slot = torch.where(local >= 0, local, num_experts)
    return counts.scatter_add_(0, slot, torch.ones_like(slot))[:num_experts]


def _rows(local: Tensor, counts: Tensor, first: Tensor, nowhere: int) -> Tensor:
    """Row of each routed index when expert e's rows start at ``first[e]``; ``nowhere`` for those routed nowhere."""
    last = counts.numel()
    order = torch.where(local >= 0, local, last).argsort(stable=True)
    place = torch.empty_like(order)
    place[order] = torch.arange(order.numel(), device=order.device)
    shift = first - (counts.cumsum(0) - counts)
    return torch.where(local >= 0, place + shift[local.clamp(min=0)], nowhere)


def _scatter(size: int, padding: int, row: Tensor, value: Tensor) -> Tensor:
    """[size] filled with ``padding``, ``value`` at the rows; what is routed nowhere lands in a last place, cut off."""
    out = torch.full((size + 1,), padding, dtype=value.dtype, device=row.device)
    out[row] = value
    return out[:size]


def _routed(size: int, padding: int, row: Tensor) -> Tensor:
    return _scatter(size, padding, row, torch.arange(row.numel(), dtype=torch.int32, device=row.device))


def _choices(row: Tensor, local: Tensor, topk_ids: Tensor) -> Tensor:
    return torch.where(local >= 0, row, -1).to(torch.int32).view(topk_ids.shape)


def _weights(routed: Tensor, topk_weights: Tensor | None) -> Tensor | None:
    if topk_weights is None:
        return None
    if not topk_weights.numel():
        return topk_weights.new_zeros(routed.shape)
    return torch.where(routed >= 0, topk_weights.reshape(-1)[routed.clamp(min=0)], 0)
