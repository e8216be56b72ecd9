"""Compiling ahead covers what is called: every tile that selection returns is one of those that warm-up compiles."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

import pytest

from chord_runtime.bench.cases import all_cases
from chord_runtime.cuda import select
from chord_runtime.cuda.compile import SHARED_LIMIT
from chord_runtime.errors import UsageError

MEANS = (*(routed / 384 for routed in (1, 2, 5)), *(tokens * 8 / 384 for tokens in range(1, 500)))
ROWS = (*dict.fromkeys(map(select.rounded, MEANS)), *range(1, 600), 683, 1024, 1366, 2731, 4096)


def key(instantiation: tuple[str, Mapping[str, int]]) -> tuple[str, tuple[tuple[str, int], ...]]:
    return instantiation[0], tuple(sorted(instantiation[1].items()))


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a", "sm_103a"])
def test_every_choice_for_kimi_is_compiled_ahead(arch: str) -> None:
    ahead = {key(item) for item in select.all_configs(arch)}
    for mode in select.MODES:
        for n, k, experts, gate_up in select.SHAPES:
            for rows in ROWS:
                tile = select.choose(mode, n, k, experts, rows, arch)
                for output in (select.GATE_UP, select.SWIGLU) if gate_up else (select.PLAIN,):
                    chosen = key(select.instantiation(mode, tile, output, arch))
                    assert chosen in ahead, f"{mode} N={n} K={k}, {rows} rows an expert: {tile}"


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_no_instantiation_twice_and_none_too_large(arch: str) -> None:
    found = [key(item) for item in select.all_configs(arch)]
    assert len(found) == len(set(found))
    assert all(dict(defines)["CHORD_SHARED_BYTES"] <= SHARED_LIMIT[arch] for _, defines in found)


@pytest.mark.parametrize(
    ("fields", "rule"),
    [
        ("stages=2", "stages is at least 3"),
        ("blocks=4", "blocks is 1 or 2"),
        ("narrow=128,tokens=64", "narrow <= tokens"),
        ("stages=90", "shared memory"),
        ("resident=3", "resident is 0"),
        ("occupancy=0", "occupancy"),
        ("box=48", "box is 0"),
    ],
)
def test_a_tile_that_would_hang_or_not_compile_is_refused(
    monkeypatch: pytest.MonkeyPatch, fields: str, rule: str
) -> None:
    monkeypatch.setenv("CHORD_TILE", fields)
    with pytest.raises(UsageError, match=re.escape(rule)):
        select.choose("contiguous", 4096, 7168, 48, 128, "sm_90a")


@pytest.mark.parametrize("mode", select.MODES)
@pytest.mark.parametrize("rows", [64, 171])
def test_fewer_tokens_alone_make_a_tile(monkeypatch: pytest.MonkeyPatch, mode: str, rows: int) -> None:
    """The documented example: what depends on the tokens follows."""
    monkeypatch.setenv("CHORD_TILE", "tokens=64")
    assert select.choose(mode, 4096, 7168, 48, rows, "sm_90a").tokens == 64


@pytest.mark.parametrize("text", ["stages=²", "stages=", "tile=4", "tokens=" + "9" * 5000])
def test_overrides_are_names_and_integers(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("CHORD_TILE", text)
    with pytest.raises(UsageError, match="is not NAME=INTEGER"):
        select.choose("masked", 4096, 7168, 48, 8, "sm_90a")


@pytest.mark.parametrize(
    ("text", "rule"), [("stage_k=0", "stage_k divides"), ("producer_registers=7", "multiple of 8")]
)
def test_impossible_tiles_are_refused(monkeypatch: pytest.MonkeyPatch, text: str, rule: str) -> None:
    monkeypatch.setenv("CHORD_TILE", text)
    with pytest.raises(UsageError, match=rule):
        select.choose("indexed", 4096, 7168, 48, 43, "sm_90a")


def test_calls_of_one_plan_get_one_tile() -> None:
    for rows in MEANS:
        tiles = [select.choose("indexed", 7168, 2048, 48, mean, "sm_90a") for mean in (rows, select.rounded(rows))]
        assert tiles[0] == tiles[1]


def test_activations_stay_in_indexed_only() -> None:
    tile = select.choose("indexed", 7168, 256, 384, 341, "sm_90a")
    select.check("indexed", tile, 256)
    with pytest.raises(UsageError, match="resident is 0"):  # no other producer would bring its rows
        select.check("masked", replace(tile, box=8), 256)


def test_few_active_experts_get_small_tiles() -> None:
    """Rows of the weight of those few experts spread over as many multiprocessors as they can."""
    heights = [select.choose("indexed", 4096, 7168, 48, tokens * 8 / 384, "sm_90a").rows for tokens in (1, 8, 64, 128)]
    assert heights == [128, 128, 128, 512]


def test_bench_shapes_are_kimis() -> None:
    shapes = {(n, k, experts) for n, k, experts, _ in select.SHAPES}
    assert {(case.n, case.k, case.scenario.experts) for case in all_cases()} <= shapes
