"""What a run says: a bar with each worker's speed, or JSON lines, or nothing."""

from __future__ import annotations

import io
import json

import pytest

from chord_convert import progress as module
from chord_convert.progress import Progress


def numbers(progress: Progress) -> None:
    progress.start(4_000_000, 1_000_000)
    progress.add(0, 1_000_000)
    progress.add(1, 2_000_000)
    progress.close()


def test_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_RATE_SECONDS", 0.0)
    stream = io.StringIO()
    numbers(Progress(bar=True, stream=stream))
    assert "4.00M/4.00M" in stream.getvalue()
    assert "w0 " in stream.getvalue()
    assert "w1 " in stream.getvalue()


def test_json_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_LOG_SECONDS", 0.0)
    stream = io.StringIO()
    numbers(Progress(log=True, stream=stream))
    first, *_, last = (json.loads(line) for line in stream.getvalue().splitlines())
    assert (first["event"], first["total_bytes"], first["kept_bytes"]) == ("start", 4_000_000, 1_000_000)
    assert (last["event"], last["done_bytes"], last["seconds_left"]) == ("progress", 4_000_000, 0)
    assert last["workers_gb_per_s"].keys() == {"0", "1"}


def test_quiet() -> None:
    stream = io.StringIO()
    numbers(Progress(stream=stream))
    assert stream.getvalue() == ""


def test_a_line_a_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    numbers(Progress(lines=True, stream=stream))
    assert stream.getvalue() == ""
    monkeypatch.setattr(module, "_LINE_SECONDS", 0.0)
    numbers(Progress(lines=True, stream=stream))
    assert stream.getvalue().splitlines()[-1].startswith("written   4.00 MB of 4.00 MB, ")
