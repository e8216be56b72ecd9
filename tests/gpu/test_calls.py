"""How the operators are called on a GPU: graphs, streams, threads, torch.compile, host time, refusals."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import Tensor

import chord_runtime as chord
from chord_runtime import routing
from chord_runtime.errors import UsageError
from chord_runtime.layer import PackedLayer
from chord_runtime.ops.weight import PackedWeight
from tests.gpu.calls import Batch, batch
from tests.gpu.conftest import Weights

pytestmark = pytest.mark.gpu

EXPERTS, N, K = 6, 384, 192


def decode(w: PackedWeight, b_x: Tensor, ids: Tensor) -> Tensor:
    r = routing.indexed(ids, EXPERTS)
    top_k = ids.shape[1]
    return chord.indexed(b_x, w, r.sorted_ids, r.expert_ids, r.num_tokens_padded, top_k, r.block_size)


def test_a_graph_is_replayed_with_other_routing(weights: Weights) -> None:
    w, _ = weights(EXPERTS, N, K, False)
    first, second = batch(24, EXPERTS, K, seed=1), batch(24, EXPERTS, K, seed=2)
    x, ids = first.x.clone(), first.ids.clone()
    decode(w, x, ids)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = decode(w, x, ids)
    for b in (second, first):
        x.copy_(b.x)
        ids.copy_(b.ids)
        graph.replay()
        assert torch.equal(out, decode(w, b.x, b.ids))


def test_layers_that_overlap_in_a_graph(weights: Weights) -> None:
    """Three layers after each other, whose down copies weights while gate_up ends: the bits of kernels that wait."""
    w13, _ = weights(EXPERTS, 512, 256, True)
    w2, _ = weights(EXPERTS, 256, 256, False)
    layer = PackedLayer(w13, w2, tuple(range(EXPERTS)), EXPERTS)

    def three(b: Batch, mode: str) -> Tensor:
        x = b.x
        for _ in range(3):
            x = chord.moe_layer(x, layer, b.ids, b.weights, mode=mode)
        return x

    for tokens in (1, 24, 150):
        kept = batch(tokens, EXPERTS, 256)
        three(kept, "indexed")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = three(kept, "indexed")
        for seed in range(10):
            b = batch(tokens, EXPERTS, 256, draw=("even", "hot", "none")[seed % 3], seed=seed)
            kept.x.copy_(b.x)
            kept.ids.copy_(b.ids)
            kept.weights.copy_(b.weights)
            graph.replay()
            assert torch.equal(out, three(b, "contiguous")), (tokens, seed)


def test_the_first_call_of_a_shape_may_be_inside_a_capture(weights: Weights) -> None:
    w, _ = weights(3, 128, 128, False)
    a = torch.randn(3 * 16, 128, device="cuda").bfloat16()
    counts = torch.full((3,), 16, dtype=torch.int32, device="cuda")
    out = torch.zeros(48, 128, dtype=torch.bfloat16, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        chord.masked(a, w, counts, 16, out=out)
    graph.replay()
    assert torch.equal(out, chord.masked(a, w, counts, 16))


def test_streams_and_threads(weights: Weights) -> None:
    """Two threads, each on a stream of its own, through the same handles."""
    w, _ = weights(EXPERTS, N, K, False)
    batches = [batch(20, EXPERTS, K, seed=seed) for seed in range(2)]
    wanted = [decode(w, b.x, b.ids) for b in batches]
    torch.cuda.synchronize()
    found: list[list[Tensor]] = [[], []]

    def work(index: int) -> None:
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            for _ in range(30):
                found[index].append(decode(w, batches[index].x, batches[index].ids))
        stream.synchronize()

    threads = [threading.Thread(target=work, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for index in range(2):
        assert len(found[index]) == 30
        assert all(torch.equal(out, wanted[index]) for out in found[index])


def test_compiled(weights: Weights) -> None:
    w, _ = weights(EXPERTS, N, K, False)
    b = batch(12, EXPERTS, K)
    r = routing.indexed(b.ids, EXPERTS)

    def run(x: Tensor, ids: Tensor, blocks: Tensor, used: Tensor) -> Tensor:
        return chord.indexed(x, w, ids, blocks, used, b.top_k, r.block_size) * 2

    args = (b.x, r.sorted_ids, r.expert_ids, r.num_tokens_padded)
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(*args), run(*args))


def test_misaligned_activations_are_refused(weights: Weights) -> None:
    w, _ = weights(EXPERTS, N, K, False)
    a = torch.zeros(EXPERTS * 8 * K + 1, dtype=torch.bfloat16, device="cuda")[1:].view(EXPERTS * 8, K)
    with pytest.raises(UsageError, match="multiples of 16 bytes"):
        chord.masked(a, w, torch.zeros(EXPERTS, dtype=torch.int32, device="cuda"), 8)
