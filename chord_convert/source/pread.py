"""Exact positional reads from local files, which notice when a file shrinks or changes under them."""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass
from pathlib import Path

from chord_convert.report import name as printable
from chord_runtime.errors import SourceError, advice

# One read call moves at most this much: the kernel's own limit is 2 GiB, and Ctrl-C is seen between calls.
_READ_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class LocalFile:
    """A file as it was when it was listed: path, size in bytes, time of change in nanoseconds."""

    path: Path
    size: int
    modified: int

    @classmethod
    def of(cls, path: Path) -> LocalFile:
        """Take down ``path`` as it is now. Raises OSError."""
        status = path.stat()
        return cls(path, status.st_size, status.st_mtime_ns)


class FileReader:
    """Keeps one descriptor per file open and reads from it; safe to use from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: dict[Path, int] = {}

    def read_into(self, file: LocalFile, name: str, start: int, out: memoryview) -> None:
        """Fill ``out`` from byte ``start``. ``name`` is how errors call the file.

        Raises:
            SourceError: I/O error, the file ended early, or it is not the file that was listed.
        """
        try:
            descriptor = self._descriptor(file.path)
            done = 0
            while done < len(out):
                count = os.preadv(descriptor, [out[done : done + _READ_BYTES]], start + done)
                if count == 0:
                    raise SourceError(
                        f"{printable(name)}: the file ended at byte {start + done}, it had {file.size} when the run "
                        "began; something shortened it: restore the file and run again."
                    )
                done += count
            status = os.fstat(descriptor)
        except OSError as error:
            raise SourceError(
                f"{printable(name)}: reading {len(out)} bytes at {start} failed: {error.strerror} "
                f"(errno {error.errno}); {advice(error, 'check the disk or the network file system')}, then run again."
            ) from None
        if (status.st_size, status.st_mtime_ns) != (file.size, file.modified):
            raise SourceError(
                f"{printable(name)}: the file changed while it was read; wait until nothing writes to it and run again."
            )

    def _descriptor(self, path: Path) -> int:
        with self._lock:
            if path not in self._open:
                self._open[path] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            return self._open[path]

    def close(self) -> None:
        """Close every descriptor."""
        with self._lock:
            held, self._open = self._open, {}
        for descriptor in held.values():
            os.close(descriptor)
