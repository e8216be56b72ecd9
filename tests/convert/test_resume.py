"""Killed, stopped, repeated: what was finished stays, and the end is what an undisturbed run gives."""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
import random
import shutil
import signal
import threading
import time
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from chord_convert.convert import convert, job_of, prepare
from chord_convert.finish import provenance
from chord_convert.plan import Task
from chord_convert.progress import Progress
from chord_convert.resume import claim
from chord_convert.source import Source
from chord_convert.tasks import Buffers, Tick
from chord_runtime.errors import OutputError, ScaleError, SourceError, Unfinished, UnreadableError
from chord_runtime.format.layout import MANIFEST, PROGRESS, Mode, Placement
from chord_runtime.format.metadata import Manifest
from chord_runtime.format.shard import read_shard_header
from tests.checkpoints import write_checkpoint
from tests.convert.helpers import options, run, snapshot

WORKERS = 3
CHAINS, KILLS = 12, 4


class Slow(Progress):
    """Takes time for each chunk, so that there is a middle to be killed in."""

    def add(self, worker: int, count: int) -> None:
        time.sleep(0.003)


def child(model: Path, output: Path, ready: Connection) -> None:
    """Prepare, tell the parent, convert."""
    prepared = prepare(str(model), options(4))
    ready.send_bytes(b"ready")
    convert(prepared, output, workers=WORKERS, progress=Slow())


def test_files_that_cannot_be_opened_now_are_not_taken_for_lost(
    model: Path, packed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a finished directory, or one that is not: what is lost or unfinished is removed or written again."""
    shutil.copytree(packed, tmp_path / "finished")
    run(model, tmp_path / "unfinished", part=(0, 2))
    before = {name: snapshot(tmp_path / name) for name in ("finished", "unfinished")}
    real = Path.open

    def refuse(self: Path, *arguments: Any, **named: Any) -> Any:
        if self.suffix == ".safetensors":
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), str(self))
        return real(self, *arguments, **named)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "open", refuse)
        for name in before:
            with pytest.raises(UnreadableError, match=r"Too many open files; raise the limit"):
                run(model, tmp_path / name)
    assert all(before[name].items() <= snapshot(tmp_path / name).items() for name in before)


def start(model: Path, output: Path) -> multiprocessing.process.BaseProcess:
    """A conversion in a process of its own that is about to write."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.convert.test_resume"])
    ours, theirs = context.Pipe()
    process = context.Process(target=child, args=(model, output, theirs))
    process.start()
    assert ours.recv_bytes() == b"ready"
    return process


def finished_files(directory: Path) -> dict[str, int]:
    """Inode of every file that has its final name."""
    return {path.name: path.stat().st_ino for path in directory.glob("*.safetensors")}


@pytest.mark.slow
def test_killed_at_random_points_and_resumed(larger: Path, tmp_path: Path) -> None:
    start(larger, tmp_path / "whole").join()
    undisturbed = snapshot(tmp_path / "whole")
    files = len(finished_files(tmp_path / "whole"))
    assert MANIFEST in undisturbed

    dice, kept = random.Random(20260), set()
    for chain in range(CHAINS):
        output, killed = tmp_path / f"out{chain}", 0
        while killed < KILLS and not (output / MANIFEST).exists():
            before = finished_files(output)
            process = start(larger, output)
            enough = dice.randint(len(before), files)
            while process.is_alive() and len(finished_files(output)) < enough:
                time.sleep(0.0005)
            time.sleep(dice.uniform(0, 0.02))
            process.kill()
            process.join()
            killed += process.exitcode == -signal.SIGKILL
            left = finished_files(output)
            kept.add(len(left))
            assert before.items() <= left.items(), "a finished file was written again"
            assert len(list(output.glob("*.safetensors.tmp"))) <= WORKERS
        run(larger, output, options(4))
        assert before.items() <= finished_files(output).items()
        assert snapshot(output) == undisturbed
        shutil.rmtree(output)
    assert len(kept) > 5, "kills did not hit different points"


def test_only_missing_files_are_written(model: Path, packed: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    shutil.copytree(packed, output)
    (output / MANIFEST).unlink()
    lost = output / "experts-layer002-ep001of002-tp00of01-00.safetensors"
    size = lost.stat().st_size
    lost.unlink()
    begin(model, output)
    kept = finished_files(output)
    result = run(model, output)
    assert result.written_bytes == size
    assert kept.items() <= finished_files(output).items()
    assert snapshot(output) == snapshot(packed)


def begin(model: Path, output: Path, chosen: object = None) -> None:
    """Put the record of an unfinished conversion into ``output``."""

    def stop(*arguments: object) -> None:
        raise KeyboardInterrupt

    output.mkdir(exist_ok=True)
    aside = output.parent / "aside"
    with pytest.raises(KeyboardInterrupt):
        run(model, aside, chosen or options(), run=stop)  # type: ignore[arg-type]
    (aside / PROGRESS).rename(output / PROGRESS)
    shutil.rmtree(aside)


@pytest.mark.parametrize("damage", ["cut", "header", "emptied"])
def test_a_damaged_finished_file_is_written_again(model: Path, packed: Path, tmp_path: Path, damage: str) -> None:
    output = tmp_path / "out"
    shutil.copytree(packed, output)
    (output / MANIFEST).unlink()
    begin(model, output)
    file = output / "shared-00000.safetensors"
    data = bytearray(file.read_bytes())
    if damage == "header":
        data[20] ^= 1
    file.write_bytes({"cut": data[:-1], "header": data, "emptied": b""}[damage])
    run(model, output)
    assert snapshot(output) == snapshot(packed)


def test_a_finished_directory_is_left_as_it_is(model: Path, packed: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    shutil.copytree(packed, output)
    before = {path: path.stat().st_mtime_ns for path in output.iterdir()}
    result = run(model, output)
    assert (result.written_bytes, result.missing_files) == (0, 0)
    assert {path: path.stat().st_mtime_ns for path in output.iterdir()} == before


@pytest.mark.parametrize("lost", ["experts-layer002-ep000of002-tp00of01-00.safetensors", "LICENSE"])
def test_a_finished_directory_that_lost_a_file_gets_it_back(
    model: Path, packed: Path, tmp_path: Path, lost: str
) -> None:
    output = tmp_path / "out"
    shutil.copytree(packed, output)
    (output / lost).unlink()
    run(model, output)
    assert snapshot(output) == snapshot(packed)


def test_a_file_system_without_locks(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(descriptor: int, kind: int) -> None:
        raise OSError(errno.ENOTSUP, "Operation not supported")

    monkeypatch.setattr("fcntl.flock", refuse)
    with pytest.raises(OutputError, match="cannot be locked"):
        run(model, tmp_path / "out")


def test_the_first_error_is_told(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not one that the other workers met because of it."""
    failed = threading.Event()

    def fail(task: Task, source: Source, directory: Path, buffers: Buffers, tick: Tick) -> bool:
        if "layer001" in task.outputs[0].name:
            failed.set()
            raise ScaleError("the cause")
        failed.wait()
        time.sleep(0.1)
        raise SourceError("reading was stopped")

    monkeypatch.setattr("chord_convert.executors.threads.run_task", fail)
    with pytest.raises(ScaleError, match="the cause"):
        run(model, tmp_path / "out", workers=2)


@pytest.mark.parametrize("finished", [True, False])
@pytest.mark.parametrize(
    ("chosen", "message"),
    [
        (options(4), r"packing\.ep_size: 2 in the directory, 4 now"),
        (options(2, placement=Placement.ROUND_ROBIN), r'packing\.placement: "linear" in the directory, "round_robin"'),
        (options(2, modes=(Mode.MASKED,)), r"packing\.modes"),
        (options(2, ranks=(0,)), r"ep_ranks: \[0, 1\] in the directory, \[0\] now"),
        (options(2, experts_only=True), r"experts_only: false in the directory, true now"),
    ],
)
def test_other_options_are_refused(
    model: Path, packed: Path, tmp_path: Path, finished: bool, chosen: object, message: str
) -> None:
    output = tmp_path / "out"
    if finished:
        shutil.copytree(packed, output)
    else:
        begin(model, output)
    before = snapshot(output)
    with pytest.raises(OutputError, match=message):
        run(model, output, chosen)  # type: ignore[arg-type]
    assert snapshot(output) == before


def test_another_source_is_refused(model: Path, tmp_path: Path) -> None:
    output, other = tmp_path / "out", tmp_path / "model"
    begin(model, output)
    shutil.copytree(model, other)
    os.utime(other / "model-00002-of-000004.safetensors")
    with pytest.raises(OutputError, match="the source's files have changed since"):
        run(other, output)
    write_checkpoint(tmp_path / "bigger", experts=16)
    with pytest.raises(OutputError, match=r"packing\.num_experts: 8 in the directory, 16 now"):
        run(tmp_path / "bigger", output)


def test_another_version_of_the_tool_goes_on(
    model: Path, packed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One packed format is one format, whichever release writes it; the last one signs."""
    output = tmp_path / "out"
    with monkeypatch.context() as older:
        older.setattr(Manifest.__init__, "__defaults__", ("0.0.9",))
        run(model, output, part=(0, 2))
    run(model, output)
    assert snapshot(output) == snapshot(packed)
    older_manifest = replace(Manifest.read(output), tool_version="0.0.9")
    (output / MANIFEST).write_text(older_manifest.to_string())
    assert run(model, output).written_bytes == 0


def test_a_directory_with_other_things_is_refused(model: Path, tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("precious")
    with pytest.raises(OutputError, match=r"did not write \(thesis\.txt"):
        run(model, tmp_path)
    assert snapshot(tmp_path).keys() == {"thesis.txt"}
    with pytest.raises(OutputError, match="is not a directory"):
        run(model, tmp_path / "thesis.txt")


def test_stale_temporaries_are_removed_and_no_other_files(model: Path, packed: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    begin(model, output)
    for name in ("experts-layer001-ep000of002-tp00of01-00.safetensors.tmp", "config.json.tmp", f"{MANIFEST}.tmp"):
        (output / name).write_bytes(b"left by a run that was killed")
    (output / "theirs.tmp").mkdir()
    for theirs in ("notes.tmp", "theirs.tmp/config.json.tmp", "chord-lock-x.json", f"{PROGRESS}.old"):
        (output / theirs).write_bytes(b"precious")
    run(model, output)
    assert {name: value for name, value in snapshot(output).items() if (packed / name).exists()} == snapshot(packed)
    assert snapshot(output).keys() - snapshot(packed).keys() == {
        "notes.tmp", "theirs.tmp/config.json.tmp", "chord-lock-x.json", f"{PROGRESS}.old"
    }  # fmt: skip


def test_a_side_file_named_like_a_lock_travels(tmp_path: Path) -> None:
    model = write_checkpoint(tmp_path / "model")
    (model / "chord-lock-x.json").write_text("{}")
    run(model, tmp_path / "out")
    assert (tmp_path / "out" / "chord-lock-x.json").exists()


def change_weights(model: Path) -> None:
    """Other weights under the same headers and sizes, as another fine-tune has them."""
    for file in model.glob("model-*.safetensors"):
        data = bytearray(file.read_bytes())
        start = 8 + int.from_bytes(data[:8], "little")
        for tensor, entry in json.loads(data[8:start]).items():
            if tensor.endswith("weight_packed"):
                data[start + entry["data_offsets"][0]] ^= 0x11
        file.write_bytes(data)


@pytest.mark.parametrize("lost", [True, False])
def test_a_finished_directory_of_a_source_that_changed_is_refused(tmp_path: Path, lost: bool) -> None:
    model, output = write_checkpoint(tmp_path / "model"), tmp_path / "out"
    run(model, output)
    change_weights(model)
    if lost:
        (output / "experts-layer002-ep000of002-tp00of01-00.safetensors").unlink()
        for file in model.iterdir():
            os.utime(file, (1, 1))
    before = snapshot(output)
    with pytest.raises(OutputError, match=r"Not what the source holds now: .*delete these files and run"):
        run(model, output)
    assert snapshot(output) == before
    for file in output.glob("experts-*"):
        file.unlink()
    run(model, output)
    run(model, tmp_path / "whole")
    assert snapshot(output) == snapshot(tmp_path / "whole")


def test_a_touched_source_is_the_same_source(model: Path, packed: Path, tmp_path: Path) -> None:
    output, copy = tmp_path / "out", tmp_path / "model"
    shutil.copytree(packed, output)
    shutil.copytree(model, copy)
    for file in copy.iterdir():
        os.utime(file)
    assert run(copy, output).written_bytes == 0
    run(copy, tmp_path / "again")
    assert snapshot(tmp_path / "again") == snapshot(output) == snapshot(packed)


@pytest.mark.parametrize("name", ["shared-00000.safetensors", "config.json", "model.safetensors.index.json"])
def test_a_finished_directory_with_a_damaged_file_is_mended(
    model: Path, packed: Path, tmp_path: Path, name: str
) -> None:
    """Also where the size is the same and the header can be read: a digit of a checksum."""
    output = tmp_path / "out"
    shutil.copytree(packed, output)
    if name.endswith(".safetensors"):
        digest = next(iter(read_shard_header(output / name).tensors.values())).checksum.encode()
    else:
        digest = b"model"
    (output / name).write_bytes((output / name).read_bytes().replace(digest, digest[::-1], 1))
    assert snapshot(output) != snapshot(packed)
    run(model, output)
    assert snapshot(output) == snapshot(packed)


def test_ranks_may_be_added_to_a_finished_directory(model: Path, packed: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    run(model, output, options(2, ranks=(1,)))
    kept = finished_files(output)
    with pytest.raises(OutputError, match=r"takes further ranks when --ranks names those it has too"):
        run(model, output, options(2, ranks=(0,)))
    run(model, output, options(2, ranks=(0, 1)))
    assert kept.items() <= finished_files(output).items()
    assert snapshot(output) == snapshot(packed)


def test_an_output_inside_the_source(tmp_path: Path) -> None:
    model = write_checkpoint(tmp_path / "model")
    begin(model, model / "out")
    (model / "run.log").write_text("started")
    run(model, model / "out")
    assert run(model, model / "out").written_bytes == 0
    run(model, tmp_path / "elsewhere")
    assert snapshot(model / "out") == snapshot(tmp_path / "elsewhere")
    before = snapshot(model)
    with pytest.raises(OutputError, match="did not write"):
        run(model, model)
    assert snapshot(model) == before


def test_a_second_run_on_the_same_directory_is_refused(model: Path, tmp_path: Path) -> None:
    prepared = prepare(str(model), options())
    job = job_of(prepared, tmp_path / "out", provenance(prepared.source, prepared.plan), Progress())
    with claim(tmp_path / "out", job, None):
        with pytest.raises(OutputError, match="in use by another run"):
            run(model, tmp_path / "out")
        with pytest.raises(OutputError, match="in use by another run"):
            run(model, tmp_path / "out", part=(0, 2))
    run(model, tmp_path / "out")


def test_ctrl_c_leaves_nothing_half_written(larger: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"

    class Interrupting(Progress):
        """Sends Ctrl-C once, when the third file is finished."""

        finished = 0

        def done(self, *arguments: Any, **where: Any) -> None:
            with self._lock:
                self.finished += 1
                if self.finished == 3:
                    os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        run(larger, output, options(4), workers=WORKERS, progress=Interrupting())
    assert not list(output.glob("*.tmp"))
    assert not (output / MANIFEST).exists()
    kept = finished_files(output)
    assert kept
    run(larger, output, options(4))
    assert kept.items() <= finished_files(output).items()


@pytest.mark.parametrize("change", ["shrunk", "touched"])
def test_a_source_that_changes_mid_way_is_an_error(tmp_path: Path, change: str) -> None:
    model, output = write_checkpoint(tmp_path / "model"), tmp_path / "out"
    prepared = prepare(str(model), options())
    file = sorted(model.glob("model-*"))[2]
    if change == "shrunk":
        os.truncate(file, file.stat().st_size // 2)
    else:
        os.utime(file, ns=(1, 1))
    with prepared.source, pytest.raises((Unfinished, SourceError), match=file.name):
        convert(prepared, output)
    assert not (output / MANIFEST).exists()
    assert not list(output.glob("*.tmp"))
