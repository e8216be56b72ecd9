"""The three layouts hold the routed indices that they should, whatever the router chose."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from chord_runtime import routing
from chord_runtime.errors import UsageError
from chord_runtime.ops import validate
from tests.generators import ROUTINGS


def by_expert(ids: Tensor, count: int, expert_map: Tensor | None) -> list[list[int]]:
    """Routed indices of each local expert, ascending, by the definition."""
    lists: list[list[int]] = [[] for _ in range(count)]
    for routed, expert in enumerate(ids.view(-1).tolist()):
        local = expert if expert < 0 or expert_map is None else int(expert_map[expert])
        if local >= 0:
            lists[local].append(routed)
    return lists


@st.composite
def draws(draw: st.DrawFn) -> tuple[Tensor, int, Tensor | None]:
    """topk_ids, local experts and perhaps an expert map."""
    total, top_k = draw(st.integers(1, 9)), draw(st.integers(1, 4))
    tokens = draw(st.integers(1, 40))
    row = st.lists(st.integers(-1, total - 1), min_size=top_k, max_size=top_k)
    ids = torch.tensor(draw(st.lists(row, min_size=tokens, max_size=tokens)), dtype=torch.int32)
    if draw(st.booleans()):
        return ids, total, None
    held = draw(st.lists(st.integers(0, total - 1), min_size=1, max_size=total, unique=True))
    expert_map = torch.full((total,), -1, dtype=torch.int32)
    expert_map[held] = torch.arange(len(held), dtype=torch.int32)
    return ids, len(held), expert_map


def assert_rows_invert(rows: Tensor, routed: Tensor, expected: list[list[int]]) -> None:
    """``rows`` says where each routed index stands, and −1 for those that stand nowhere."""
    here = {index for indices in expected for index in indices}
    for index, row in enumerate(rows.view(-1).tolist()):
        assert row == -1 if index not in here else int(routed[row]) == index


@given(draws())
@settings(max_examples=150, deadline=None)
def test_contiguous(draw: tuple[Tensor, int, Tensor | None]) -> None:
    ids, count, expert_map = draw
    expected = by_expert(ids, count, expert_map)
    weights = torch.rand(ids.shape)
    route = routing.contiguous(ids, count, expert_map, weights)
    validate.contiguous(route.m_indices, count)
    assert len(route.m_indices) == len(route.routed) and len(route.routed) % 128 == 0
    assert bool(((route.m_indices >= 0) == (route.routed >= 0)).all())
    for expert in range(count):
        assert route.routed[route.m_indices == expert].tolist() == expected[expert]
    assert_rows_invert(route.rows, route.routed, expected)
    assert route.row_weight is not None
    for row, index in enumerate(route.routed.tolist()):
        assert float(route.row_weight[row]) == (float(weights.view(-1)[index]) if index >= 0 else 0)


@given(draws())
@settings(max_examples=150, deadline=None)
def test_masked(draw: tuple[Tensor, int, Tensor | None]) -> None:
    ids, count, expert_map = draw
    expected = by_expert(ids, count, expert_map)
    max_m = max(map(len, expected)) + 2
    route = routing.masked(ids, count, max_m, expert_map)
    validate.masked(route.masked_m, max_m)
    assert route.masked_m.tolist() == list(map(len, expected))
    for expert, rows in enumerate(route.routed.view(count, max_m).tolist()):
        assert rows == expected[expert] + [-1] * (max_m - len(expected[expert]))
    assert_rows_invert(route.rows, route.routed, expected)
    assert route.expected_m >= 1


@given(draws(), st.sampled_from([1, 4, 8, 16, 128]))
@settings(max_examples=150, deadline=None)
def test_indexed(draw: tuple[Tensor, int, Tensor | None], block_size: int) -> None:
    ids, count, expert_map = draw
    expected = by_expert(ids, count, expert_map)
    route = routing.indexed(ids, count, block_size, expert_map)
    validate.indexed(route.sorted_ids, route.expert_ids, route.num_tokens_padded, block_size, ids.numel(), count)
    assert len(route.sorted_ids) == block_size * len(route.expert_ids)
    used = int(route.num_tokens_padded)
    assert used == sum(-(-len(indices) // block_size) * block_size for indices in expected)
    owners = route.expert_ids.repeat_interleave(block_size)
    for expert in range(count):
        indices = route.sorted_ids[:used][owners[:used] == expert]
        assert indices[indices < ids.numel()].tolist() == expected[expert]
    assert bool((route.sorted_ids[used:] == ids.numel()).all())
    assert bool((route.expert_ids[used // block_size :] == -1).all())
    assert_rows_invert(route.rows, torch.arange(ids.numel()), expected)


def test_int64_ids_are_taken_too() -> None:
    ids = ROUTINGS["uniform"](10, 2, 4)
    assert torch.equal(routing.contiguous(ids.long(), 4).m_indices, routing.contiguous(ids, 4).m_indices)


@pytest.mark.parametrize("make", [routing.contiguous, routing.masked, routing.indexed])
def test_wrong_ids_are_refused(make: object) -> None:
    assert callable(make)
    with pytest.raises(UsageError, match=r"int32 or int64 \[T, top_k\]; found torch.int32 \[8\]"):
        make(torch.zeros(8, dtype=torch.int32), 4)
    with pytest.raises(UsageError, match="float32"):
        make(torch.zeros(8, 2), 4)
    for value in (4, -2):
        with pytest.raises(UsageError, match=r"experts are 0\.\.3, −1 for none"):
            make(torch.tensor([[0, value]], dtype=torch.int32), 4)


def test_weights_and_maps_that_do_not_fit_are_refused() -> None:
    ids = torch.zeros(5, 4, dtype=torch.int32)
    for make in (routing.contiguous, routing.masked):
        for weights in (torch.ones(5, 5), torch.ones(20), torch.ones(5, 4).half(), torch.ones(5, 4, device="meta")):
            with pytest.raises(UsageError, match=r"topk_weights must be float32 \[5, 4\] on cpu"):
                make(ids, 2, topk_weights=weights)
    for make in (routing.contiguous, routing.masked, routing.indexed):
        for expert_map in (torch.zeros(2), torch.zeros(2, 2, dtype=torch.int32), torch.zeros(2, dtype=torch.int64)):
            with pytest.raises(UsageError, match=r"expert_map must be int32 \[global experts\] on cpu"):
                make(ids, 2, expert_map=expert_map)
    for size in (0, -4):
        with pytest.raises(UsageError, match=f"block_size must be at least 1; found {size}"):
            routing.indexed(ids, 2, size)
        with pytest.raises(UsageError, match=f"max_m, the rows of each expert, must be at least 1; found {size}"):
            routing.masked(ids, 2, size)


def test_gather_and_combine_refuse_what_does_not_fit() -> None:
    x, ids, routed = torch.zeros(3, 8).bfloat16(), torch.zeros(3, 2, dtype=torch.int32), torch.tensor([5, -1]).int()
    assert routing.gather(x, routed, ids).shape == (2, 8)
    for wrong in ((x[0], routed, ids), (x[:2], routed, ids), (x, routed.view(1, 2), ids), (x, routed, ids.view(-1))):
        with pytest.raises(UsageError, match=r"x is \[T, hidden\], routed \[M\] and topk_ids \[T, top_k\]; found"):
            routing.gather(*wrong)
    with pytest.raises(UsageError, match="routed holds 6: routed indices are below 6 here"):
        routing.gather(x, routed + 1, ids)
    results, rows, out = (
        torch.ones(2, 8).bfloat16(),
        torch.tensor([[0, 1], [1, -1]]).int(),
        torch.empty(2, 8).bfloat16(),
    )
    assert routing.combine(results, rows, out)[:, 0].tolist() == [2, 1]
    assert not routing.combine(results[:0], torch.full_like(rows, -1), out).any()
    with pytest.raises(UsageError, match=r"results are \[M, hidden\], rows \[T, top_k\]"):
        routing.combine(results[0], rows, out)
    with pytest.raises(UsageError, match="rows holds 2: there are 2 results"):
        routing.combine(results, rows + 1, out)
    for wrong_out in (out[:1], out.float(), out[:, :1].expand(2, 8)):
        with pytest.raises(UsageError, match=r"out must be contiguous bfloat16 \[2, 8\] on cpu"):
            routing.combine(results, rows, wrong_out)


def test_an_expert_chosen_more_often_than_masked_has_rows() -> None:
    with pytest.raises(UsageError, match="chosen 5 times: max_m must be at least that, found 4"):
        routing.masked(torch.zeros(5, 1, dtype=torch.int32), 2, 4)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("name", ROUTINGS)
def test_the_gpu_routes_alike(name: str) -> None:
    ids = ROUTINGS[name](300, 4, 12)
    expert_map = torch.tensor([2, -1, 0, -1, 1, 3, -1, -1, 4, 5, -1, 6], dtype=torch.int32)
    weights = torch.rand(ids.shape)
    here, there = (ids, expert_map, weights), (ids.cuda(), expert_map.cuda(), weights.cuda())
    for make in (
        lambda i, m, w: routing.contiguous(i, 7, m, w),
        lambda i, m, w: routing.masked(i, 7, 1200, m, w),
        lambda i, m, w: routing.indexed(i, 7, 16, m),
    ):
        for expected, found in zip(vars(make(*here)).values(), vars(make(*there)).values(), strict=True):
            if isinstance(expected, Tensor):
                assert torch.equal(found.cpu(), expected)
            else:
                assert found == expected
