"""Without a GPU: which operators a layer on CUDA tensors calls, in what order and with what, found by tracing fakes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from chord_runtime import routing
from chord_runtime.cuda.route import CONFIGS
from chord_runtime.cuda.warmup import instantiations
from chord_runtime.format.block import packed_bytes
from chord_runtime.format.layout import Mode, RowOrder
from chord_runtime.layer import PackedLayer, moe_layer
from chord_runtime.ops.route import MAX_EXPERTS
from chord_runtime.ops.weight import PackedWeight

TOKENS, TOP_K, HIDDEN, WIDTH = 9, 4, 512, 256
SMALL = {"align", "gather", "combine"}


def weight(experts: int, n: int, k: int, order: RowOrder) -> PackedWeight:
    return PackedWeight(torch.empty(experts, packed_bytes(n, k), dtype=torch.uint8, device="cuda"), n, k, order)


def trace(mode: Mode | None, held: int, total: int) -> list[tuple[str, tuple[Any, ...]]]:
    """(operator, arguments) of every call that launches something, for a rank with ``held`` of ``total`` experts."""
    with FakeTensorMode():
        w13 = weight(held, 2 * WIDTH, HIDDEN, RowOrder.GATE_UP_8)
        layer = PackedLayer(w13, weight(held, HIDDEN, WIDTH, RowOrder.PLAIN), tuple(range(held)), total)
        x = torch.empty(TOKENS, HIDDEN, dtype=torch.bfloat16, device="cuda")
        ids = torch.empty(TOKENS, TOP_K, dtype=torch.int64, device="cuda")
        weights = torch.empty(TOKENS, TOP_K, device="cuda")
        graph = make_fx(
            lambda x, ids, weights: moe_layer(x, layer, ids, weights, mode=mode), _allow_non_fake_inputs=True
        )(x, ids, weights)
    calls = [node for node in graph.graph.nodes if node.op == "call_function" and "getitem" not in str(node.target)]
    found = [(str(node.target), node.args) for node in calls]
    return [(name, args) for name, args in found if "new_empty" not in name and "empty_like" not in name]


@pytest.mark.parametrize(
    ("mode", "wanted"),
    [
        (None, ["align", "indexed", "indexed", "combine"]),
        (Mode.INDEXED, ["align", "indexed", "indexed", "combine"]),
        (Mode.CONTIGUOUS, ["align", "gather", "contiguous", "contiguous", "combine"]),
        (Mode.MASKED, ["align", "gather", "masked", "masked", "combine"]),
    ],
)
@pytest.mark.parametrize(("held", "total"), [(16, 16), (4, 16), (48, 384), (MAX_EXPERTS, MAX_EXPERTS)])
def test_launches(mode: Mode | None, wanted: list[str], held: int, total: int) -> None:
    found = trace(mode, held, total)
    assert [name for name, _ in found] == [f"chord.{name}.default" for name in wanted]
    assert found[0][1][4] == held


def test_rows_are_spread_over_all_ranks_experts() -> None:
    for held, total in ((16, 16), (4, 16)):
        calls = [args for name, args in trace(Mode.INDEXED, held, total) if "indexed" in name]
        assert {args[12] for args in calls} == {total}


def test_down_and_combine_overlap_with_the_kernel_before() -> None:
    calls = [args for name, args in trace(Mode.INDEXED, 16, 16) if "indexed" in name or "combine" in name]
    assert [args[-1] is True for args in calls] == [False, True, True]


def test_more_experts_than_the_kernel_counts_are_sorted_by_torch() -> None:
    with FakeTensorMode():
        ids = torch.empty(TOKENS, TOP_K, dtype=torch.int64, device="cuda")
        most, more = (torch.empty(size, dtype=torch.int32, device="cuda") for size in (MAX_EXPERTS, MAX_EXPERTS + 1))
        assert routing._kernel_takes(ids, MAX_EXPERTS, most)
        assert not routing._kernel_takes(ids, MAX_EXPERTS + 1, None)
        assert not routing._kernel_takes(ids, 8, more)


def test_small_kernels_are_compiled_ahead() -> None:
    ahead = [(name, defines) for name, defines, _ in instantiations(["sm_90a"])]
    assert all(config in ahead for config in CONFIGS)
    assert {name for name, _ in CONFIGS} == SMALL


def test_the_rule() -> None:
    assert routing.convention(tuple(Mode)) is Mode.INDEXED
    assert routing.convention((Mode.MASKED, Mode.INDEXED)) is Mode.INDEXED
    assert routing.convention((Mode.MASKED, Mode.CONTIGUOUS)) is Mode.CONTIGUOUS
    assert routing.convention((Mode.MASKED,)) is Mode.MASKED
    assert [routing.block_rows(rows, 384) for rows in (8, 8 * 384 - 1, 8 * 384)] == [8, 8, 16]
