"""Compiling ahead covers what is called: every tile that selection returns is one of those that warm-up compiles."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from chord_runtime.bench.cases import all_cases
from chord_runtime.cuda import select
from chord_runtime.cuda.compile import SHARED_LIMIT

ROWS = (*range(1, 600), 683, 1024, 1366, 2731, 4096)


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


def test_bench_shapes_are_kimis() -> None:
    shapes = {(n, k, experts) for n, k, experts, _ in select.SHAPES}
    assert {(case.n, case.k, case.scenario.experts) for case in all_cases()} <= shapes
