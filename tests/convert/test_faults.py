"""Disks that fill up or fail: one clear error, nothing half-written, and the same command goes on afterwards."""

from __future__ import annotations

import errno
import os
import resource
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chord_convert import write
from chord_runtime.errors import FileSizeError, OutputError, Unfinished
from chord_runtime.format.layout import MANIFEST
from chord_runtime.format.shard import ShardLayout, TensorSpec, checksum, read_shard_header
from chord_runtime.output import output_error
from tests.checkpoints import write_checkpoint
from tests.convert.helpers import options, run, snapshot


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 6 MB."""
    place = tmp_path / "disk"
    place.mkdir()
    try:
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=6m", "tmpfs", place], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("mounting a small tmpfs is not permitted here")
    yield place
    subprocess.run(["umount", place], check=True)


def test_a_full_disk(small_disk: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = write_checkpoint(tmp_path / "model", layers=4, experts=16, hidden=512)
    output = small_disk / "out"
    with pytest.raises(Unfinished, match=r"are needed, .* are free; make room"):
        run(model, output, options(4))
    monkeypatch.setattr("chord_convert.convert.check_space", lambda directory, needed: None)
    with pytest.raises(Unfinished, match=r"cannot be written: No space left on device, [\d,]+ bytes are free; make"):
        run(model, output, options(4))
    kept = {path.name for path in output.glob("*.safetensors")}
    assert kept
    assert not list(output.rglob("*.tmp"))
    assert not (output / MANIFEST).exists()
    subprocess.run(["mount", "-o", "remount,size=64m", small_disk], check=True)
    run(model, output, options(4))
    run(model, tmp_path / "undisturbed", options(4))
    assert snapshot(output) == snapshot(tmp_path / "undisturbed")


@pytest.mark.parametrize("call", ["pwrite", "fsync"])
@pytest.mark.parametrize("number", [errno.EIO, errno.EDQUOT])
def test_a_failing_disk(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, number: int) -> None:
    original, calls = getattr(os, call), [0]

    def failing(*arguments: object) -> object:
        calls[0] += 1
        if calls[0] > 6:
            raise OSError(number, os.strerror(number))
        return original(*arguments)

    with monkeypatch.context() as patched:
        patched.setattr(os, call, failing)
        with pytest.raises(Unfinished, match="Input/output error" if number == errno.EIO else "Disk quota exceeded"):
            run(model, tmp_path / "out")
    assert not list((tmp_path / "out").glob("*.tmp"))
    assert not (tmp_path / "out" / MANIFEST).exists()
    run(model, tmp_path / "out")


@pytest.mark.parametrize(("number", "told"), [(errno.ENOSPC, True), (errno.EDQUOT, True), (errno.EACCES, False)])
def test_free_space_is_told_where_it_matters(tmp_path: Path, number: int, told: bool) -> None:
    assert ("bytes are free" in str(output_error(tmp_path / "f", OSError(number, "?")))) == told


def test_a_disk_without_inodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = list(os.statvfs(tmp_path))
    found[5:8] = [1000, 0, 0]
    monkeypatch.setattr(os, "statvfs", lambda path: os.statvfs_result(found))
    error = output_error(tmp_path / "f", OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
    assert "No space left on device, no inodes (df -i) and " in str(error)


def test_a_limit_on_the_size_of_a_file_is_not_called_unfinished(model: Path, tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, before[1]))
    try:
        with pytest.raises(FileSizeError, match=r"File too large; raise the limit .*ulimit -f"):
            run(model, tmp_path / "out")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    run(model, tmp_path / "out")


@pytest.mark.parametrize("accepted", ["open", "write"])
def test_file_systems_without_direct_io(
    model: Path, packed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, accepted: str
) -> None:
    """Refused when it is asked for, or only when it is used."""
    pwrite, fcntl_ = os.pwrite, write.fcntl.fcntl

    def refusing_write(descriptor: int, data: memoryview, offset: int) -> int:
        if fcntl_(descriptor, write.fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(errno.EINVAL, "no direct I/O")
        return pwrite(descriptor, data, offset)

    def refusing_flag(descriptor: int, command: int, flags: int = 0) -> int:
        if command == write.fcntl.F_SETFL and flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "no direct I/O")
        return fcntl_(descriptor, command, flags)

    if accepted == "write":
        monkeypatch.setattr(os, "pwrite", refusing_write)
    else:
        monkeypatch.setattr(write.fcntl, "fcntl", refusing_flag)
    run(model, tmp_path / "out")
    assert snapshot(tmp_path / "out") == snapshot(packed)


@settings(max_examples=40, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 30_000), min_size=1, max_size=6),
    chunk=st.integers(1, 9_000),
    stage=st.sampled_from([8192, 40_000]),
)
def test_writer_with_any_sizes(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[int], chunk: int, stage: int
) -> None:
    path = tmp_path_factory.mktemp("writer") / "file.safetensors"
    layout = ShardLayout(tuple(TensorSpec(f"t{i}", "U8", (size,), size) for i, size in enumerate(sizes)), "{}")
    data = [os.urandom(size) for size in sizes]
    with (
        write.ThreadPoolExecutor(1) as thread,
        write.ShardWriter(path, layout, write.Stage(stage, chunk, thread)) as out,
    ):
        for tensor in data:
            for at in range(0, len(tensor), chunk):
                piece = tensor[at : at + chunk]
                out.take(len(piece))[:] = piece
                out.put(len(piece))
        out.commit()
    header = read_shard_header(path)
    content = path.read_bytes()
    assert header.size == layout.size == len(content)
    for i, tensor in enumerate(data):
        stored = header.tensors[f"t{i}"]
        assert content[stored.start : stored.stop] == tensor
        assert stored.checksum == checksum(tensor)


def test_writer_refuses_more_or_less_than_its_layout(tmp_path: Path) -> None:
    layout = ShardLayout((TensorSpec("a", "U8", (10,), 10),))
    with write.ThreadPoolExecutor(1) as thread:
        stage = write.Stage(8192, 100, thread)
        with write.ShardWriter(tmp_path / "f", layout, stage) as out:
            out.take(11)
            with pytest.raises(ValueError, match="1 bytes too many"):
                out.put(11)
        with write.ShardWriter(tmp_path / "f", layout, stage) as out, pytest.raises(ValueError, match="are missing"):
            out.commit()
    assert not list(tmp_path.iterdir())


def test_two_writers_of_one_file(tmp_path: Path) -> None:
    layout = ShardLayout((TensorSpec("a", "U8", (1,), 1),))
    with write.ThreadPoolExecutor(1) as thread:
        stage = write.Stage(8192, 100, thread)
        with write.ShardWriter(tmp_path / "f", layout, stage):
            with pytest.raises(OutputError, match="is being written by another run"):
                write.ShardWriter(tmp_path / "f", layout, stage)
            assert (tmp_path / "f.tmp").exists()
