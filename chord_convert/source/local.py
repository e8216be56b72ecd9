"""A checkpoint in a directory, read with pread."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Mapping
from pathlib import Path

from chord_convert.report import name as printable
from chord_convert.source.base import FileInfo, Identity, Source, digest
from chord_runtime.errors import SourceError

_COMMIT = re.compile(r"[0-9a-f]{40}")
_SHA256 = re.compile(r"[0-9a-f]{64}")
# One read call moves at most this much: the kernel's own limit is 2 GiB, and Ctrl-C is seen between calls.
_READ_BYTES = 64 << 20


class LocalSource(Source):
    """A directory with a checkpoint: a plain one, one made by ``hf download --local-dir``, or a Hub cache snapshot.

    In the latter two the Hub's own book-keeping tells the commit and the hashes of large files.

    Raises:
        SourceError: the directory cannot be listed.
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self._root = Path(directory).absolute()
        self._lock = threading.Lock()
        self._open: dict[str, tuple[int, int]] = {}
        self._files: dict[str, FileInfo] = {}
        self._mtime: dict[str, int] = {}
        try:
            self._list(self._root, "")
        except OSError as error:
            raise SourceError(
                f"{error.filename}: cannot be listed: {error.strerror}; check the path and its permissions."
            ) from None
        self.identity = Identity(*_origin(self._root, self._files), location=str(self._root))

    def _list(self, folder: Path, prefix: str) -> None:
        with os.scandir(folder) as found:
            entries = sorted(found, key=lambda entry: entry.name)
        for entry in entries:
            if entry.name.startswith("."):
                continue
            if entry.is_dir(follow_symlinks=False):
                self._list(folder / entry.name, f"{prefix}{entry.name}/")
            elif entry.is_file():
                status = entry.stat()
                known = _download_record(self._root, prefix + entry.name, status.st_mtime)
                blob = Path(entry.path).readlink().name if entry.is_symlink() else known[1]
                self._files[prefix + entry.name] = FileInfo(
                    size=status.st_size, sha256=blob if blob and _SHA256.fullmatch(blob) else None
                )
                self._mtime[prefix + entry.name] = status.st_mtime_ns

    def files(self) -> Mapping[str, FileInfo]:
        """See :meth:`Source.files`. Hidden files and folders are left out."""
        return self._files

    def fingerprint(self) -> str:
        """See :meth:`Source.fingerprint`: the commit, and every file's name, size and time of change."""
        parts = [self.identity.commit or ""]
        for file, info in self._files.items():
            parts += [file, str(info.size), str(self._mtime[file])]
        return digest(parts)

    def _descriptor(self, file: str) -> tuple[int, int]:
        with self._lock:
            held = self._open.get(file)
            if held is None:
                descriptor = os.open(self._root / file, os.O_RDONLY | os.O_CLOEXEC)
                held = self._open[file] = (descriptor, self._mtime[file])
            return held

    def _read_into(self, file: str, start: int, out: memoryview) -> None:
        try:
            descriptor, modified = self._descriptor(file)
            done = 0
            while done < len(out):
                count = os.preadv(descriptor, [out[done : done + _READ_BYTES]], start + done)
                if count == 0:
                    raise SourceError(
                        f"{printable(file)}: the file ended at byte {start + done}, it had "
                        f"{self._files[file].size} when the run began; something shortened it: "
                        "restore the file and run again."
                    )
                done += count
            status = os.fstat(descriptor)
        except OSError as error:
            raise SourceError(
                f"{printable(file)}: reading {len(out)} bytes at {start} failed: {error.strerror} "
                f"(errno {error.errno}); check the disk or the network file system and run again."
            ) from None
        if (status.st_size, status.st_mtime_ns) != (self._files[file].size, modified):
            raise SourceError(
                f"{printable(file)}: the file changed while it was read; wait until nothing writes to it and run again."
            )

    def close(self) -> None:
        """See :meth:`Source.close`."""
        with self._lock:
            held, self._open = self._open, {}
        for descriptor, _ in held.values():
            os.close(descriptor)


def _origin(root: Path, files: Mapping[str, FileInfo]) -> tuple[str, str | None]:
    """Name and commit of a directory, as far as the Hub's book-keeping tells them."""
    snapshots, repository = root.parent, root.parent.parent
    if snapshots.name == "snapshots" and _COMMIT.fullmatch(root.name) and repository.name.startswith("models--"):
        return repository.name.removeprefix("models--").replace("--", "/", 1), root.name
    commits = {_download_record(root, file, None)[0] for file in files}
    return root.name or "checkpoint", commits.pop() if len(commits) == 1 else None


def _download_record(root: Path, file: str, modified: float | None) -> tuple[str | None, str | None]:
    """Commit and ETag that ``hf download --local-dir`` noted for a file, unless it was ``modified`` afterwards."""
    record = root / ".cache" / "huggingface" / "download" / f"{file}.metadata"
    try:
        commit, etag, noted = record.read_text().split()[:3]
        # The record is written just after the file; one second covers coarse file times, as huggingface_hub has it.
        if modified is not None and modified - 1 > float(noted):
            return None, None
    except (OSError, ValueError):
        return None, None
    return (commit if _COMMIT.fullmatch(commit) else None), etag
