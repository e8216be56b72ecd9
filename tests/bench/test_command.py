"""``chord bench`` where there is no GPU: saved runs, comparisons, and the one clear error."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from chord_runtime.bench.cases import Case
from chord_runtime.bench.report import brief
from chord_runtime.bench.results import Measurement, Results
from chord_runtime.commands.bench import bench
from chord_runtime.errors import ChordError, KernelError, UsageError
from tests.bench.samples import sample


def run(*arguments: str | Path) -> Result:
    result = CliRunner().invoke(bench, [str(argument) for argument in arguments])
    assert result.exception is None or isinstance(result.exception, (ChordError, SystemExit)), result.exception
    return result


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    sample().save(tmp_path / "old.json")
    return tmp_path / "old.json"


def test_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    result = run("--quick")
    assert isinstance(result.exception, UsageError)
    assert "needs a CUDA GPU" in str(result.exception)
    assert "chord doctor" in str(result.exception)
    assert result.output == ""


def test_wrong_points_are_told_before_anything_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert "no point matches" in str(run("--points", "nothing").exception)


def test_saved_results_are_shown_saved_again_and_plotted(saved: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    result = run("--from", saved, "--plot", tmp_path / "plot", "--save", tmp_path / "copy.json")
    assert result.exit_code == 0
    assert "### Masked decode, EP8: gate_up" in result.output
    assert f"plotted: {tmp_path / 'plot.png'}, {tmp_path / 'plot.svg'}" in result.output
    assert (tmp_path / "copy.json").read_text() == saved.read_text()
    assert run("--from", saved, "--brief").output == brief(sample()) + "\n"


def test_several_files_are_shown_together(saved: Path, tmp_path: Path) -> None:
    points = sample().points
    for name, keys in (("a", ["masked/down/8"]), ("b", ["tp8/down/8192", "decode/down/20"])):
        replace(sample(), points={key: points[key] for key in keys}).save(tmp_path / f"{name}.json")
    files = ["--from", tmp_path / "a.json", "--from", tmp_path / "b.json"]
    result = run(*files, "--save", tmp_path / "both.json")
    assert result.exit_code == 0
    assert "Masked decode, EP8: down" in result.output and "Indexed, TP8: down" in result.output
    assert set(Results.load(tmp_path / "both.json").points) == {"masked/down/8", "tp8/down/8192", "decode/down/20"}
    assert run("--from", tmp_path / "a.json", "--save", saved).exit_code == 0
    assert Results.load(saved) == sample(), "what a file has already is kept"
    sample("another card").save(tmp_path / "other.json")
    assert "do not go together: device" in str(run(*files, "--from", tmp_path / "other.json").exception)


@pytest.fixture
def pretend_gpu(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A GPU on which every point takes what the sample says, until the point named here is reached."""
    stops_at: list[str] = []

    def measure(cases: Sequence[Case], *_args: object) -> dict[str, Measurement]:
        progress = _args[-1]
        for case in cases:
            if case.key in stops_at:
                raise KeyboardInterrupt
            progress(case, sample().points[case.key])  # type: ignore[operator]
        return {case.key: sample().points[case.key] for case in cases}

    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("chord_runtime.bench.timing.CudaTimer", lambda: None)
    monkeypatch.setattr("chord_runtime.bench.ceilings.measure_ceilings", lambda timer: sample().ceilings)
    monkeypatch.setattr("chord_runtime.bench.run.compile_ahead", lambda *_: None)
    monkeypatch.setattr("chord_runtime.bench.run.machine", lambda: {"device": "NVIDIA H200"})
    monkeypatch.setattr("chord_runtime.bench.run.measure", measure)
    return stops_at


def test_every_point_is_saved_when_it_is_measured(pretend_gpu: list[str], tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    pretend_gpu.append("contiguous/gate_up/512")
    stopped = CliRunner().invoke(bench, ["--points", "contiguous/gate_up", "--save", str(path)])
    assert stopped.exit_code == 1
    assert set(Results.load(path).points) == {"contiguous/gate_up/128", "contiguous/gate_up/256"}
    shown = run("--points", "masked/down/8", "--save", path)
    assert "contiguous" not in shown.stdout, "a run shows what it measured"
    assert set(Results.load(path).points) == {"contiguous/gate_up/128", "contiguous/gate_up/256", "masked/down/8"}


def test_other_conditions_are_refused_before_anything_is_measured(pretend_gpu: list[str], tmp_path: Path) -> None:
    sample().save(tmp_path / "run.json")
    pretend_gpu.append("masked/down/8")
    found = run("--points", "masked/down/8", "--save", tmp_path / "run.json")
    assert "Save them in files of their own" in str(found.exception)


def test_comparison_decides_the_exit_code(saved: Path, tmp_path: Path) -> None:
    sample(scale=1.1).save(tmp_path / "slow.json")
    assert run("--from", saved, "--compare", saved).exit_code == 0
    slower = run("--from", tmp_path / "slow.json", "--compare", saved)
    assert slower.exit_code == 1
    assert "12 slower by over 3%" in slower.output
    assert run("--from", saved, "--compare", tmp_path / "slow.json").exit_code == 0


def test_a_failed_point_fails_the_command(tmp_path: Path) -> None:
    results = sample()
    results.points["masked/down/8"] = Measurement(48, None, {}, {"chord": "wrong value"})
    results.save(tmp_path / "bad.json")
    result = run("--from", tmp_path / "bad.json")
    assert isinstance(result.exception, KernelError)
    assert "1 of 12 points failed, the first masked/down/8" in str(result.exception)


def test_a_failed_point_does_not_hide_the_comparison(saved: Path, tmp_path: Path) -> None:
    results = sample(scale=1.1)
    results.points["masked/down/8"] = Measurement(48, None, {}, {"chord": "wrong value"})
    results.save(tmp_path / "bad.json")
    result = run("--from", tmp_path / "bad.json", "--compare", saved)
    assert "11 points, geometric mean +10.0%, 11 slower by over 3%" in result.output
    assert "1 of 12 points failed" in str(result.exception)


def test_a_comparison_of_nothing_fails(tmp_path: Path) -> None:
    points = sample().points
    for file, name in zip("ab", points, strict=False):
        replace(sample(), points={name: points[name]}).save(tmp_path / file)
    found = run("--from", tmp_path / "a", "--compare", tmp_path / "b")
    assert "no point was measured in both" in str(found.exception)


@pytest.mark.parametrize("points", [{}, {"another/version/8": sample().points["masked/down/8"]}])
def test_results_without_a_known_point_are_refused(tmp_path: Path, points: dict[str, Measurement]) -> None:
    replace(sample(), points=points).save(tmp_path / "none.json")
    found = run("--from", tmp_path / "none.json", "--save", tmp_path / "saved.json")
    assert isinstance(found.exception, UsageError) and "no point that is known here" in str(found.exception)
    assert not (tmp_path / "saved.json").exists()


@pytest.mark.parametrize("options", [("--points", "masked"), ("--quick",), ("--no-peers",)])
@pytest.mark.parametrize("layer", [(), ("--layer",)])
def test_what_is_measured_cannot_be_said_of_saved_results(
    saved: Path, options: tuple[str, ...], layer: tuple[str, ...]
) -> None:
    found = run("--from", saved, *options, *layer)
    assert isinstance(found.exception, UsageError) and "--from measures nothing" in str(found.exception)


def test_explain_needs_no_gpu_and_has_a_reason_for_every_tile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    result = run("--explain")
    assert result.exit_code == 0
    header, *rows = result.output.splitlines()
    assert {row.split()[0] for row in rows} == {"contiguous", "masked", "indexed"}
    assert all(len(row) > header.index("why") for row in rows)


@pytest.mark.parametrize("options", [["--quick"], ["--layer"], ["--points", "x"], ["--save", "x"], ["--brief"]])
def test_explain_takes_no_other_option(options: list[str]) -> None:
    found = run("--explain", *options)
    assert isinstance(found.exception, UsageError) and "leave out the other options" in str(found.exception)


@pytest.mark.parametrize("option", ["--save", "--plot"])
@pytest.mark.parametrize("name", ["", ".", "..", "/", "/dev/full", "/proc/nope/x", "{tmp}", "{tmp}/old.json/x"])
def test_what_cannot_be_written_is_told_before_anything_is_read(
    saved: Path, monkeypatch: pytest.MonkeyPatch, option: str, name: str
) -> None:
    if (option, name) == ("--plot", "/dev/full"):
        name = "/dev/full/x"
    monkeypatch.setattr(Results, "load", lambda path: pytest.fail(f"{path} was read"))
    found = CliRunner().invoke(bench, ["--from", str(saved), option, name.format(tmp=saved.parent)])
    told = found.output + str(found.exception)
    assert found.exit_code in (1, 2) and isinstance(found.exception, (ChordError, SystemExit)), found.exception
    assert "cannot be written" in told or "is a directory" in told or "names a folder" in told


def test_missing_file(tmp_path: Path) -> None:
    assert "does not exist: check the path" in str(run("--from", tmp_path / "none.json").exception)
