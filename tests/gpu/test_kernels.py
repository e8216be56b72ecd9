"""The kernels on a GPU: every family of shapes and every way of routing, against FP32, and bit against bit."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import chord_runtime as chord
from chord_runtime import routing
from chord_runtime.cuda import launch, select
from chord_runtime.ops.weight import PackedWeight
from tests import generators
from tests.gpu.calls import MODES, Batch, assert_close, batch, call, expected
from tests.gpu.conftest import Weights

pytestmark = pytest.mark.gpu

OUTPUTS = [(False, None), (True, None), (True, "swiglu")]
SHAPES = {
    "small": (6, 384, 192, (1, 7, 60)),
    "one block": (3, 128, 64, (2, 40)),
    "odd blocks": (5, 640, 448, (5, 150)),
    "short K": (5, 2048, 256, (4, 200)),
}


@pytest.mark.parametrize(("gate_up", "activation"), OUTPUTS)
@pytest.mark.parametrize("shape", SHAPES)
def test_small_shapes(weights: Weights, shape: str, gate_up: bool, activation: str | None) -> None:
    experts, n, k, sizes = SHAPES[shape]
    w, dense = weights(experts, n, k, gate_up)
    for tokens in sizes:
        b = batch(tokens, experts, k, seed=tokens)
        found = {mode: call(mode, b, w, activation) for mode in MODES}
        assert_close(found["indexed"], expected(b, dense, activation))
        for mode in MODES:
            assert torch.equal(found[mode].nan_to_num(), found["indexed"].nan_to_num()), mode


@pytest.mark.parametrize("name", generators.KIMI_SHAPES)
def test_kimi_shapes(weights: Weights, name: str) -> None:
    n, k = generators.KIMI_SHAPES[name]
    gate_up = "gate_up" in name
    w, dense = weights(2, n, k, gate_up)
    for tokens in (3, 90):
        b = batch(tokens, 2, k, top_k=2, seed=tokens)
        wanted = expected(b, dense, "swiglu" if gate_up else None)
        found = {mode: call(mode, b, w, "swiglu" if gate_up else None) for mode in MODES}
        assert_close(found["indexed"], wanted)
        for mode in MODES:
            assert torch.equal(found[mode], found["indexed"]), mode


@pytest.mark.parametrize("draw", ["hot", "none"])
@pytest.mark.parametrize("mode", MODES)
def test_uneven_routing(weights: Weights, mode: str, draw: str) -> None:
    """One hot expert, the rest empty; choices that lead nowhere."""
    w, dense = weights(6, 384, 192, True)
    for tokens in (1, 50, 333):
        b = batch(tokens, 6, 192, top_k=2, draw=draw, seed=tokens)
        assert_close(call(mode, b, w, "swiglu"), expected(b, dense, "swiglu"))


@pytest.mark.parametrize("mode", MODES)
def test_nothing_is_routed_here(weights: Weights, mode: str) -> None:
    w, _ = weights(6, 384, 192, False)
    b = batch(20, 6, 192)
    assert call(mode, Batch(b.x, torch.full_like(b.ids, -1), b.weights), w).isnan().all()


@pytest.mark.parametrize("block_size", [8, 16, 32, 64, 128])
def test_block_sizes_are_merged(weights: Weights, block_size: int) -> None:
    w, _ = weights(5, 640, 448, False)
    for tokens in (3, 400):
        b = batch(tokens, 5, 448, seed=tokens)
        assert torch.equal(call("indexed", b, w, block_size=block_size), call("masked", b, w)), tokens


def test_buffers_of_an_aligner_with_garbage_behind(weights: Weights) -> None:
    """Over-allocated tails hold anything; padding is any number from T·top_k up; blocks of −1 come in between."""
    w, dense = weights(6, 384, 192, False)
    b = batch(30, 6, 192, top_k=2)
    choices = b.ids.numel()
    ids, blocks = [], []
    for expert in (2, 0, -1, 5):
        rows = (b.ids.flatten() == (1 if expert < 0 else expert)).nonzero().flatten().tolist()
        padding = [choices + 5 * i for i in range(-len(rows) % 8)]
        ids += rows + padding
        blocks += [expert] * ((len(rows) + 7) // 8)
    used = len(ids)
    tail = torch.randint(0, choices, (64,)).tolist()
    out = torch.full((choices, w.n), float("nan"), dtype=torch.bfloat16, device="cuda")
    chord.indexed(
        b.x, w, torch.tensor(ids + tail, dtype=torch.int32).cuda(),
        torch.tensor(blocks + [4] * 8, dtype=torch.int32).cuda(), torch.tensor([used], dtype=torch.int32).cuda(),
        2, 8, out=out,
    )  # fmt: skip
    local = torch.isin(b.ids, torch.tensor([0, 2, 5], device="cuda"))
    wanted = expected(Batch(b.x, torch.where(local, b.ids, -1), torch.ones_like(b.weights)), dense, None)
    assert_close(out, wanted)


def test_masked_rows_up_to_the_last(weights: Weights) -> None:
    """Counts of 0 and of max_m, more and fewer rows than expected_m says."""
    w, dense = weights(6, 384, 192, False)
    max_m, counts = 70, [70, 0, 1, 33, 0, 70]
    a = torch.randn(6, max_m, 192, device="cuda").bfloat16()
    for expected_m in (1, 20, 64, 70):
        out = torch.full((6 * max_m, 384), float("nan"), dtype=torch.bfloat16, device="cuda")
        chord.masked(a, w, torch.tensor(counts, dtype=torch.int32).cuda(), expected_m, out=out)
        for expert, count in enumerate(counts):
            rows = out.view(6, max_m, -1)[expert]
            assert rows[count:].isnan().all()
            if count:
                assert_close(rows[:count], a[expert, :count].float() @ dense[expert].T)


@pytest.mark.parametrize("k", [448, 256])
def test_a_row_does_not_depend_on_its_batch(weights: Weights, k: int) -> None:
    """Alone, in company, at another place, in every tile and mode: the same bits."""
    w, _ = weights(5, 640, k, True)
    whole = batch(700, 5, k, top_k=2)
    alone = [
        call("indexed", Batch(whole.x[:t], whole.ids[:t], whole.weights[:t]), w, "swiglu") for t in (1, 9, 70, 300)
    ]
    for mode in MODES:
        found = call(mode, whole, w, "swiglu")
        for part in alone:
            assert torch.equal(part, found[: len(part)]), (mode, len(part))
    order = torch.randperm(700, device="cuda")
    shuffled = call("indexed", Batch(whole.x[order], whole.ids[order], whole.weights[order]), w, "swiglu")
    assert torch.equal(shuffled.view(700, -1), call("indexed", whole, w, "swiglu").view(700, -1)[order])


def test_every_tile_gives_the_same_bits(weights: Weights) -> None:
    """Every tile that selection can choose for Kimi, forced on one batch."""
    w, _ = weights(5, 640, 256, False)
    b = batch(60, 5, 256, top_k=2)
    wanted = call("masked", b, w)
    r = routing.indexed(b.ids, 5)
    tiles = {
        select.choose("indexed", n, k, experts, rows, "sm_90a")
        for n, k, experts, _ in (*select.SHAPES[:2], select.SHAPES[9])  # the last stays resident at this K
        for rows in (0.02, 1, 8, 20, 43, 86, 128, 171, 341)
    }
    for tile in sorted(tiles, key=str):
        out = torch.full_like(wanted, float("nan"))
        launch.indexed(
            b.x, w.data, r.sorted_ids, r.expert_ids, r.num_tokens_padded, 2, r.block_size, b.weights, out, w.n,
            False, False, tile=tile,
        )  # fmt: skip
        assert torch.equal(out, wanted), tile


@pytest.fixture
def portable(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Selection as on a device without wgmma."""
    monkeypatch.setattr(select, "_HOPPER", "none")
    launch._plans.clear()
    yield
    launch._plans.clear()


@pytest.mark.parametrize(("gate_up", "activation"), OUTPUTS)
def test_the_portable_kernel(portable: None, weights: Weights, gate_up: bool, activation: str | None) -> None:
    w, dense = weights(6, 384, 192, gate_up)
    for tokens in (1, 37):
        b = batch(tokens, 6, 192, seed=tokens)
        found = {mode: call(mode, b, w, activation) for mode in MODES}
        assert_close(found["indexed"], expected(b, dense, activation))
        for mode in MODES:
            assert torch.equal(found[mode], found["indexed"]), mode


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_the_second_device(weights: Weights) -> None:
    w, _ = weights(6, 384, 192, False)
    a = torch.randn(6, 8, 192, device="cuda").bfloat16()
    counts = torch.full((6,), 8, dtype=torch.int32, device="cuda")
    wanted = chord.masked(a, w, counts, 8)
    there = PackedWeight(w.data.to("cuda:1"), w.n, w.k)
    assert torch.equal(chord.masked(a.to("cuda:1"), there, counts.to("cuda:1"), 8).to("cuda:0"), wanted)
