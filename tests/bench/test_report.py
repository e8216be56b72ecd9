"""What is derived from recorded numbers, and how it is shown, saved and compared."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from chord_runtime.bench.cases import case_of
from chord_runtime.bench.report import brief, compare, report, table
from chord_runtime.bench.results import Measurement, Results, geometric_mean, measurement
from chord_runtime.bench.timing import Timing
from chord_runtime.errors import UsageError
from tests.bench.samples import MEASURED, sample


def cells(text: str, first: str, title: str) -> list[str]:
    section = text.split(f"### {title}")[1]
    [line] = [line for line in section.split("###")[0].splitlines() if line.startswith(f"| {first} ")]
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_a_row_of_the_table() -> None:
    text = report(sample())
    row = cells(text, "8", "Masked decode, EP8: gate_up")
    # 48 experts of 4096 × 7168: 792.7 MB of weights, 45.1 GFLOP; floor 174.2 µs; alone 196.6 µs.
    turns, alone = ["207.0", "204.9–211.1", "241.0"], ["196.6", "115", "4.03", "174.2", "89%", "249.0"]
    assert row == ["8", *turns, *alone, "1.16 ×", "9.5"]
    assert "48 experts, N = 4096, K = 7168" in text
    assert "bulk read 4.60 TB/s, cuBLAS bf16 700 TFLOP/s (4096³), 672 TFLOP/s (8192³)" in text
    assert "points: 12, measured in 18 s" in text


def test_contiguous_is_held_against_cublas_in_turns() -> None:
    # 360.8 GFLOP in 523 µs: 690 TFLOP/s, what cuBLAS has there.
    assert cells(report(sample()), "128", "Contiguous prefill, EP8: gate_up")[4] == "100%"
    assert sample().of_dense(case_of("contiguous/gate_up/256")) == pytest.approx(714.5 / 690, rel=1e-3)
    assert sample().of_dense(case_of("masked/gate_up/8")) is None
    assert "cuBLAS" not in report(sample()).split("### Masked")[1].split("###")[0]


def test_speedup_is_the_least_of_times_taken_alike() -> None:
    results = sample()
    # Against Humming in turns, against what was published alone, whichever is less.
    assert results.speedups(case_of("masked/gate_up/32")) == pytest.approx(
        {"humming": 345 / 254, "novitalabs/chord (published)": 329 / (0.95 * 254)}
    )
    assert results.speedup(case_of("masked/gate_up/32")) == pytest.approx(345 / 254)
    assert results.speedup(case_of("contiguous/down/128")) == pytest.approx(310 / (0.95 * 282))
    speedups = [results.speedup(case) for case in results.cases]
    expected = math.exp(sum(math.log(value) for value in speedups if value) / len(MEASURED))
    assert results.mean_speedup(results.cases) == pytest.approx(expected)
    assert cells(report(results), "all", "Speed-up over the better")[1:3] == ["12", f"{expected:.2f} ×"]
    assert f"12 points, geometric mean {expected:.2f} ×, least 1.01 × at decode/gate_up/20" in report(results)


def test_brief_has_a_row_for_each_operation_and_projection() -> None:
    header, _, *rows = brief(sample()).split("\n\n")[0].splitlines()
    assert len(rows) == len({key.rpartition("/")[0] for key in MEASURED})
    assert [cell.strip() for cell in header.split("|")[3:7]] == [
        "Chord µs", "Chord alone µs", "humming µs", "novitalabs/chord (published) µs"
    ]  # fmt: skip
    assert [cell.strip() for cell in rows[0].split("|")[1:-1]] == [
        "masked gate_up", "8 / 32 rows per expert", "207 / 254", "197 / 241", "241 / 345", "249 / 329", "1.16 / 1.36"
    ]  # fmt: skip
    assert "12 points" in brief(sample())


def test_what_was_recorded_elsewhere_is_held_against_chord_alone() -> None:
    case = case_of("decode/gate_up/20")
    assert sample(humming=False).speedups(case)["humming (recorded)"] == pytest.approx(212 / (0.95 * 210))
    before = {key: replace(point, alone_us=None) for key, point in sample().points.items()}
    assert replace(sample(), points=before).speedups(case)["novitalabs/chord (published)"] == pytest.approx(222 / 210)


def test_recorded_humming_stands_in_on_an_h200_only() -> None:
    case = case_of("decode/gate_up/20")
    assert sample(humming=False).peers(case) == {"humming (recorded)": 212, "novitalabs/chord (published)": 222}
    assert sample("NVIDIA H100 80GB HBM3").peers(case) == {"humming": 212}
    other = sample("NVIDIA H100 80GB HBM3", humming=False)
    assert other.speedup(case) is None
    assert "no speed-up" in report(other)
    assert "published" not in report(other)


def test_failures_are_shown_and_leave_the_rest() -> None:
    points = dict(sample().points)
    points["masked/gate_up/8"] = Measurement(
        48, None, {"humming": Timing(241, 240, 242, 9, 40)}, {"chord": "wrong value"}
    )
    text = report(replace(sample(), points=points))
    assert cells(text, "8", "Masked decode, EP8: gate_up")[1:3] == ["", "failed"]
    assert "- masked/gate_up/8: chord: wrong value" in text


def test_save_and_load(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "run.json"
    sample().save(path)
    assert Results.load(path) == sample()
    assert [file.name for file in path.parent.iterdir()] == ["run.json"]


def test_a_save_that_fails_leaves_the_file(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    sample().save(path)
    with pytest.raises(TypeError):
        replace(sample(), machine={"device": object()}).save(path)  # type: ignore[dict-item]
    assert Results.load(path) == sample()


def test_files_of_before_are_read() -> None:
    """Times alone and durations came later."""
    point = {"active": 48, "error": 0.0, "timings": {}, "failures": {}}
    assert measurement(point) == Measurement(48, 0.0, {})


def test_merging() -> None:
    one, two = (replace(sample(), points={key: sample().points[key]}) for key in ("masked/down/8", "tp8/down/8192"))
    both = one.merged(replace(two, ceilings=replace(two.ceilings, copy_tbps=4.0)))
    assert [case.key for case in both.cases] == ["masked/down/8", "tp8/down/8192"]
    assert both.ceilings.copy_tbps == 4.0
    again = replace(one, points={"masked/down/8": sample(scale=2).points["masked/down/8"]})
    assert both.merged(again).us(case_of("masked/down/8")) == 230
    with pytest.raises(UsageError, match=r"device 'NVIDIA H200.*' and 'H100'"):
        one.merged(sample("H100"))


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"format": 99}', '{"format": 1, "points": {}}'])
def test_load_refuses_other_files(tmp_path: Path, content: str) -> None:
    path = tmp_path / "run.json"
    path.write_text(content)
    with pytest.raises(UsageError, match=r"run\.json"):
        Results.load(path)


def test_compare_finds_what_got_slower() -> None:
    text, regressed = compare(sample(), sample(scale=1.02))
    assert regressed == []
    assert "12 points, geometric mean +2.0%, 0 slower by over 3%" in text
    text, regressed = compare(sample(), sample(scale=1.05))
    assert len(regressed) == 12
    assert "not the same card" in compare(sample("NVIDIA H200 A"), sample("NVIDIA H200 B"))[0]
    one = replace(sample(), points={"masked/down/8": sample(scale=2).points["masked/down/8"]})
    text, regressed = compare(sample(), one)
    assert [case.key for case in regressed] == ["masked/down/8"]
    assert "left out, not measured in both: " in text
    assert text.endswith("1 point, geometric mean +100.0%, 1 slower by over 3%")
    with pytest.raises(UsageError, match="no point was measured in both runs"):
        compare(sample(), replace(sample(), points={}))
    quick = replace(sample(), method={"timing": "quick"})
    assert "timing: before median, now quick: not measured alike" in compare(sample(), quick)[0]
    assert "not measured alike" not in compare(sample(), sample())[0]


def test_table_is_aligned_markdown() -> None:
    assert (
        table(["a", "µs"], [["long", "1"], ["b", "22"]]) == "| a    | µs |\n|------|---:|\n| long |  1 |\n| b    | 22 |"
    )


def test_timing_of_single_times() -> None:
    assert Timing.of([5.0, 1.0, 2.0, 4.0, 3.0, 100.0], 7.0) == Timing(3.5, 2.0, 5.0, 6, 7.0)
    assert geometric_mean([]) is None
    assert geometric_mean([2.0, 8.0]) == pytest.approx(4.0)


def test_saved_json_is_plain(tmp_path: Path) -> None:
    sample().save(tmp_path / "run.json")
    data = json.loads((tmp_path / "run.json").read_text())
    assert data["points"]["masked/gate_up/8"]["timings"]["chord"] == {
        "us": 207.0,
        "low": 207 * 0.99,
        "high": 207 * 1.02,
        "rounds": 100,
        "host_us": 9.5,
    }
