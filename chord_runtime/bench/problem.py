"""The tensors of one case: random weights, one routing draw, inputs in the mode's layout, and the reference's answer.

Random normal activations, uniform codes, normal scales: constant data would draw less power and flatter every kernel.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from chord_runtime.bench.cases import MAX_M, TOP_K, Case, Stage
from chord_runtime.errors import KernelError
from chord_runtime.format.block import GROUP_SIZE, packed_bytes
from chord_runtime.format.layout import Mode, RowOrder
from chord_runtime.format.packing import dequantize, pack
from chord_runtime.ops import api, reference
from chord_runtime.ops.weight import PackedWeight
from chord_runtime.routing import indexed

ALIGN_BLOCK = 16
"""Block size asked of the aligner in indexed mode: small blocks pad little, and the kernels merge them."""

SCALE_STD = 0.02
MAX_ERROR = 2e-3
"""Largest accepted relative error (Frobenius): both sides round the same FP32 sums, taken in another order."""


@dataclass(frozen=True)
class Weights:
    """The experts of one projection: packed for Chord, and dequantised for torch if it runs."""

    packed: PackedWeight

    @cached_property
    def dense(self) -> Tensor:
        """bfloat16 [experts, N, K] in the packed row order."""
        w = self.packed
        return dequantize(w.data.view(-1), w.num_experts * w.n, w.k).view(w.num_experts, w.n, w.k)


@dataclass(frozen=True)
class Routing:
    """Who computes what: the same draw for every contender."""

    counts: Tensor
    """int32 [experts], rows of each."""
    topk_ids: Tensor | None
    """int32 [tokens, 8]; None where every expert gets the same number of rows."""

    @property
    def active(self) -> int:
        """Experts with at least one row."""
        return int((self.counts > 0).sum())


@dataclass(frozen=True)
class Problem:
    """One case, ready to call."""

    case: Case
    weights: Weights
    routing: Routing
    rows: Tensor
    """bfloat16 input in the mode's own shape."""
    out: Tensor
    """bfloat16, what Chord writes."""
    call: Callable[[], object]
    """Chord's public operation on these tensors."""
    compute_reference: Callable[[Tensor], None]
    """Writes the reference's answer into a tensor like ``out``."""

    def check(self) -> float:
        """Run Chord once into a poisoned output and compare; returns the relative error.

        Raises:
            KernelError: a wrong value, or a row written that no expert owns, or left unwritten.
        """
        expected = torch.full_like(self.out, float("nan"))
        self.compute_reference(expected)
        self.out.fill_(float("nan"))
        self.call()
        owned = ~expected.isnan()
        if not torch.equal(owned, ~self.out.isnan()):
            raise KernelError(f"{self.case.key}: rows were written that no expert owns, or were left unwritten")
        found, wanted = self.out[owned].float(), expected[owned].float()
        error = float((found - wanted).norm() / wanted.norm())
        if not error <= MAX_ERROR:
            raise KernelError(
                f"{self.case.key}: relative error {error:.2e} against the reference, over {MAX_ERROR:.0e}"
            )
        return error


def make_weights(case: Case, device: str) -> Weights:
    """Random experts of the case's projection. They depend on its shape only, so cases of one shape can share them."""
    order = RowOrder.GATE_UP_8 if case.stage is Stage.GATE_UP else RowOrder.PLAIN
    return Weights(random_experts(case.scenario.experts, case.n, case.k, order, device))


def random_experts(experts: int, n: int, k: int, order: RowOrder, device: str) -> PackedWeight:
    """Uniform codes, normal scales; packed at once, as strips of rows are the outermost axis of the packed layout."""
    generator = torch.Generator(device).manual_seed(n * k)
    rows = experts * n
    words = torch.randint(-(2**31), 2**31, (rows, k // 8), dtype=torch.int32, device=device, generator=generator)
    scale = torch.randn((rows, k // GROUP_SIZE), device=device, generator=generator).mul_(SCALE_STD).bfloat16()
    return PackedWeight(pack(words, scale).view(experts, packed_bytes(n, k)), n, k, order)


def draw_routing(case: Case, device: str) -> Routing:
    """Equal rows for masked and contiguous; else the top-8 of normal scores, drawn with the token count as seed."""
    experts = case.scenario.experts
    if case.scenario.mode is not Mode.INDEXED:
        return Routing(torch.full((experts,), case.point, dtype=torch.int32, device=device), None)
    torch.manual_seed(case.tokens)  # the device's own generator: with CUDA, the draw that peers publish figures for
    ids = torch.randn((case.tokens, experts), dtype=torch.float32, device=device).topk(TOP_K, 1).indices.int()
    return Routing(ids.view(-1).bincount(minlength=experts).int(), ids)


def make_problem(case: Case, weights: Weights, device: str) -> Problem:
    """Inputs, routing buffers and output of one case."""
    make = {Mode.MASKED: _masked, Mode.CONTIGUOUS: _contiguous, Mode.INDEXED: _indexed}
    return make[case.scenario.mode](case, weights, draw_routing(case, device), device)


def _masked(case: Case, weights: Weights, routing: Routing, device: str) -> Problem:
    w = weights.packed
    a = _rows((w.num_experts, MAX_M, w.k), device)
    out = a.new_empty((w.num_experts * MAX_M, w.n))
    return Problem(
        case, weights, routing, a, out,
        lambda: api.masked(a, w, routing.counts, case.point, out=out),
        lambda expected: reference.masked(
            a, w.data, routing.counts, case.point, None, expected, w.n, w.interleaved, False
        ),
    )  # fmt: skip


def _contiguous(case: Case, weights: Weights, routing: Routing, device: str) -> Problem:
    w = weights.packed
    a = _rows((case.routed, w.k), device)
    out = a.new_empty((case.routed, w.n))
    m_indices = torch.arange(w.num_experts, dtype=torch.int32, device=device).repeat_interleave(routing.counts)
    return Problem(
        case, weights, routing, a, out,
        lambda: api.contiguous(a, w, m_indices, out=out),
        lambda expected: reference.contiguous(a, w.data, m_indices, None, expected, w.n, w.interleaved, False),
    )  # fmt: skip


def _indexed(case: Case, weights: Weights, routing: Routing, device: str) -> Problem:
    w = weights.packed
    assert routing.topk_ids is not None
    blocks = indexed(routing.topk_ids, w.num_experts, ALIGN_BLOCK)
    buffers = (blocks.sorted_ids, blocks.expert_ids, blocks.num_tokens_padded)
    x = _rows((case.routed // case.fan_out, w.k), device)
    out = x.new_empty((case.routed, w.n))
    return Problem(
        case, weights, routing, x, out,
        lambda: api.indexed(x, w, *buffers, case.fan_out, ALIGN_BLOCK, out=out),
        lambda expected: reference.indexed(
            x, w.data, *buffers, case.fan_out, ALIGN_BLOCK, None, expected, w.n, w.interleaved, False
        ),
    )  # fmt: skip


def _rows(shape: tuple[int, ...], device: str) -> Tensor:
    return torch.randn(shape, dtype=torch.bfloat16, device=device)
