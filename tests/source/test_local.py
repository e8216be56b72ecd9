"""Directories: exact positional reads, and one clear error for every way in which a file can fail."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path

import pytest

from chord_convert.source import LocalSource, open_source
from chord_runtime.errors import CheckpointError, SourceError, UsageError

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    (tmp_path / "a.bin").write_bytes(bytes(range(256)) * 64)
    (tmp_path / "config.json").write_text('{"a": [1, null]}')
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "b.py").write_text("pass\n")
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "config").write_text("hidden")
    return tmp_path


def test_lists_files_but_no_hidden_ones(directory: Path) -> None:
    with LocalSource(directory) as source:
        assert {name: info.size for name, info in source.files().items()} == {
            "a.bin": 16384,
            "config.json": 16,
            "sub/b.py": 5,
        }
        assert source.identity.name == directory.name
        assert source.identity.commit is None
        assert open_source(source.identity.location).files() == source.files()


def test_reads_into_the_callers_buffer(directory: Path) -> None:
    content = (directory / "a.bin").read_bytes()
    with LocalSource(directory) as source:
        assert bytes(source.read("a.bin", 10, 300)) == content[10:300]
        assert bytes(source.read("a.bin", 5, 5)) == b""
        buffer = bytearray(b"\xff" * 100)
        filled = source.read("a.bin", 1000, 1050, memoryview(buffer)[20:])
        assert bytes(filled) == content[1000:1050] == bytes(buffer[20:70])
        assert buffer[:20] == b"\xff" * 20
        assert buffer[70:] == b"\xff" * 30
        with pytest.raises(ValueError, match="the buffer holds 4 bytes, 5 are to be read"):
            source.read("a.bin", 0, 5, bytearray(4))


def test_reads_in_a_loop_when_the_system_gives_less(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, buffers, offset: real(fd, [buffers[0][:7]], offset))
    with LocalSource(directory) as source:
        assert bytes(source.read("a.bin", 3, 1003)) == (directory / "a.bin").read_bytes()[3:1003]


def test_reads_from_many_threads(directory: Path) -> None:
    content = (directory / "a.bin").read_bytes()
    wrong: list[int] = []

    def work(start: int) -> None:
        offsets = range(start, 16000, 97)
        wrong.extend(o for o in offsets if bytes(source.read("a.bin", o, o + 300)) != content[o : o + 300])

    with LocalSource(directory) as source:
        threads = [threading.Thread(target=work, args=(start,)) for start in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert wrong == []


def test_out_of_range_and_unknown_files(directory: Path) -> None:
    with LocalSource(directory) as source:
        with pytest.raises(SourceError, match=r"a.bin: bytes 16000:16385 were asked for, the file has 16384"):
            source.read("a.bin", 16000, 16385)
        with pytest.raises(SourceError, match="bytes -1:4 were asked for"):
            source.read("a.bin", -1, 4)
        for name in ("nothing", "../secret", "/etc/passwd", ".git/config"):
            with pytest.raises(SourceError, match="found no such file"):
                source.read(name, 0, 1)


def test_a_file_that_shrinks(directory: Path) -> None:
    with LocalSource(directory) as source:
        os.truncate(directory / "a.bin", 5000)
        with pytest.raises(SourceError, match=r"a.bin: the file ended at byte 5000, it had 16384 when the run began"):
            source.read("a.bin", 4000, 6000)
        with pytest.raises(SourceError, match=r"a.bin: the file changed while it was read"):
            source.read("a.bin", 0, 100)


def test_a_file_that_is_written_to(directory: Path) -> None:
    with LocalSource(directory) as source:
        source.read("a.bin", 0, 100)
        with (directory / "a.bin").open("r+b") as file:
            file.write(b"changed")
        os.utime(directory / "a.bin", ns=(1, 1))
        with pytest.raises(SourceError, match="the file changed while it was read"):
            source.read("a.bin", 0, 100)


def test_a_file_that_is_replaced_or_gone(directory: Path) -> None:
    with LocalSource(directory) as source:
        (directory / "new").write_bytes(bytes(16384))
        (directory / "new").replace(directory / "a.bin")
        with pytest.raises(SourceError, match="the file changed while it was read"):
            source.read("a.bin", 0, 100)
        (directory / "config.json").unlink()
        with pytest.raises(SourceError, match="No such file or directory"):
            source.read("config.json", 0, 5)


def test_an_io_error(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "preadv", fail)
    with (
        LocalSource(directory) as source,
        pytest.raises(SourceError, match=r"a.bin: reading 50 bytes at 10 failed: Input/output error \(errno 5\)"),
    ):
        source.read("a.bin", 10, 60)


@pytest.mark.parametrize(
    ("number", "message"),
    [(errno.EMFILE, r"raise the limit on open files \(ulimit -n\)"), (errno.EACCES, "check its permissions, then run")],
)
def test_a_file_that_cannot_be_opened(
    directory: Path, monkeypatch: pytest.MonkeyPatch, number: int, message: str
) -> None:
    def fail(*_: object) -> int:
        raise OSError(number, os.strerror(number))

    with LocalSource(directory) as source:
        monkeypatch.setattr(os, "open", fail)
        with pytest.raises(SourceError, match=rf"a.bin: .*{message}"):
            source.read("a.bin", 10, 60)
    monkeypatch.setattr(os, "scandir", fail)
    with pytest.raises(SourceError, match=r"cannot be listed: .*(ulimit -n|permissions)"):
        LocalSource(directory)


def test_a_directory_in_place_of_a_shard(directory: Path) -> None:
    (directory / "model-00001-of-00002.safetensors").mkdir()
    with pytest.raises(SourceError, match=r"model-00001-of-00002.safetensors: found a directory; supported: a file"):
        LocalSource(directory)


def test_small_files(directory: Path) -> None:
    with LocalSource(directory) as source:
        assert source.read_bytes("sub/b.py") == b"pass\n"
        with pytest.raises(CheckpointError, match=r"a.bin: found 16384 bytes; supported: at most 100"):
            source.read_bytes("a.bin", limit=100)


def fingerprint(directory: Path, files: tuple[str, ...] = ("a.bin", "config.json")) -> str:
    return LocalSource(directory).fingerprint(files)


def test_fingerprint_changes_with_the_files_asked_for(directory: Path) -> None:
    before = fingerprint(directory)
    (directory / "run.log").write_text("a log")
    assert fingerprint(directory) == before
    os.utime(directory / "a.bin", ns=(1, 1))
    assert fingerprint(directory) != before
    assert fingerprint(directory, ("config.json",)) == fingerprint(directory, ("config.json",))


def test_fingerprint_is_of_the_content_where_the_hub_told_it(tmp_path: Path) -> None:
    """So two nodes' own caches are the same source, whenever each was filled."""
    commit, seen = "c" * 40, set()
    for node, time in (("a", 1), ("b", 2)):
        repository = tmp_path / node / "models--owner--name"
        (repository / "blobs").mkdir(parents=True)
        snapshot = repository / "snapshots" / commit
        snapshot.mkdir(parents=True)
        for name, blob in (("a.bin", "d" * 64), ("config.json", "e" * 40)):
            (repository / "blobs" / blob).write_text("{}")
            os.utime(repository / "blobs" / blob, (time, time))
            (snapshot / name).symlink_to(repository / "blobs" / blob)
        seen.add(fingerprint(snapshot))
    assert len(seen) == 1


def test_outputs_of_the_converter_are_no_part_of_the_checkpoint(directory: Path) -> None:
    before = LocalSource(directory).files().keys()
    for mark in ("chord-manifest.json", "chord-progress.json"):
        (directory / mark.removesuffix(".json")).mkdir()
        (directory / mark.removesuffix(".json") / mark).write_text("{}")
    assert LocalSource(directory).files().keys() == before


def test_closing_frees_the_descriptors(directory: Path) -> None:
    def held() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    before = held()
    source = LocalSource(directory)
    source.read("a.bin", 0, 1)
    source.read("config.json", 0, 1)
    assert held() == before + 2
    source.close()
    assert held() == before


def test_a_hub_cache_snapshot_tells_its_origin(tmp_path: Path) -> None:
    repository = tmp_path / "models--moonshotai--Kimi-K2--Thinking"
    blobs, snapshot = repository / "blobs", repository / "snapshots" / COMMIT
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    (blobs / ("a" * 64)).write_bytes(b"data")
    (snapshot / "model.safetensors").symlink_to(f"../../blobs/{'a' * 64}")
    (blobs / ("b" * 40)).write_bytes(b"{}")
    (snapshot / "config.json").symlink_to(f"../../blobs/{'b' * 40}")
    with LocalSource(snapshot) as source:
        assert (source.identity.name, source.identity.commit) == ("moonshotai/Kimi-K2--Thinking", COMMIT)
        assert source.files()["model.safetensors"].sha256 == "a" * 64
        assert source.files()["config.json"].sha256 is None
        assert bytes(source.read("model.safetensors", 0, 4)) == b"data"


def test_a_download_to_a_directory_tells_its_commit(tmp_path: Path) -> None:
    records = tmp_path / ".cache" / "huggingface" / "download"
    records.mkdir(parents=True)
    for name, etag in (("model.safetensors", "a" * 64), ("config.json", "b" * 40)):
        (tmp_path / name).write_bytes(b"data")
        noted = (tmp_path / name).stat().st_mtime + 0.1
        (records / f"{name}.metadata").write_text(f"{COMMIT}\n{etag}\n{noted}\n")
    source = LocalSource(tmp_path)
    assert source.identity.commit == COMMIT
    assert source.files()["model.safetensors"].sha256 == "a" * 64
    # Changed after the download: the note no longer holds.
    os.utime(tmp_path / "model.safetensors", (4e9, 4e9))
    assert LocalSource(tmp_path).files()["model.safetensors"].sha256 is None
    # A file that did not come from there: no commit.
    (tmp_path / "mine.json").write_text("{}")
    assert LocalSource(tmp_path).identity.commit is None


def test_neither_directory_nor_hub_id() -> None:
    with pytest.raises(UsageError, match="neither a directory nor a Hub id like owner/name"):
        open_source("./no/such/directory")
