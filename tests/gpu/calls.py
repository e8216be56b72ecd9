"""One batch of routed rows through the three operators, into poisoned buffers, and what it should give."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

import chord_runtime as chord
from chord_runtime import routing
from chord_runtime.ops.weight import PackedWeight

MODES = ("contiguous", "masked", "indexed")


@dataclass(frozen=True)
class Batch:
    """Tokens, their experts (−1: none) and the choices' weights, on the GPU."""

    x: Tensor
    ids: Tensor
    weights: Tensor

    @property
    def top_k(self) -> int:
        return self.ids.shape[1]

    @property
    def routed(self) -> Tensor:
        """Which of the T·top_k choices lead to an expert."""
        return self.ids.flatten() >= 0


def batch(tokens: int, experts: int, k: int, top_k: int = 4, draw: str = "even", seed: int = 0) -> Batch:
    """``even``: any experts; ``hot``: all choose the first ones; ``none``: a third of the choices are −1."""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.rand((tokens, experts), generator=generator)
    top_k = min(top_k, experts)
    if draw == "hot":
        scores[:, :top_k] += 1
    ids = scores.topk(top_k, 1).indices.int()
    if draw == "none":
        ids[torch.rand(ids.shape, generator=generator) < 0.33] = -1
    x = torch.randn((tokens, k), generator=generator).bfloat16()
    return Batch(x.cuda(), ids.cuda(), (torch.rand(ids.shape, generator=generator) + 0.5).cuda())


def expected(b: Batch, dense: Tensor, activation: str | None) -> Tensor:
    """float32 [T·top_k, columns]; rows that are routed nowhere are NaN."""
    columns = dense.shape[1] // (1 if activation is None else 2)
    out = torch.full((b.ids.numel(), columns), float("nan"), device="cuda")
    flat, tokens = b.ids.flatten(), torch.arange(b.ids.numel(), device="cuda") // b.top_k
    for expert in flat.unique().tolist():
        if expert >= 0:
            rows = (flat == expert).nonzero().flatten()
            product = b.x[tokens[rows]].float() @ dense[expert].T
            if activation is not None:
                gate, up = product.chunk(2, 1)
                product = torch.nn.functional.silu(gate) * up
            out[rows] = product * b.weights.flatten()[rows, None]
    return out


def call(mode: str, b: Batch, w: PackedWeight, activation: str | None = None, block_size: int = 16) -> Tensor:
    """[T·top_k, columns] by one mode. Rows of the input that must not be read are NaN, and so is the output before.

    Asserts that nothing else was written: not the rows of no expert, nor those after the end.
    """
    columns = w.n // (1 if activation is None else 2)
    choices = b.ids.numel()
    if mode == "indexed":
        r = routing.indexed(b.ids, w.num_experts, block_size)
        buffer = torch.full((choices + 3, columns), float("nan"), dtype=torch.bfloat16, device="cuda")
        args = (r.sorted_ids, r.expert_ids, r.num_tokens_padded, b.top_k, r.block_size)
        chord.indexed(b.x, w, *args, topk_weights=b.weights, activation=activation, out=buffer[:choices])
        written, out = torch.cat([b.routed, b.routed.new_zeros(3)]), buffer[:choices]
    else:
        if mode == "contiguous":
            sorted_rows = routing.contiguous(b.ids, w.num_experts, topk_weights=b.weights)
        else:
            sorted_rows = routing.masked(b.ids, w.num_experts, topk_weights=b.weights)
        a = torch.full((sorted_rows.routed.numel(), w.k), float("nan"), dtype=torch.bfloat16, device="cuda")
        rows = sorted_rows.rows.flatten()
        tokens = torch.arange(choices, device="cuda") // b.top_k
        a[rows[b.routed].long()] = b.x[tokens[b.routed]]
        buffer = torch.full((a.shape[0] + 3, columns), float("nan"), dtype=torch.bfloat16, device="cuda")
        options = {"activation": activation, "row_weight": sorted_rows.row_weight, "out": buffer[:-3]}
        if isinstance(sorted_rows, routing.ContiguousRouting):
            chord.contiguous(a, w, sorted_rows.m_indices, **options)
        else:
            chord.masked(a, w, sorted_rows.masked_m, sorted_rows.expected_m, **options)
        written = torch.zeros(buffer.shape[0], dtype=torch.bool, device="cuda")
        written[rows[b.routed].long()] = True
        out = torch.full((choices, columns), float("nan"), dtype=torch.bfloat16, device="cuda")
        out[b.routed] = buffer[rows[b.routed].long()]
    assert torch.equal(~buffer.isnan().any(1), written), f"{mode}: rows written are not the routed ones"
    assert torch.equal(~buffer.isnan().all(1), written), f"{mode}: rows of no expert were written in part"
    return out


def assert_close(found: Tensor, wanted: Tensor) -> None:
    """BF16 weights and results, FP32 sums: the error is that of rounding, and the same rows are set."""
    assert torch.equal(found.isnan(), wanted.isnan())
    found, wanted = found.float().nan_to_num(), wanted.nan_to_num()
    if wanted.norm() > 0:
        assert ((found - wanted).norm() / wanted.norm()).item() < 4e-3
        assert ((found - wanted).abs().max() / wanted.abs().max()).item() < 1e-2
