"""The points, their work and their floors, held against the published table's conventions."""

from __future__ import annotations

import pytest

from chord_runtime.bench.cases import SCENARIOS, Stage, all_cases, case_of, choose
from chord_runtime.bench.peers import RECORDED
from chord_runtime.errors import UsageError
from tests.bench.samples import CEILINGS

# µs: bytes at 4.60 TB/s or arithmetic at 700 TFLOP/s, whichever is longer, with every expert active.
FLOORS = {
    "masked/gate_up/8": 175,
    "masked/gate_up/16": 177,
    "masked/gate_up/32": 180,
    "masked/down/8": 88,
    "masked/down/32": 93,
    "contiguous/gate_up/128": 515,
    "contiguous/gate_up/512": 2060,
    "contiguous/down/256": 515,
    "decode/gate_up/50": 174,
    "decode/down/50": 88,
    "prefill/gate_up/1024": 175,
    "prefill/gate_up/4096": 344,
    "prefill/down/16384": 687,
    "tp8/gate_up/1024": 178,
    "tp8/gate_up/16384": 1374,
    "tp8/down/1024": 113,
    "tp8/down/2048": 139,
    "tp8/down/4096": 192,
    "tp8/down/8192": 344,
}


def test_every_point_once() -> None:
    keys = [case.key for case in all_cases()]
    assert len(keys) == len(set(keys)) == 2 * (4 + 3 + 4 + 5 + 5)
    assert case_of("masked/gate_up/8").n == 4096


@pytest.mark.parametrize(
    ("key", "tokens", "routed", "fan_out"),
    [
        ("masked/gate_up/8", 48, 384, 1),
        ("contiguous/down/512", 3072, 48 * 512, 1),
        ("decode/gate_up/20", 20, 160, 8),
        ("prefill/gate_up/1024", 128, 1024, 8),
        ("prefill/down/16384", 2048, 16384, 1),
        ("tp8/gate_up/1024", 1024, 8192, 8),
        ("tp8/down/16384", 16384, 131072, 1),
    ],
)
def test_calling_convention(key: str, tokens: int, routed: int, fan_out: int) -> None:
    case = case_of(key)
    assert (case.tokens, case.routed, case.fan_out) == (tokens, routed, fan_out)


@pytest.mark.parametrize(("key", "floor"), FLOORS.items())
def test_floors(key: str, floor: float) -> None:
    case = case_of(key)
    found = CEILINGS.floor_us(case.moved_bytes(case.scenario.experts), case.flops)
    assert found == pytest.approx(floor, rel=0.011)


def test_choose() -> None:
    assert choose() == all_cases()
    assert [case.key for case in choose(["masked/gate_up/8", "tp8/down"])][:2] == ["masked/gate_up/8", "tp8/down/1024"]
    assert {case.stage for case in choose(["*/down/*"])} == {Stage.DOWN}
    assert len(choose(quick=True)) == 2 * 2 * len(SCENARIOS)
    with pytest.raises(UsageError, match=r"no point matches 'masked/gate_up/9'.*SCENARIO/STAGE/POINT"):
        choose(["masked/gate_up/9"])
    with pytest.raises(UsageError, match="without --quick there are more"):
        choose(["masked/gate_up/16"], quick=True)


def test_recorded_figures_cover_every_point() -> None:
    for peer in RECORDED:
        assert set(peer.figures) == {scenario.name for scenario in SCENARIOS}
        for scenario in SCENARIOS:
            for stage in scenario.shapes:
                assert len(peer.figures[scenario.name][stage]) == len(scenario.points)
    humming, chord = RECORDED
    assert (humming.us(case_of("tp8/down/8192")), chord.us(case_of("tp8/down/8192"))) == (929, 848)
