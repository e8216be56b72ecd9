"""On a GPU: align, gather and combine against the CPU, and the whole layer in three modes and in a CUDA graph."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from chord_runtime import routing
from chord_runtime.errors import UsageError
from chord_runtime.format.layout import Mode
from chord_runtime.layer import PackedLayer, moe_layer
from tests import generators

pytestmark = pytest.mark.gpu
SHAPES = [(1, 1, 8), (1, 8, 384), (13, 3, 16), (128, 8, 384), (700, 8, 384), (4096, 8, 384), (9000, 4, 512)]
DRAWS = ["even", "hot", "none"]


def choices(tokens: int, top_k: int, experts: int, draw: str) -> Tensor:
    generator = torch.Generator().manual_seed(tokens)
    scores = torch.rand((tokens, experts), generator=generator)
    if draw == "hot":
        scores[:, : top_k + 1] += 1
    ids = scores.topk(top_k, 1).indices.int()
    if draw == "none":
        ids[torch.rand(ids.shape, generator=generator) < 0.3] = -1
    return ids


def ranks_map(experts: int, ranks: int) -> tuple[Tensor | None, int]:
    if ranks == 1:
        return None, experts
    expert_map = torch.full((experts,), -1, dtype=torch.int32)
    mine = torch.arange(1, experts, ranks)
    expert_map[mine] = torch.arange(mine.numel(), dtype=torch.int32)
    return expert_map, mine.numel()


def same(found: object, wanted: object) -> None:
    """Every tensor of two routings is equal; a kernel that writes too little fails on what was there before."""
    for name, value in vars(wanted).items():
        other = getattr(found, name)
        if isinstance(value, Tensor):
            assert torch.equal(other.cpu(), value), name
        else:
            assert other == value, name


@pytest.mark.parametrize("draw", DRAWS)
@pytest.mark.parametrize("ranks", [1, 8])
@pytest.mark.parametrize(("tokens", "top_k", "experts"), SHAPES)
def test_alignment(tokens: int, top_k: int, experts: int, ranks: int, draw: str) -> None:
    ids, weights = choices(tokens, top_k, experts, draw), torch.rand(tokens, top_k)
    expert_map, local = ranks_map(experts, ranks)
    on_gpu = None if expert_map is None else expert_map.cuda()
    for wide in (ids, ids.long()):
        for block in (8, 16, 128):
            found = routing.indexed(wide.cuda(), local, block, on_gpu)
            same(found, routing.indexed(wide, local, block, expert_map))
        found_rows = routing.contiguous(wide.cuda(), local, on_gpu, weights.cuda())
        same(found_rows, routing.contiguous(wide, local, expert_map, weights))
    room = min(tokens, 600)
    if int(torch.bincount(ids[ids >= 0].flatten(), minlength=1).max()) <= room:
        same(
            routing.masked(ids.cuda(), local, room, on_gpu, weights.cuda()),
            routing.masked(ids, local, room, expert_map, weights),
        )


@pytest.mark.parametrize(("tokens", "top_k", "columns"), [(1, 1, 128), (5, 8, 7168), (300, 8, 7168), (33, 11, 1152)])
def test_gather_and_combine(tokens: int, top_k: int, columns: int) -> None:
    ids = choices(tokens, top_k, 64, "none")
    route = routing.contiguous(ids, 64)
    x = torch.randn(tokens, columns).bfloat16()
    gathered = routing.gather(x.cuda(), route.routed.cuda(), ids.cuda()).cpu()
    owned = route.routed >= 0
    assert torch.equal(gathered[owned], routing.gather(x, route.routed, ids)[owned])
    results = torch.randn(route.m_indices.numel(), columns).bfloat16()
    results[~owned] = float("nan")
    out, wanted = torch.full((2, tokens, columns), float("nan")).bfloat16()
    assert torch.equal(
        routing.combine(results.cuda(), route.rows.cuda(), out.cuda()).cpu(),
        routing.combine(results, route.rows, wanted),
    )


def make_layer(held: tuple[int, ...] = tuple(range(16)), device: str = "cuda") -> PackedLayer:
    packed, _, _ = generators.layer(held, 16, 512, 256)
    w13, w2 = (replace(weight, data=weight.data.to(device)) for weight in (packed.w13, packed.w2))
    return PackedLayer(w13, w2, held, 16)


@pytest.mark.parametrize("tokens", [1, 7, 64, 1000])
@pytest.mark.parametrize("held", [tuple(range(16)), (1, 5, 9, 13)])
def test_layer_modes_agree_bitwise_and_match_the_cpu(tokens: int, held: tuple[int, ...]) -> None:
    layer = make_layer(held)
    x = torch.randn(tokens, 512).bfloat16().cuda()
    ids, weights = choices(tokens, 4, 16, "none").cuda(), torch.rand(tokens, 4).cuda()
    found = [moe_layer(x, layer, ids, weights, mode=mode) for mode in Mode]
    assert all(torch.equal(found[0], other) for other in found[1:])
    assert torch.equal(found[0], moe_layer(x, layer, ids, weights, block_size=64))
    wanted = moe_layer(x.cpu(), make_layer(held, "cpu"), ids.cpu(), weights.cpu()).float()
    assert float((found[0].cpu().float() - wanted).norm()) <= 4e-3 * float(wanted.norm())


@pytest.mark.parametrize("mode", list(Mode))
def test_layer_in_a_graph_follows_its_inputs(mode: Mode) -> None:
    layer = make_layer()
    x, ids, weights = torch.zeros(33, 512).bfloat16().cuda(), torch.zeros(33, 4).int().cuda(), torch.zeros(33, 4).cuda()
    out = torch.empty_like(x)
    moe_layer(x, layer, ids, weights, mode=mode, max_m=132, out=out)  # compiles and loads what the capture may not
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        moe_layer(x, layer, ids, weights, mode=mode, max_m=132, out=out)
    for draw in DRAWS:
        x.copy_(torch.randn(33, 512))
        ids.copy_(choices(33, 4, 16, draw))
        weights.copy_(torch.rand(33, 4))
        graph.replay()
        first = out.clone()
        out.fill_(float("nan"))
        graph.replay()
        assert torch.equal(out, first)
        assert torch.equal(out, moe_layer(x, layer, ids, weights, mode=mode, max_m=132))


def test_layer_compiles_whole() -> None:
    layer = make_layer()
    x, ids, weights = torch.randn(9, 512).bfloat16().cuda(), choices(9, 4, 16, "even").cuda(), torch.rand(9, 4).cuda()
    compiled = torch.compile(lambda x, ids, w: moe_layer(x, layer, ids, w), fullgraph=True)
    assert torch.equal(compiled(x, ids, weights), moe_layer(x, layer, ids, weights))


@pytest.mark.parametrize("mode", list(Mode))
@pytest.mark.parametrize("which", ["x", "weights"])
def test_gradients_are_refused_not_dropped(mode: Mode, which: str) -> None:
    x = torch.randn(9, 512).bfloat16().cuda().requires_grad_(which == "x")
    weights = torch.rand(9, 4).cuda().requires_grad_(which == "weights")
    ids = choices(9, 4, 16, "even").cuda()
    with pytest.raises(UsageError, match="gradient"):
        moe_layer(x, make_layer(), ids, weights, mode=mode)
    with torch.no_grad():
        moe_layer(x, make_layer(), ids, weights, mode=mode)


def test_a_rank_without_rows() -> None:
    ids, x = torch.empty((0, 1), dtype=torch.int64).cuda(), torch.empty((0, 512)).bfloat16().cuda()
    route = routing.contiguous(ids, 16, None, torch.empty((0, 1)).cuda())
    same(route, routing.contiguous(ids.cpu(), 16, None, torch.empty((0, 1))))
    assert routing.gather(x, route.routed, ids).shape == (128, 512)
