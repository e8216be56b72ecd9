"""A whole MoE layer: equal bits in three modes, right against FP64, and ranks that add up."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import chord_runtime as chord
from chord_runtime.errors import ModeError, UsageError
from chord_runtime.layer import PackedLayer, moe_layer
from chord_runtime.ops.route import MAX_EXPERTS
from chord_runtime.ops.weight import PackedWeight
from tests.generators import ROUTINGS, activations, experts, layer

TOTAL, TOP_K, HIDDEN = 8, 3, 128
MODES = list(chord.Mode)


def expected_layer(x: Tensor, ids: Tensor, weights: Tensor, w13: Tensor, w2: Tensor) -> Tensor:
    """FP64, rounded to BF16 where the operators round: after SwiGLU and after the weight."""
    total = torch.zeros(x.shape, dtype=torch.float64)
    for token in range(len(x)):
        for choice, expert in enumerate(ids[token].tolist()):
            if expert >= 0:
                gate, up = (w13[expert].double() @ x[token].double()).chunk(2)
                hidden = (torch.nn.functional.silu(gate) * up).bfloat16()
                row = w2[expert].double() @ hidden.double() * weights[token, choice].double()
                total[token] += row.bfloat16().double()
    return total


@pytest.mark.parametrize("draw", ROUTINGS)
@pytest.mark.parametrize("tokens", [1, 2, 45])
def test_the_modes_agree_bit_for_bit_and_are_right(draw: str, tokens: int) -> None:
    packed, w13, w2 = layer(tuple(range(TOTAL)), TOTAL, HIDDEN)
    x, ids, weights = activations(tokens, HIDDEN), ROUTINGS[draw](tokens, TOP_K, TOTAL), torch.rand(tokens, TOP_K)
    before = ids.clone(), weights.clone(), x.clone()
    found = [moe_layer(x, packed, ids, weights, mode=mode, max_m=tokens * TOP_K) for mode in MODES]
    assert all(torch.equal(found[0], other) for other in found[1:])
    assert all(map(torch.equal, before, (ids, weights, x)))
    expected = expected_layer(x, ids, weights, w13, w2)
    # Two sums may round to neighbouring BF16 values once, in the hidden row or in a choice's row.
    difference = (found[0].double() - expected).abs()
    assert bool((difference <= expected.abs() * 2**-7 + expected.abs().max() * 2**-8).all())
    relative = float(difference.norm() / expected.norm().clamp(min=1e-9))
    assert relative < 2**-8


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "held", [((0, 1, 2, 3), (4, 5, 6, 7)), ((0, 2, 4, 6), (1, 3, 5, 7)), ((7, 0), (3,), (1, 2, 4, 5, 6))]
)
def test_ranks_add_up(mode: chord.Mode, held: tuple[tuple[int, ...], ...]) -> None:
    """Linear, round robin and any other placement: each rank adds its own experts, and only those."""
    whole, _, _ = layer(tuple(range(TOTAL)), TOTAL, HIDDEN)
    x, ids, weights = activations(20, HIDDEN), ROUTINGS["sentinels"](20, TOP_K, TOTAL), torch.rand(20, TOP_K)
    parts = [moe_layer(x, layer(rank, TOTAL, HIDDEN)[0], ids, weights, mode=mode) for rank in held]
    for rank, part in zip(held, parts, strict=True):
        mine = torch.where(torch.isin(ids, torch.tensor(rank, dtype=torch.int32)), ids, -1)
        assert torch.equal(part, moe_layer(x, whole, mine, weights, mode=mode))
    expected = moe_layer(x, whole, ids, weights).float()
    assert float((sum(part.float() for part in parts) - expected).norm() / expected.norm()) < 2**-7


@pytest.mark.parametrize("mode", MODES)
def test_a_token_does_not_depend_on_its_batch(mode: chord.Mode) -> None:
    packed, _, _ = layer(tuple(range(TOTAL)), TOTAL, HIDDEN)
    x, ids, weights = activations(200, HIDDEN), ROUTINGS["one hot"](200, TOP_K, TOTAL), torch.rand(200, TOP_K)
    whole = moe_layer(x, packed, ids, weights, mode=mode)
    for some in (torch.arange(1), torch.tensor([199, 3, 77]), torch.arange(150, 20, -1)):
        assert torch.equal(moe_layer(x[some], packed, ids[some], weights[some], mode=mode), whole[some])


def test_the_result_goes_where_the_caller_wants() -> None:
    packed, _, _ = layer(tuple(range(TOTAL)), TOTAL, HIDDEN)
    x, ids, weights = activations(5, HIDDEN), ROUTINGS["uniform"](5, TOP_K, TOTAL), torch.rand(5, TOP_K)
    out = torch.full_like(x, float("nan"))
    assert moe_layer(x, packed, ids, weights, out=out) is out
    assert torch.equal(out, moe_layer(x, packed, ids, weights))


def test_no_tokens_and_no_choices() -> None:
    packed, _, _ = layer((0, 1), TOTAL, HIDDEN)
    x = activations(4, HIDDEN)
    nothing = torch.zeros(4, 0, dtype=torch.int32)
    assert not moe_layer(x, packed, nothing, nothing.float()).any()
    assert moe_layer(x[:0], packed, torch.zeros(0, 3, dtype=torch.int32), torch.zeros(0, 3)).shape == (0, HIDDEN)


def test_only_recorded_modes_run() -> None:
    packed, _, _ = layer((0, 1), 2, HIDDEN, modes=(chord.Mode.MASKED,))
    x, ids, weights = activations(4, HIDDEN), torch.zeros(4, 1, dtype=torch.int32), torch.ones(4, 1)
    by_default = moe_layer(x, packed, ids, weights)
    assert torch.equal(by_default, moe_layer(x, packed, ids, weights, mode="masked"))
    with pytest.raises(ModeError, match="contiguous was called on a weight packed for masked"):
        moe_layer(x, packed, ids, weights, mode="contiguous")
    with pytest.raises(ModeError, match="contiguous was called on a weight packed for masked"):
        moe_layer(x[:0], packed, ids[:0], weights[:0], mode="contiguous")
    with pytest.raises(UsageError, match="mode 'sideways': supported are contiguous, masked, indexed"):
        moe_layer(x, packed, ids, weights, mode="sideways")


def test_wrong_arguments_are_refused() -> None:
    packed, _, _ = layer((0, 1), 2, HIDDEN)
    x, ids, weights = activations(4, HIDDEN), torch.zeros(4, 1, dtype=torch.int32), torch.ones(4, 1)
    with pytest.raises(UsageError, match=r"found \[4, 128\] and \[3, 1\]"):
        moe_layer(x, packed, ids[:3], weights[:3])
    with pytest.raises(UsageError, match=r"float32 \[4, 1\] on cpu, like topk_ids; found torch.bfloat16"):
        moe_layer(x, packed, ids, weights.bfloat16())
    with pytest.raises(UsageError, match=r"topk_weights must be float32 \[4, 1\]"):
        moe_layer(x, packed, ids, weights[:, :0])
    with pytest.raises(UsageError, match="x must be contiguous bfloat16"):
        moe_layer(x.half(), packed, ids, weights)
    with pytest.raises(UsageError, match=r"experts are 0\.\.1"):
        moe_layer(x, packed, ids + 2, weights)
    wrong: Any = None
    with pytest.raises(UsageError, match="topk_weights must be a tensor; found NoneType"):
        moe_layer(x, packed, ids, wrong)
    wrong = {1: packed}
    with pytest.raises(UsageError, match=r"layer must be a PackedLayer, such as .*; found dict"):
        moe_layer(x, wrong, ids, weights)


@pytest.mark.parametrize("mode", [None, *MODES])
@pytest.mark.parametrize("tokens", [0, 4])
@pytest.mark.parametrize("top_k", [0, 1])
@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"x": lambda t: torch.zeros(t, HIDDEN // 2).bfloat16()}, "x must be contiguous bfloat16"),
        ({"x": lambda t: torch.zeros(t, HIDDEN).half()}, "x must be contiguous bfloat16"),
        ({"x": lambda _: torch.zeros(HIDDEN, 4).bfloat16().T}, "x must be contiguous bfloat16|x is"),
        ({"x": lambda t: torch.zeros(t, HIDDEN, device="meta").bfloat16()}, "x must be contiguous bfloat16"),
        ({"out": lambda t: torch.zeros(t, HIDDEN, dtype=torch.int8)}, "out must be contiguous bfloat16"),
        ({"out": lambda t: torch.zeros(t, HIDDEN).half()}, "out must be contiguous bfloat16"),
        ({"out": lambda t: torch.zeros(t + 1, HIDDEN).bfloat16()}, "out must be contiguous bfloat16"),
        ({"out": lambda t: torch.zeros(1, 1).bfloat16().expand(t + 2, HIDDEN)}, "out must be contiguous bfloat16"),
        ({"out": lambda t: torch.zeros(t, HIDDEN, device="meta").bfloat16()}, "out must be contiguous bfloat16"),
        ({"mode": "sideways"}, "mode 'sideways'"),
        ({"block_size": 0}, "block_size must be at least 1; found 0"),
        ({"block_size": -4}, "block_size must be at least 1; found -4"),
    ],
)
def test_what_does_not_fit_is_refused_in_every_mode(
    mode: chord.Mode | None, tokens: int, top_k: int, wrong: dict[str, Any], message: str
) -> None:
    packed, _, _ = layer((0, 1), 2, HIDDEN)
    given = {"x": activations(tokens, HIDDEN), "mode": mode}
    given |= {name: value(tokens) if callable(value) else value for name, value in wrong.items()}
    ids = torch.zeros(tokens, top_k, dtype=torch.int32)
    with pytest.raises(UsageError, match=message):
        moe_layer(layer=packed, topk_ids=ids, topk_weights=ids.float(), **given)


def test_weights_that_do_not_belong_together_are_refused() -> None:
    w13, w2 = experts(2, 128, HIDDEN, gate_up=True)[0], experts(2, HIDDEN, 64)[0]
    PackedLayer(w13, w2, (0, 1), 4)
    for wrong in (
        lambda: PackedLayer(w2, w13, (0, 1), 4),
        lambda: PackedLayer(PackedWeight(w13.data, 128, HIDDEN), w2, (0, 1), 4),
        lambda: PackedLayer(w13, experts(2, HIDDEN, 128)[0], (0, 1), 4),
    ):
        with pytest.raises(UsageError, match="make no layer"):
            wrong()
    for also in (
        lambda: PackedLayer(w13, w2, (0, 1, 2), 4),
        lambda: PackedLayer(w13, experts(3, HIDDEN, 64)[0], (0, 1), 4),
        lambda: PackedLayer(w13, experts(2, 256, 64)[0], (0, 1), 4),
    ):
        with pytest.raises(UsageError, match="do not belong together"):
            also()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("draw", ROUTINGS)
def test_on_a_gpu_the_modes_agree_and_match_the_cpu(draw: str) -> None:
    packed, _, _ = layer(tuple(range(TOTAL)), TOTAL, HIDDEN)
    on_gpu = PackedLayer(
        *(PackedWeight(w.data.cuda(), w.n, w.k, w.row_order) for w in (packed.w13, packed.w2)), packed.experts, TOTAL
    )
    x, ids, weights = activations(45, HIDDEN), ROUTINGS[draw](45, TOP_K, TOTAL), torch.rand(45, TOP_K)
    inputs = x.cuda(), on_gpu, ids.cuda(), weights.cuda()
    found = [moe_layer(*inputs, mode=mode, max_m=45 * TOP_K).cpu() for mode in MODES]
    assert all(torch.equal(found[0], other) for other in found[1:])
    expected = moe_layer(x, packed, ids, weights).float()
    assert float((found[0].float() - expected).norm()) <= 2**-8 * float(expected.norm())


@pytest.mark.parametrize(("total", "overlaps"), [(TOTAL, True), (MAX_EXPERTS + 8, False)])
def test_what_torch_sorts_does_not_overlap(total: int, overlaps: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Inductor may put a copy of the routing right before down, which then must wait for it."""
    promised, indexed = [], chord.indexed

    def watched(*args: Any, overlap: bool = False, **named: Any) -> Tensor:
        promised.append(overlap)
        return indexed(*args, overlap=overlap, **named)

    monkeypatch.setattr("chord_runtime.layer.api.indexed", watched)
    packed, _, _ = layer((0, 1, 2, 3), total, HIDDEN)
    moe_layer(activations(5, HIDDEN), packed, ROUTINGS["uniform"](5, TOP_K, 4), torch.rand(5, TOP_K), mode="indexed")
    assert promised == [False, overlaps]
