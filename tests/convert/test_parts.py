"""Work divided among processes: parts meet in one directory, and the last one finishes it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from chord_convert.executors.parts import parse_part
from chord_runtime.errors import OutputError, UsageError
from chord_runtime.format.layout import MANIFEST
from tests.convert.helpers import options, run, snapshot

COMMAND = [sys.executable, "-m", "chord_convert"]


def test_parts_one_after_the_other(model: Path, packed: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    left = [run(model, output, part=(part, 3)).missing_files for part in (2, 0)]
    assert left == [4, 2]
    assert not (output / MANIFEST).exists()
    assert run(model, output, part=(1, 3)).missing_files == 0
    assert snapshot(output) == snapshot(packed)
    assert run(model, output, part=(1, 3)).written_bytes == 0


def test_parts_at_the_same_time_from_their_launcher(model: Path, packed: Path, tmp_path: Path) -> None:
    """More parts than there is work, so that some have nothing to do."""
    command = [*COMMAND, str(model), "--ep", "2", "-o", str(tmp_path / "out"), "--part", "auto"]
    parts = [
        subprocess.Popen(command, env={**os.environ, "RANK": str(rank), "WORLD_SIZE": "7"}, stdout=subprocess.PIPE)
        for rank in range(7)
    ]
    texts = [part.communicate(timeout=120)[0].decode() for part in parts]
    assert [part.returncode for part in parts] == [0] * 7
    assert sum("finished" in text for text in texts) >= 1
    assert snapshot(tmp_path / "out") == snapshot(packed)


def test_parts_of_any_number_may_go_on(model: Path, packed: Path, tmp_path: Path) -> None:
    run(model, tmp_path / "out", part=(0, 2))
    run(model, tmp_path / "out")
    assert snapshot(tmp_path / "out") == snapshot(packed)


def test_the_same_part_twice_is_refused(model: Path, tmp_path: Path) -> None:
    def again(*arguments: object) -> None:
        with pytest.raises(OutputError, match="in use by another run"):
            run(model, tmp_path / "out", part=(0, 2))
        with pytest.raises(OutputError, match="in use by another run"):
            run(model, tmp_path / "out")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(model, tmp_path / "out", part=(0, 2), run=again)


def test_parts_of_another_number_at_the_same_time_are_refused(model: Path, packed: Path, tmp_path: Path) -> None:
    def beside(*arguments: object) -> None:
        with pytest.raises(OutputError, match=r"in use by parts of 2 \(--part i/2\), this is one of 3"):
            run(model, tmp_path / "out", part=(1, 3))
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(model, tmp_path / "out", part=(0, 2), run=beside)
    for part in range(3):
        run(model, tmp_path / "out", part=(part, 3))
    assert snapshot(tmp_path / "out") == snapshot(packed)


def test_parts_must_agree(model: Path, tmp_path: Path) -> None:
    run(model, tmp_path / "out", part=(0, 2))
    with pytest.raises(OutputError, match="ep_size: 2 in the directory, 4 now"):
        run(model, tmp_path / "out", options(4), part=(1, 2))


@pytest.mark.parametrize(
    ("text", "environment", "expected"),
    [
        ("0/4", {}, (0, 4)),
        ("auto", {"RANK": "3", "WORLD_SIZE": "8"}, (3, 8)),
        ("auto", {"SLURM_PROCID": "1", "SLURM_NTASKS": "2"}, (1, 2)),
        ("auto", {"JOB_COMPLETION_INDEX": "5", "JOB_COMPLETIONS": "6", "RANK": "0"}, (5, 6)),
    ],
)
def test_part_numbers(text: str, environment: dict[str, str], expected: tuple[int, int]) -> None:
    assert parse_part(text, environment) == expected


@pytest.mark.parametrize("text", ["4/4", "1", "-1/4", "a/b", "1/0", "auto"])
def test_part_numbers_that_cannot_be(text: str) -> None:
    with pytest.raises(UsageError, match="--part"):
        parse_part(text, {})
