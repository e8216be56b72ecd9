"""Saved results that were edited by hand, and files that cannot be written."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from chord_runtime.bench import files
from chord_runtime.bench.layer import LayerResults
from chord_runtime.bench.results import Results
from chord_runtime.errors import OutputError, UsageError
from tests.bench.samples import sample

POINT = ("points", "masked/down/8")
US = (*POINT, "timings", "chord", "us")


def edited(folder: Path, place: tuple[str, ...], value: object) -> Path:
    """A file that ``save`` wrote, with one value replaced."""
    path = folder / "edited.json"
    sample().save(path)
    data: Any = json.loads(path.read_text())
    at = data
    for key in place[:-1]:
        at = at[key]
    at[place[-1]] = value
    path.write_text(json.dumps(data))
    return path


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (("machine",), None),
        (("machine",), {}),
        (("machine", "device"), 7),
        (("machine", "device"), "\ud800"),
        (("method",), None),
        (("ceilings", "read_tbps"), 0),
        (("ceilings", "copy_tbps"), "4.3"),
        (("ceilings", "dense_tflops"), {}),
        (("ceilings", "dense_tflops"), {"4096": 0.0}),
        (("points",), []),
        (POINT, None),
        ((*POINT, "active"), -1),
        ((*POINT, "active"), True),
        ((*POINT, "error"), "0"),
        ((*POINT, "failures"), None),
        ((*POINT, "timings"), []),
        ((*POINT, "alone_us"), 0),
        ((*POINT, "seconds"), -1.0),
        (US, -5),
        (US, 0),
        (US, "115"),
        (US, float("nan")),
        (US, float("inf")),
        (US, 10**400),
    ],
)
def test_edited_results_are_one_error(tmp_path: Path, place: tuple[str, ...], value: object) -> None:
    path = edited(tmp_path, place, value)
    with pytest.raises(UsageError, match=f"^{path} (holds what no run saves|is not a file of bench results)"):
        Results.load(path)


@pytest.mark.parametrize("content", ["[" * 200_000, '{"format": [1]}', "7", '{"format": 1e999}', "\0"])
@pytest.mark.parametrize("load", [Results.load, LayerResults.load])
def test_other_files_are_one_error(tmp_path: Path, load: Callable[[Path], object], content: str) -> None:
    path = tmp_path / "other.json"
    path.write_text(content)
    with pytest.raises(UsageError, match="is not a file of bench results"):
        load(path)


def test_the_other_kind_of_results_is_named(tmp_path: Path) -> None:
    sample().save(tmp_path / "ops.json")
    with pytest.raises(UsageError, match="format 1, not 'layer-1'; it is shown without --layer"):
        LayerResults.load(tmp_path / "ops.json")
    LayerResults({"device": "a card"}, {}, {}).save(tmp_path / "layer.json")
    with pytest.raises(UsageError, match="format 'layer-1', not 1; it needs --layer"):
        Results.load(tmp_path / "layer.json")


def test_what_cannot_be_written_is_one_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path in (tmp_path / "file" / "x.json", Path("/proc/nope/x.json"), tmp_path, tmp_path / ("x" * 300)):
        with pytest.raises(OutputError, match=f"^{path} cannot be written: "):
            files.write({path: b""})
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_full_disk_leaves_neither_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def full(descriptor: int) -> None:
        calls.append(descriptor)
        if len(calls) == 2:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OutputError, match=r"b\.svg cannot be written: No space left on device"):
        files.write({tmp_path / "a.png": b"png", tmp_path / "b.svg": b"svg"})
    assert list(tmp_path.iterdir()) == []


def test_links_stay_links(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "real" / "run.json").touch()
    for name, link in (("run.json", "link.json"), ("new.json", "dangling.json")):
        (tmp_path / link).symlink_to(Path("real") / name)
        files.write_json(tmp_path / link, {})
        assert (tmp_path / link).readlink() == Path("real") / name
        assert (tmp_path / "real" / name).read_text() == "{}\n"
    assert {path.name for path in tmp_path.rglob("*.json")} == {"run.json", "link.json", "new.json", "dangling.json"}
