"""csrc/kernels/align.cu, gather.cu and combine.cu, run thread by thread on the CPU, against chord_runtime.routing."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from chord_runtime import routing
from tests.emulation.host_kernel import HostKernel

INDEXED, CONTIGUOUS, MASKED = range(3)
THREADS, POISON = 1024, -77
CASES = [
    (0, 2, 8, 1, 0.0, False),
    # tokens, top_k, experts of all ranks, ranks, probability of -1, hot: all tokens choose few experts
    (1, 1, 8, 1, 0.0, False),
    (1, 8, 48, 1, 0.0, False),
    (7, 3, 16, 1, 0.4, False),
    (50, 8, 48, 1, 0.0, False),
    (33, 8, 384, 8, 0.1, False),
    (300, 8, 384, 1, 0.0, False),
    (1300, 2, 12, 3, 0.2, True),
    (520, 4, 512, 2, 0.0, True),
    (16, 4, 16, 1, 1.0, False),
]


def choices(tokens: int, top_k: int, experts: int, ranks: int, none: float, hot: bool) -> tuple[Tensor, Tensor | None]:
    """topk_ids [tokens, top_k] and this rank's expert_map."""
    generator = torch.Generator().manual_seed(tokens * 131 + top_k)
    scores = torch.rand((tokens, experts), generator=generator)
    if hot:
        scores[:, : top_k + 1] += 1
    ids = scores.topk(top_k, 1).indices.int()
    ids[torch.rand(ids.shape, generator=generator) < none] = -1
    if ranks == 1:
        return ids, None
    expert_map = torch.full((experts,), -1, dtype=torch.int32)
    mine = torch.arange(1, experts, ranks)
    expert_map[mine] = torch.arange(mine.numel(), dtype=torch.int32)
    return ids, expert_map


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kernels")


@pytest.fixture(scope="module")
def align(folder: Path) -> dict[tuple[int, int], HostKernel]:
    return {
        (layout, wide): HostKernel("align", {"CHORD_LAYOUT": layout, "CHORD_IDS_64": wide}, folder)
        for layout, wide in ((INDEXED, 0), (CONTIGUOUS, 1), (MASKED, 0))
    }


def run(kernel: HostKernel, ids: Tensor, expert_map: Tensor | None, weights: Tensor | None, experts: int, align: int,
        capacity: int, owners: int, padding: int) -> dict[str, Tensor]:  # fmt: skip
    found = {
        name: torch.full((size,), POISON, dtype=torch.int32)
        for name, size in (("routed", capacity), ("owner", owners), ("used", 1), ("rows", ids.numel()))
    }
    found["weight"] = torch.full((capacity if weights is not None else 0,), float("nan"))
    known = experts if expert_map is None else expert_map.numel()
    kernel(
        (max(1, -(-ids.numel() // THREADS)), 1), THREADS, ids, expert_map, weights,
        *found.values(), ids.numel(), known, experts, align, capacity, padding,
    )  # fmt: skip
    return found


@pytest.mark.parametrize("case", CASES)
def test_indexed(align: dict[tuple[int, int], HostKernel], case: tuple[int, int, int, int, float, bool]) -> None:
    ids, expert_map = choices(*case)
    experts = case[2] if expert_map is None else int(expert_map.max()) + 1
    for block in (8, 16, 64):
        wanted = routing.indexed(ids, experts, block, expert_map)
        found = run(align[INDEXED, 0], ids, expert_map, None, experts, block, wanted.sorted_ids.numel(),
                    wanted.expert_ids.numel(), ids.numel())  # fmt: skip
        assert torch.equal(found["routed"], wanted.sorted_ids)
        assert torch.equal(found["owner"], wanted.expert_ids)
        assert torch.equal(found["used"], wanted.num_tokens_padded)
        assert torch.equal(found["rows"], wanted.rows.view(-1))


@pytest.mark.parametrize("case", CASES)
def test_contiguous(align: dict[tuple[int, int], HostKernel], case: tuple[int, int, int, int, float, bool]) -> None:
    ids, expert_map = choices(*case)
    experts = case[2] if expert_map is None else int(expert_map.max()) + 1
    weights = torch.rand(ids.shape)
    wanted = routing.contiguous(ids, experts, expert_map, weights)
    capacity = wanted.m_indices.numel()
    found = run(align[CONTIGUOUS, 1], ids.long(), expert_map, weights, experts, 128, capacity, capacity, -1)
    assert torch.equal(found["routed"], wanted.routed)
    assert torch.equal(found["owner"], wanted.m_indices)
    assert torch.equal(found["rows"], wanted.rows.view(-1))
    assert wanted.row_weight is not None and torch.equal(found["weight"], wanted.row_weight)


@pytest.mark.parametrize("case", CASES)
def test_masked(align: dict[tuple[int, int], HostKernel], case: tuple[int, int, int, int, float, bool]) -> None:
    ids, expert_map = choices(*case)
    experts = case[2] if expert_map is None else int(expert_map.max()) + 1
    wanted = routing.masked(ids, experts, None, expert_map)
    found = run(align[MASKED, 0], ids, expert_map, None, experts, wanted.max_m, experts * wanted.max_m, experts, -1)
    assert torch.equal(found["routed"], wanted.routed)
    assert torch.equal(found["owner"], wanted.masked_m)
    assert torch.equal(found["rows"], wanted.rows.view(-1))
    assert int(found["used"]) == POISON


def test_masked_overflow_is_routed_nowhere(align: dict[tuple[int, int], HostKernel]) -> None:
    ids = torch.zeros((5, 1), dtype=torch.int32)
    found = run(align[MASKED, 0], ids, None, None, 2, 3, 6, 2, -1)
    assert found["rows"].tolist() == [0, 1, 2, -1, -1]
    assert found["owner"].tolist() == [3, 0]
    assert found["routed"].tolist() == [0, 1, 2, -1, -1, -1]


def test_ids_out_of_range_are_routed_nowhere(align: dict[tuple[int, int], HostKernel]) -> None:
    ids = torch.tensor([[0, 99], [-5, 1]], dtype=torch.int32)
    for expert_map in (None, torch.tensor([0, 1], dtype=torch.int32)):
        found = run(align[INDEXED, 0], ids, expert_map, None, 2, 8, 24, 3, 4)
        assert found["rows"].tolist() == [0, -1, -1, 3]
        assert found["owner"].tolist() == [0, 1, -1]


@pytest.mark.parametrize(("tokens", "top_k", "columns"), [(1, 8, 256), (5, 3, 1152), (3, 11, 128)])
def test_gather_and_combine(folder: Path, tokens: int, top_k: int, columns: int) -> None:
    x = torch.randn(tokens, columns).bfloat16()
    routed = torch.randperm(tokens * top_k + 5).int() - 3
    gathered = torch.full((routed.numel(), columns), float("nan")).bfloat16()
    HostKernel("gather", {}, folder)((routed.numel(), 1), 256, x, routed, gathered, tokens * top_k, top_k, columns)
    owned = (routed >= 0) & (routed < tokens * top_k)
    assert torch.equal(gathered[owned], x[routed[owned] // top_k])
    assert bool(gathered[~owned].isnan().all())

    results = torch.randn(tokens * top_k, columns).bfloat16()
    rows = torch.randperm(tokens * top_k).view(tokens, top_k).int()
    rows[rows % 5 == 0] = -1
    results[::5] = float("nan")
    out, wanted = torch.empty(2, tokens, columns).bfloat16()
    HostKernel("combine", {}, folder)((tokens, -(-columns // 1024)), 128, results, rows, out, top_k, columns)
    assert torch.equal(out, routing.combine(results, rows, wanted))
