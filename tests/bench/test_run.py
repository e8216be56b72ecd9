"""The whole path of a measurement on the CPU, with small shapes and the operators' CPU kernels."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace

import pytest
import torch

from chord_runtime.bench import problem as problem_module
from chord_runtime.bench import run as run_module
from chord_runtime.bench.cases import Case, Scenario, Stage, choose
from chord_runtime.bench.contenders import Contender, TorchGrouped, humming_routing
from chord_runtime.bench.problem import draw_routing, make_problem, make_weights
from chord_runtime.bench.results import OURS, Measurement
from chord_runtime.bench.run import compile_ahead, measure
from chord_runtime.bench.timing import Timing
from chord_runtime.errors import KernelError
from chord_runtime.format.layout import Mode

SHAPES = {Stage.GATE_UP: (256, 128), Stage.DOWN: (128, 64)}
MASKED = Scenario("masked", "masked", Mode.MASKED, 8, SHAPES, (2, 5), "rows")
CONTIGUOUS = Scenario("contiguous", "contiguous", Mode.CONTIGUOUS, 8, SHAPES, (128,), "rows")
INDEXED = Scenario("decode", "indexed", Mode.INDEXED, 20, SHAPES, (3, 21), "tokens")
SMALL = [Case(s, stage, point) for s in (MASKED, CONTIGUOUS, INDEXED) for stage in SHAPES for point in s.points]


class WallTimer:
    """Three turns by the wall clock, and a record of who was called when."""

    def __init__(self) -> None:
        self.turns: list[str] = []

    def measure(self, calls: Mapping[str, Callable[[], object]], budget_ms: float) -> dict[str, Timing]:
        times: dict[str, list[float]] = {name: [] for name in calls}
        for _ in range(3):
            for name, call in calls.items():
                started = time.perf_counter()
                call()
                times[name].append((time.perf_counter() - started) * 1e6)
                self.turns.append(name)
        return {name: Timing.of(found, 1.0) for name, found in times.items()}

    def alone(self, call: Callable[[], object]) -> float:
        self.turns.append("alone")
        call()
        return 7.0


class Copycat(Contender):
    """A contender that fails where it is told to, and has nothing to do at gate_up."""

    name = "copycat"

    def __init__(self, fails_at: str) -> None:
        self.fails_at = fails_at
        self.ahead: list[str] = []

    def takes(self, case: Case) -> bool:
        return case.stage is Stage.DOWN

    def compile_ahead(self, cases: Sequence[Case]) -> None:
        self.ahead = [case.key for case in cases]
        raise ValueError("no compiler")

    def call(self, problem: problem_module.Problem) -> Callable[[], object]:
        if problem.case.key == self.fails_at:
            raise ValueError("unsupported")
        return problem.call


def test_every_mode_is_checked_and_timed() -> None:
    seen = []
    timer = WallTimer()
    points = measure(SMALL, [Copycat("masked/down/2")], timer, "cpu", 1.0, lambda case, _: seen.append(case.key))
    assert set(points) == set(seen) == {case.key for case in SMALL}
    assert timer.turns[: 2 + 6] == ["alone", OURS, OURS, OURS, "alone", OURS, OURS, OURS], "gate_up: no other takes it"
    assert timer.turns[-7:] == ["alone", *[OURS, "copycat"] * 3]
    for key, point in points.items():
        assert point.alone_us == 7.0
        assert point.seconds > 0
        assert point.error is not None
        assert point.error < 1e-6, "the CPU runs the reference itself"
        assert point.timings[OURS].us > 0
        assert ("copycat" in point.failures) == (key == "masked/down/2")
    assert points["masked/down/2"].failures == {"copycat": "ValueError: unsupported"}
    assert points["masked/gate_up/2"].active == 8


def test_turns_that_fail_leave_the_other_points() -> None:
    class Exhausted(WallTimer):
        def measure(self, calls: Mapping[str, Callable[[], object]], budget_ms: float) -> dict[str, Timing]:
            if self.turns != ["alone"]:
                raise MemoryError("no room")
            return super().measure(calls, budget_ms)

    points = list(measure(SMALL[:3], [], Exhausted(), "cpu", 1.0, lambda *_: None).values())
    assert [bool(point.timings) for point in points] == [True, False, False]
    assert points[1].failures == {"turns": "MemoryError: no room"}


@pytest.mark.parametrize("broken", ["make_weights", "make_problem"])
def test_points_that_cannot_be_made_leave_the_others(monkeypatch: pytest.MonkeyPatch, broken: str) -> None:
    real = getattr(run_module, broken)

    def make(case: Case, *args: object) -> object:
        if case.key == "masked/gate_up/2":
            raise torch.OutOfMemoryError("no room")
        return real(case, *args)

    monkeypatch.setattr(run_module, broken, make)
    seen: list[str] = []
    points = measure(SMALL[:3], [], WallTimer(), "cpu", 1.0, lambda case, _: seen.append(case.key))
    assert seen == [case.key for case in SMALL[:3]]
    assert [bool(point.timings) for point in points.values()] == [False, True, True]
    assert points["masked/gate_up/2"].failures == {OURS: "OutOfMemoryError: no room"}


def test_kernels_are_compiled_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that the calls of these cases ask for, each once; a contender that cannot is asked again when it is run."""
    from chord_runtime.cuda import select, warmup

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda: SimpleNamespace(multi_processor_count=132))
    work: list[warmup.Instantiation] = []
    monkeypatch.setattr(warmup, "warm_up", lambda items: work.extend(items) or iter(()))
    cases = choose(["masked/gate_up/8", "masked/gate_up", "prefill/down/16384", "contiguous/down"])
    peer = Copycat("")
    compile_ahead(cases, [peer])
    assert peer.ahead == [case.key for case in cases if case.stage is Stage.DOWN]
    assert len(work) == len({str(item) for item in work}) < len(cases)
    asked = [
        ("masked", 4096, 7168, 8, select.GATE_UP),
        ("indexed", 7168, 2048, 342, select.PLAIN),
        ("contiguous", 7168, 2048, 512, select.PLAIN),
    ]
    for mode, n, k, rows, output in asked:
        tile = select.choose(mode, n, k, 48, rows, "sm_90a", 132)
        assert (*select.instantiation(mode, tile, output, "sm_90a"), "sm_90a") in work


@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.key)
def test_torch_grouped_computes_the_same_rows(case: Case) -> None:
    made = make_problem(case, make_weights(case, "cpu"), "cpu")
    expected = torch.full_like(made.out, float("nan"))
    made.compute_reference(expected)
    found = TorchGrouped().call(made)()
    assert isinstance(found, torch.Tensor)
    if case.stage is Stage.GATE_UP:  # the dense weight keeps the packed, interleaved row order
        pairs = found.view(-1, case.n // 16, 2, 8)
        found = torch.cat((pairs[:, :, 0].flatten(1), pairs[:, :, 1].flatten(1)), 1)
    if case.scenario.mode is Mode.INDEXED:
        assert made.routing.topk_ids is not None
        expected = expected[made.routing.topk_ids.view(-1).argsort(stable=True)]
    wanted = expected[~expected.isnan().any(1)]
    torch.testing.assert_close(found, wanted, rtol=0.02, atol=1e-3)


def break_one(kind: str) -> Callable[..., None]:
    def call(*_args: object, out: torch.Tensor, **_options: object) -> None:
        out.zero_()

    def silent(*_args: object, out: torch.Tensor, **_options: object) -> None:
        """Writes nothing."""

    return {"wrong": call, "unwritten": silent}[kind]


@pytest.mark.parametrize(
    ("kind", "scenario", "message"),
    [
        ("wrong", CONTIGUOUS, "against the reference, over 2e-03"),
        ("unwritten", CONTIGUOUS, "left unwritten"),
        ("wrong", MASKED, "written that no expert owns"),
    ],
)
def test_wrong_kernels_are_not_timed(
    monkeypatch: pytest.MonkeyPatch, kind: str, scenario: Scenario, message: str
) -> None:
    monkeypatch.setattr(problem_module.api, scenario.mode.value, break_one(kind))
    case = Case(scenario, Stage.DOWN, scenario.points[0])
    with pytest.raises(KernelError, match=message):
        make_problem(case, make_weights(case, "cpu"), "cpu").check()
    point: Measurement = measure([case], [], WallTimer(), "cpu", 1.0, lambda *_: None)[case.key]
    assert point.timings == {}
    assert message in point.failures[OURS]
    assert point.error is None


def test_routing_draw_is_reproducible() -> None:
    case = Case(INDEXED, Stage.DOWN, 21)
    first = draw_routing(case, "cpu")
    torch.rand(7)
    second = draw_routing(case, "cpu")
    assert first.topk_ids is not None
    assert second.topk_ids is not None
    assert torch.equal(first.topk_ids, second.topk_ids)
    assert int(first.counts.sum()) == case.routed


def test_humming_gets_the_same_routing_in_its_terms() -> None:
    case = Case(INDEXED, Stage.GATE_UP, 21)
    routing = draw_routing(case, "cpu")
    passed = humming_routing(case, routing, 64)
    assert passed["sorted_ids"].numel() == int(passed["num_tokens_padded"]) == 64 * passed["expert_ids"].numel()
    assert (passed["expert_ids"] >= 0).all()
    contiguous = humming_routing(
        Case(CONTIGUOUS, Stage.DOWN, 128), draw_routing(Case(CONTIGUOUS, Stage.DOWN, 128), "cpu"), 64
    )
    assert contiguous["expert_layout"].tolist() == [128 * e for e in range(9)]
    assert contiguous["expert_layout"].dtype == torch.int64
    masked = Case(MASKED, Stage.DOWN, 5)
    assert humming_routing(masked, draw_routing(masked, "cpu"), 64)["expert_layout"].tolist() == [5] * 8
