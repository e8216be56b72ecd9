"""chord bench --layer without a GPU: cases, the torch baseline's sorting, checking, measuring and reporting."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from chord_runtime.bench import layer as bench
from chord_runtime.bench.layer_peers import weighted_sum
from chord_runtime.bench.results import Measurement
from chord_runtime.bench.run import Needed
from chord_runtime.bench.timing import Timing
from chord_runtime.commands.bench import bench as command
from chord_runtime.errors import KernelError, UsageError
from chord_runtime.format.layout import Mode

SMALL = bench.LayerScenario("ep8", "small", 4, 16, 256, 128)


class Turns:
    """A timer that calls each contender once and says how long each took by its name."""

    def measure(self, calls: Mapping[str, Callable[[], object]], budget_ms: float) -> dict[str, Timing]:
        for call in calls.values():
            call()
        return {name: Timing.of([float(len(name))], 1.0) for name in calls}

    def alone(self, call: Callable[[], object]) -> float:
        raise AssertionError("layers are taken in turns only")


class Peer:
    name = "peer with a long name"

    def compile_ahead(self, cases: Sequence[bench.LayerCase]) -> None:
        """Nothing to compile."""

    def call(self, problem: bench.LayerProblem) -> Callable[[], object]:
        if problem.case.tokens == 3:
            raise RuntimeError("not for three tokens")
        return lambda: None


def test_baseline_sums_as_the_layer_does() -> None:
    results, weights = torch.randn(50, 3, 16).bfloat16(), torch.rand(50, 3)
    ids, expert_map = torch.randint(0, 8, (50, 3)), torch.tensor([0, -1, 1, -1, -1, 2, 3, -1])
    mine = expert_map[ids] >= 0
    results[~mine] = float("nan")
    wanted = torch.where(mine[..., None], results.double() * weights[..., None].double(), 0).sum(1)
    assert float((weighted_sum(results, weights, ids, expert_map).double() - wanted).abs().max()) < 0.05


def test_measure_checks_times_and_keeps_reasons() -> None:
    cases = [bench.LayerCase(SMALL, tokens) for tokens in (1, 3, 9)]
    seen: list[str] = []
    points = bench.measure(cases, [Peer()], Turns(), "cpu", 1.0, lambda case, _: seen.append(case.key))
    assert seen == list(points) == ["ep8/1", "ep8/3", "ep8/9"]
    assert all(point.error is not None and point.error < 1e-2 for point in points.values())
    assert points["ep8/3"].failures == {"peer with a long name": "RuntimeError: not for three tokens"}
    assert set(points["ep8/9"].timings) == {"chord", bench.CONTIGUOUS, "peer with a long name"}


@pytest.mark.parametrize("broken", ["make_layer", "make_problem"])
def test_points_that_cannot_be_made_leave_the_others(monkeypatch: pytest.MonkeyPatch, broken: str) -> None:
    real, calls = getattr(bench, broken), []

    def make(*args: object) -> object:
        calls.append(args)
        if len(calls) == 1:
            raise torch.OutOfMemoryError("no room")
        return real(*args)

    monkeypatch.setattr(bench, broken, make)
    cases = [bench.LayerCase(SMALL, tokens) for tokens in (1, 9)]
    points = bench.measure(cases, [], Turns(), "cpu", 1.0, lambda *_: None)
    assert points["ep8/1"].failures == {"chord": "OutOfMemoryError: no room"}
    assert set(points["ep8/9"].timings) == {"chord", bench.CONTIGUOUS}


def test_a_wrong_layer_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = bench.make_layer(SMALL, "cpu")
    problem = bench.make_problem(bench.LayerCase(SMALL, 12), layer, "cpu")
    bench.check(problem, list(Mode))
    right = bench.moe_layer

    def scaled(*args: object, mode: Mode, **options: object) -> torch.Tensor:
        return right(*args, mode=mode, **options) * 1.05  # type: ignore[arg-type]

    monkeypatch.setattr(bench, "moe_layer", scaled)
    with pytest.raises(KernelError, match="relative error"):
        bench.check(problem, [Mode.INDEXED])

    def uneven(*args: object, mode: Mode, **options: object) -> torch.Tensor:
        result = right(*args, mode=mode, **options)  # type: ignore[arg-type]
        result[0, 0] += mode is Mode.CONTIGUOUS
        return result

    monkeypatch.setattr(bench, "moe_layer", uneven)
    with pytest.raises(KernelError, match="differ"):
        bench.check(problem, [Mode.INDEXED, Mode.CONTIGUOUS])


def test_choose() -> None:
    assert len(bench.choose()) == 30
    assert [case.key for case in bench.choose(["tp8/1", "*/16384"])] == ["ep8/16384", "tp8/1", "tp8/16384"]
    assert {case.tokens for case in bench.choose(["ep8"], quick=True)} == {1, 16, 256, 4096}
    with pytest.raises(UsageError, match="ep8/3"):
        bench.choose(["ep8/3"])


def results() -> bench.LayerResults:
    def point(ours: float, peer: float) -> Measurement:
        timings = {name: Timing.of([us], 2.0) for name, us in (("chord", ours), ("humming + vLLM", peer))}
        return Measurement(48, 1e-3, timings)

    return bench.LayerResults({"device": "a card"}, {"timing": "m"}, {"ep8/1": point(10, 15), "tp8/64": point(20, 22)})


def test_report_and_file(tmp_path: Path) -> None:
    path = tmp_path / "layer.json"
    results().save(path)
    text = bench.report(bench.LayerResults.load(path))
    assert "geometric mean 1.28 × of 2 points, least 1.10 × at tp8/64" in text
    assert "| 1      |" in text and "1.50 ×" in text and "humming + vLLM µs" in text
    shown = CliRunner().invoke(command, ["--layer", "--from", str(path)])
    assert shown.exit_code == 0 and text in shown.output
    path.write_text('{"format": 1}')
    with pytest.raises(UsageError, match="format 1"):
        bench.LayerResults.load(path)


def test_files_are_shown_together_in_the_order_of_tokens(tmp_path: Path) -> None:
    all_points = results().points
    late, early = ({key: all_points["ep8/1"]} for key in ("ep8/64", "ep8/2"))
    for name, points in (("a", late), ("b", early)):
        replace(results(), points=points).save(tmp_path / f"{name}.json")
    files = ["--from", str(tmp_path / "a.json"), "--from", str(tmp_path / "b.json")]
    shown = CliRunner().invoke(command, ["--layer", *files, "--save", str(tmp_path / "both.json")])
    assert shown.exit_code == 0
    assert shown.output.index("| 2 ") < shown.output.index("| 64 ")
    assert set(bench.LayerResults.load(tmp_path / "both.json").points) == {"ep8/2", "ep8/64"}


def test_every_point_is_saved_when_it_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def measure(cases: list[bench.LayerCase], *_args: object) -> dict[str, Measurement]:
        _args[-1](cases[0], results().points["ep8/1"])  # type: ignore[operator]
        raise KeyboardInterrupt

    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("chord_runtime.bench.timing.CudaTimer", lambda: None)
    monkeypatch.setattr("chord_runtime.bench.run.machine", lambda: {"device": "a card"})
    monkeypatch.setattr(bench, "compile_ahead", lambda *_: None)
    monkeypatch.setattr(bench, "measure", measure)
    stopped = CliRunner().invoke(command, ["--layer", "--points", "ep8", "--save", str(tmp_path / "layer.json")])
    assert stopped.exit_code == 1
    assert set(bench.LayerResults.load(tmp_path / "layer.json").points) == {"ep8/1"}


def test_kernels_are_compiled_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    needed: list[Needed] = []
    monkeypatch.setattr(bench, "compile_kernels", needed.extend)
    bench.compile_ahead(bench.choose(["ep8/64"]), [Peer()])
    # 64 tokens choose 512 of 384 experts; contiguous has room for every choice, padded to runs of 128.
    padded = (512 + 48 * 127) // 128 * 128 // 48
    assert needed == [
        Needed(Mode.INDEXED, 4096, 7168, 48, 512 / 384, "swiglu"),
        Needed(Mode.INDEXED, 7168, 2048, 48, 512 / 384, "plain"),
        Needed(Mode.CONTIGUOUS, 4096, 7168, 48, padded, "swiglu"),
        Needed(Mode.CONTIGUOUS, 7168, 2048, 48, padded, "plain"),
    ]


def test_command_refuses() -> None:
    for arguments, message in ((["--layer", "--plot", "x"], "leave out --layer"), (["--layer"], "needs a CUDA GPU")):
        if message == "needs a CUDA GPU" and torch.cuda.is_available():
            continue
        found = CliRunner().invoke(command, arguments)
        assert isinstance(found.exception, UsageError) and message in str(found.exception)


@pytest.mark.gpu
def test_on_a_gpu() -> None:
    from chord_runtime.bench.timing import CudaTimer

    cases = [bench.LayerCase(SMALL, tokens) for tokens in (1, 40, 600)]
    points = bench.measure(cases, [], CudaTimer(), "cuda", 5.0, lambda case, point: None)
    for point in points.values():
        assert point.failures == {}
        assert set(point.timings) == {"chord", bench.CONTIGUOUS}
