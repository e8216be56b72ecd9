"""Routing for the Standard format, without reading the device: which row goes where, and back."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor


@dataclass(frozen=True)
class Aligned:
    """Rows sorted by expert in blocks of ``block``."""

    sorted_ids: Tensor
    expert_ids: Tensor
    num_tokens_padded: Tensor
    top_k: int
    block: int
    routed_rows: int

    @cached_property
    def routed(self) -> Tensor:
        return self.sorted_ids.clamp(max=self.routed_rows - 1)

    @property
    def token(self) -> Tensor:
        return self.routed // self.top_k

    @cached_property
    def m_indices(self) -> Tensor:
        experts = self.expert_ids.repeat_interleave(self.block)[: self.sorted_ids.numel()]
        return torch.where(self.sorted_ids < self.routed_rows, experts, -1)

    @cached_property
    def place(self) -> Tensor:
        places = torch.zeros(self.routed_rows + 1, dtype=torch.int64, device=self.sorted_ids.device)
        row = torch.arange(self.sorted_ids.numel(), device=places.device)
        return places.scatter_(0, self.sorted_ids.clamp(max=self.routed_rows).long(), row)[:-1]


def aligned(local: Tensor, num_experts: int, block: int) -> Aligned:
    """Align local expert ids [tokens, top_k] (-1: another rank's) as vLLM's moe_align_block_size does."""
    flat = local.reshape(-1)
    routed = flat.numel()
    experts = torch.where(flat < 0, num_experts, flat).long()
    counts = torch.zeros(num_experts + 1, dtype=torch.int64, device=flat.device).scatter_add_(
        0, experts, torch.ones_like(experts)
    )[:-1]
    padded = -(-counts // block) * block
    ends = padded.cumsum(0)
    starts = ends - padded
    capacity = -(-(routed + num_experts * (block - 1)) // block) * block
    order = torch.argsort(experts, stable=True)
    sorted_experts = experts[order]
    first = torch.cat((torch.zeros(1, dtype=torch.int64, device=flat.device), counts.cumsum(0)))
    rank = torch.arange(routed, device=flat.device) - first[sorted_experts]
    starts = torch.cat((starts, torch.full((1,), capacity, dtype=torch.int64, device=flat.device)))
    slot = torch.where(sorted_experts < num_experts, starts[sorted_experts] + rank, capacity)
    sorted_ids = torch.full((capacity + 1,), routed, dtype=torch.int32, device=flat.device).scatter_(
        0, slot, order.to(torch.int32)
    )[:-1]
    block_start = torch.arange(0, capacity, block, device=flat.device)
    expert_ids = torch.searchsorted(ends, block_start, right=True)
    expert_ids = torch.where(block_start < ends[-1], expert_ids, -1).to(torch.int32)
    return Aligned(sorted_ids, expert_ids, ends[-1:].to(torch.int32), local.shape[1], block, routed)


def combine(rows: Tensor, place: Tensor | None, local: Tensor, out: Tensor) -> None:
    tokens, top_k = local.shape
    picked = rows if place is None else rows[place]
    picked = torch.where((local >= 0).view(tokens, top_k, 1), picked.view(tokens, top_k, -1), 0)
    torch.sum(picked, 1, out=out)
