"""The plot, from recorded numbers."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from chord_runtime.bench import plot as plot_module
from chord_runtime.bench.plot import plot
from chord_runtime.errors import OutputError, UsageError
from tests.bench.samples import sample


def test_png_and_svg_with_every_panel(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    png, svg = plot(sample(), tmp_path / "made" / "bench")
    assert png.read_bytes().startswith(b"\x89PNG")
    text = svg.read_text()
    for words in ("Masked decode, EP8", "Indexed, TP8", "rows per expert", "humming", "published", "floor"):
        assert f"<!-- {words}" in text or words in text
    assert text == plot(sample(), tmp_path / "again")[1].read_text(), "the same numbers give the same file"


def test_speedups_stand_at_the_points(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    labels: list[tuple[object, ...]] = []
    monkeypatch.setattr(plot_module, "_label", lambda axis, *label: labels.append(label))
    plot(sample(), tmp_path / "bench")
    assert labels[0] == (8, 207.0, "1.16×")
    assert len(labels) == 12


def test_one_scenario_alone(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    one = replace(sample(), points={"masked/down/8": sample().points["masked/down/8"]})
    assert plot(one, tmp_path / "one")[0].stat().st_size > 5000


@pytest.mark.parametrize("known", [True, False])
def test_no_point(tmp_path: Path, known: bool) -> None:
    pytest.importorskip("matplotlib")
    points = {} if known else {"masked/down/9": sample().points["masked/down/8"]}
    with pytest.raises(UsageError, match="no point to plot"):
        plot(replace(sample(), points=points), tmp_path / "bench")


def test_both_files_or_none(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    (tmp_path / "bench.svg").mkdir()
    with pytest.raises(OutputError, match=r"bench\.svg cannot be written: it is not a regular file"):
        plot(sample(), tmp_path / "bench")
    assert not (tmp_path / "bench.png").exists()


def test_without_matplotlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(UsageError, match=r"chord-moe\[bench\]"):
        plot(sample(), tmp_path / "bench")
