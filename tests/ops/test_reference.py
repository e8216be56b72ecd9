"""The CPU operators against dense arithmetic, row by row, in every mode and routing."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import chord_runtime as chord
from chord_runtime import routing
from chord_runtime.ops.weight import PackedWeight
from tests.generators import KIMI_SHAPES, ROUTINGS, SMALL_SHAPES, activations, experts

EXPERTS, TOP_K = 6, 3
NAN = float("nan")


def expected_rows(rows: Tensor, weight: Tensor, swiglu: bool = False, row_weight: Tensor | None = None) -> Tensor:
    """FP64: far more exact than what is tested."""
    result = rows.double() @ weight.double().mT
    if swiglu:
        gate, up = result.chunk(2, -1)
        result = gate / (1 + (-gate).exp()) * up
    return result if row_weight is None else result * row_weight.double().unsqueeze(-1)


def assert_close(found: Tensor, expected: Tensor) -> None:
    """One rounding to BF16 (up to 2^-8 of the value), and what an FP32 sum loses where terms cancel."""
    assert found.dtype == torch.bfloat16 and found.shape == expected.shape
    difference = (found.double() - expected).abs()
    assert bool((difference <= expected.abs() * 2**-8 * 1.001 + expected.abs().max() * 1e-5).all())


@pytest.fixture(scope="module", params=SMALL_SHAPES, ids=str)
def weights(request: pytest.FixtureRequest) -> dict[bool, tuple[PackedWeight, Tensor]]:
    """gate_up → packed and dense."""
    n, k = request.param
    return {gate_up: experts(EXPERTS, n, k, gate_up=gate_up) for gate_up in (False, True)}


VARIANTS = [(False, None), (True, None), (True, "swiglu")]


@pytest.mark.parametrize(("gate_up", "activation"), VARIANTS)
@pytest.mark.parametrize("weighted", [False, True])
def test_contiguous(
    weights: dict[bool, tuple[PackedWeight, Tensor]], gate_up: bool, activation: str | None, weighted: bool
) -> None:
    packed, dense = weights[gate_up]
    runs = [(3, 128), (-1, 128), (0, 5), (-1, 123), (5, 127), (-1, 1), (3, 128)]
    m_indices = torch.cat([torch.full((rows,), expert, dtype=torch.int32) for expert, rows in runs])
    a = activations(len(m_indices), packed.k)
    a[m_indices < 0] = NAN
    row_weight = torch.rand(len(a)) if weighted else None
    out = torch.full((len(a), packed.n // 2 if activation else packed.n), NAN, dtype=torch.bfloat16)
    found = chord.contiguous(a, packed, m_indices, activation=activation, row_weight=row_weight, out=out)
    assert found is out
    assert bool(out[m_indices < 0].isnan().all())
    for row in (m_indices >= 0).nonzero().flatten().tolist()[::7]:
        weight = None if row_weight is None else row_weight[row : row + 1]
        assert_close(
            out[row : row + 1], expected_rows(a[row : row + 1], dense[m_indices[row]], bool(activation), weight)
        )


@pytest.mark.parametrize(("gate_up", "activation"), VARIANTS)
@pytest.mark.parametrize("counts", [[0, 9, 1, 0, 4, 9], [0] * 6, [9] * 6])
@pytest.mark.parametrize("flat", [False, True])
def test_masked(
    weights: dict[bool, tuple[PackedWeight, Tensor]],
    gate_up: bool,
    activation: str | None,
    counts: list[int],
    flat: bool,
) -> None:
    packed, dense = weights[gate_up]
    a = activations(EXPERTS, 9, packed.k)
    row_weight = torch.rand(EXPERTS, 9)
    columns = packed.n // 2 if activation else packed.n
    for group, count in enumerate(counts):
        a[group, count:] = NAN
    out = torch.full((EXPERTS * 9, columns), NAN, dtype=torch.bfloat16)
    given = a.view(-1, packed.k) if flat else a
    chord.masked(
        given, packed, torch.tensor(counts, dtype=torch.int32), 4, activation=activation, row_weight=row_weight, out=out
    )
    for group, count in enumerate(counts):
        found = out.view(EXPERTS, 9, columns)[group]
        assert bool(found[count:].isnan().all())
        if count:
            expected = expected_rows(a[group, :count], dense[group], bool(activation), row_weight[group, :count])
            assert_close(found[:count], expected)


@pytest.mark.parametrize("draw", ROUTINGS)
@pytest.mark.parametrize("block_size", [1, 8, 16, 64])
@pytest.mark.parametrize(("gate_up", "activation"), VARIANTS)
def test_indexed(draw: str, block_size: int, gate_up: bool, activation: str | None) -> None:
    packed, dense = experts(EXPERTS, 128, 64, gate_up=gate_up)
    ids = ROUTINGS[draw](11, TOP_K, EXPERTS)
    route = routing.indexed(ids, EXPERTS, block_size)
    sorted_ids, expert_ids = route.sorted_ids.clone(), route.expert_ids.clone()
    used = int(route.num_tokens_padded)
    sorted_ids[used:] = 12345  # a tail that an aligner allocated and never wrote
    expert_ids[used // block_size :] = 777
    padding = sorted_ids == ids.numel()
    sorted_ids[padding] += torch.arange(int(padding.sum()), dtype=torch.int32) % 3  # larger is skipped too
    x, weight = activations(11, packed.k), torch.rand(11, TOP_K)
    out = torch.full((33, packed.n // 2 if activation else packed.n), NAN, dtype=torch.bfloat16)
    chord.indexed(
        x, packed, sorted_ids, expert_ids, route.num_tokens_padded, TOP_K, block_size,
        topk_weights=weight, activation=activation, out=out, validate=False,
    )  # fmt: skip
    for routed, expert in enumerate(ids.view(-1).tolist()):
        if expert < 0:
            assert bool(out[routed].isnan().all())
        else:
            row = x[routed // TOP_K].unsqueeze(0)
            expected = expected_rows(row, dense[expert], bool(activation), weight.view(-1)[routed : routed + 1])
            assert_close(out[routed : routed + 1], expected)


def test_indexed_skips_blocks_of_expert_minus_one() -> None:
    """vLLM's aligner with an expert map: blocks of other ranks' experts are there, and −1."""
    packed, dense = experts(2, 128, 64)
    ids = ROUTINGS["uniform"](10, 2, 4)
    route = routing.indexed(ids, 4, 8)
    expert_map = torch.tensor([-1, 1, -1, 0, -1], dtype=torch.int32)
    out = torch.full((20, 128), NAN, dtype=torch.bfloat16)
    x = activations(10, 64)
    chord.indexed(x, packed, route.sorted_ids, expert_map[route.expert_ids], route.num_tokens_padded, 2, 8, out=out)
    for routed, expert in enumerate(ids.view(-1).tolist()):
        local = int(expert_map[expert])
        if local < 0:
            assert bool(out[routed].isnan().all())
        else:
            assert_close(out[routed : routed + 1], expected_rows(x[routed // 2].unsqueeze(0), dense[local]))


@pytest.mark.parametrize("draw", ROUTINGS)
@pytest.mark.parametrize("activation", [None, "swiglu"])
def test_a_row_has_the_same_bits_in_every_mode(draw: str, activation: str | None) -> None:
    packed, _ = experts(EXPERTS, 256, 192, gate_up=True)
    ids = ROUTINGS[draw](50, TOP_K, EXPERTS)
    x, weight = activations(50, packed.k), torch.rand(50, TOP_K)
    owned = ids.view(-1) >= 0
    found = []
    c = routing.contiguous(ids, EXPERTS)
    routed = c.routed.clamp(min=0)
    out = chord.contiguous(
        x[routed // TOP_K], packed, c.m_indices, activation=activation, row_weight=weight.view(-1)[routed]
    )
    found.append(out[c.rows.view(-1)[owned]])
    m = routing.masked(ids, EXPERTS, max_m=150)
    routed = m.routed.clamp(min=0)
    rows, row_weight = x[routed // TOP_K], weight.view(-1)[routed]
    out = chord.masked(rows, packed, m.masked_m, m.expected_m, activation=activation, row_weight=row_weight)
    found.append(out[m.rows.view(-1)[owned]])
    i = routing.indexed(ids, EXPERTS, 16)
    out = chord.indexed(
        x,
        packed,
        i.sorted_ids,
        i.expert_ids,
        i.num_tokens_padded,
        TOP_K,
        16,
        topk_weights=weight,
        activation=activation,
    )
    found.append(out[owned])
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


@pytest.mark.parametrize("name", ["ep gate_up", "ep down", "tp16 down"])
def test_a_full_size_expert(name: str) -> None:
    n, k = KIMI_SHAPES[name]
    gate_up = name.endswith("gate_up")
    packed, dense = experts(1, n, k, gate_up=gate_up)
    a = activations(1, 4, k)
    activation = "swiglu" if gate_up else None
    found = chord.masked(a, packed, torch.tensor([3], dtype=torch.int32), 3, activation=activation)
    assert_close(found[:3], expected_rows(a[0, :3], dense[0], gate_up))


def test_swiglu_survives_extreme_gates() -> None:
    """exp(−gate) overflows FP32 for gate < −88: silu is then 0, not NaN."""
    packed, dense = experts(1, 128, 64, gate_up=True)
    a = activations(1, 2, 64) * 2.0**12
    found = chord.masked(a, packed, torch.tensor([2], dtype=torch.int32), 2, activation="swiglu")
    assert float((a[0].double() @ dense[0].double().T).min()) < -100
    assert math.isfinite(float(found.float().abs().max()))
    assert_close(found, expected_rows(a[0], dense[0], True))
