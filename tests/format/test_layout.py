"""Who holds which expert, and names that tell it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chord_runtime.errors import UsageError
from chord_runtime.format.block import BLOCK_BYTES, check_shape, packed_bytes
from chord_runtime.format.layout import (
    ExpertShape,
    ParallelLayout,
    Placement,
    Projection,
    experts_file,
    parse_experts_file,
    tensor_name,
)


@given(st.sampled_from([1, 2, 3, 4, 6, 8, 12, 16, 24, 48]), st.sampled_from(list(Placement)))
def test_every_expert_is_held_once(ep: int, placement: Placement) -> None:
    layout = ParallelLayout(ep, 1, placement)
    held = [expert for rank in range(ep) for expert in layout.experts_of(rank, 48)]
    assert sorted(held) == list(range(48))
    assert {len(layout.experts_of(rank, 48)) for rank in range(ep)} == {48 // ep}


def test_placements() -> None:
    assert list(ParallelLayout(4, 1, Placement.LINEAR).experts_of(1, 8)) == [2, 3]
    assert list(ParallelLayout(4, 1, Placement.ROUND_ROBIN).experts_of(1, 8)) == [1, 5]


def test_a_rank_beyond_the_size_is_refused() -> None:
    with pytest.raises(UsageError, match=r"ep rank 4 is not one of 0\.\.3"):
        ParallelLayout(4).experts_of(4, 8)


@pytest.mark.parametrize(
    ("layout", "shape", "message"),
    [
        (ParallelLayout(5), (384, 7168, 2048), r"ep size 5 does not divide 384.*\[1, 2, 3, 4, 6, 8"),
        (ParallelLayout(0), (384, 7168, 2048), "start at 1"),
        (ParallelLayout(1, 0), (384, 7168, 2048), "start at 1"),
        (ParallelLayout(1, 3), (384, 7168, 2048), r"tp size 3 does not cut.*\[1, 2, 4, 8, 16, 32\]"),
        (ParallelLayout(), (384, 7100, 2048), "hidden size 7100"),
    ],
)
def test_sizes_that_do_not_divide_are_refused_with_those_that_do(
    layout: ParallelLayout, shape: tuple[int, int, int], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        layout.check(*shape)


@pytest.mark.parametrize("tp", [1, 2, 4, 8, 16, 32])
def test_kimi_cuts_into_whole_strips_and_blocks(tp: int) -> None:
    ParallelLayout(8, tp).check(384, 7168, 2048)
    shape = ExpertShape(384, 7168, 2048)
    for projection in Projection:
        check_shape(*shape.packed(projection, tp))
        whole, part = packed_bytes(*shape.packed(projection)), packed_bytes(*shape.packed(projection, tp))
        assert whole == tp * part == tp * (part // BLOCK_BYTES) * BLOCK_BYTES


def test_names() -> None:
    assert (
        tensor_name("model.layers.", 3, 17, Projection.W13) == "model.layers.3.mlp.experts.17.gate_proj.weight_packed"
    )
    assert (
        tensor_name("m.layers.", 3, 17, Projection.W2, 5, 8) == "m.layers.3.mlp.experts.17.down_proj.weight_packed_tp5"
    )


@given(st.integers(0, 2000), st.integers(0, 2000), st.integers(0, 200), st.integers(0, 100))
def test_a_file_name_says_layer_and_ranks(layer: int, ep_rank: int, tp_rank: int, part: int) -> None:
    name = experts_file(layer, ep_rank, ParallelLayout(2048, 256), tp_rank, part)
    assert parse_experts_file(name) == (layer, ep_rank, tp_rank)


@pytest.mark.parametrize("name", ["shared-00000.safetensors", "config.json", "experts-layer1.safetensors", "x"])
def test_other_file_names_say_nothing(name: str) -> None:
    assert parse_experts_file(name) is None
