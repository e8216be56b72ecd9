"""What the converter asks of a source checkpoint: a list of files, and exact positional reads.

Two sources exist: :class:`~chord_convert.source.local.LocalSource` (a directory) and
:class:`~chord_convert.source.hub.HubSource` (a repository on the Hub). Neither maps files into memory: on a network
file system a mapped file that shrinks kills the process, a read returns an error that can be named.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import TracebackType

from chord_convert.report import name as printable
from chord_runtime.errors import CheckpointError, SourceError

# The index of a Kimi K2.x checkpoint is 23 MB; nothing else that is read whole comes near.
SMALL_FILE_LIMIT = 256 << 20


@dataclass(frozen=True, slots=True)
class FileInfo:
    """One file of a source. ``size`` in bytes; ``sha256`` of its content (hex) and ``etag`` where the source knows.

    ``etag`` is the Hub's: it names the content too. ``modified`` is the time of change in nanoseconds of a local file.
    """

    size: int
    sha256: str | None = None
    etag: str | None = None
    modified: int | None = None


@dataclass(frozen=True, slots=True)
class Identity:
    """Which checkpoint this is.

    ``name`` is the Hub id, or the directory's own name (never its path, so that it may be recorded in outputs);
    ``commit`` is the resolved commit, None when a plain directory does not tell; ``location`` is what opens the
    source again together with ``commit`` as the revision.
    """

    name: str
    commit: str | None
    location: str


class Source(ABC):
    """A checkpoint that can be read. Safe to use from several threads at once."""

    identity: Identity
    remote: bool = False
    """Whether each read may be a request over the network: then few large ones are better than many small ones."""

    @abstractmethod
    def files(self) -> Mapping[str, FileInfo]:
        """Every file by name (relative, with forward slashes). Taken once: a later change is an error when reading."""

    @abstractmethod
    def _read_into(self, file: str, start: int, out: memoryview) -> None:
        """Fill ``out`` from byte ``start`` of ``file``, or raise :class:`SourceError`."""

    def fingerprint(self, files: Iterable[str]) -> str:
        """Hex digest that changes when one of ``files`` may have changed.

        By content where that is known: then the cache, a download and the Hub itself are the same. Otherwise by size
        and time of change; so it is for resuming, not for outputs.
        """
        parts = []
        for name in sorted(files):
            info = self.files()[name]
            parts += [name, info.sha256 or info.etag or f"{info.size} {info.modified}"]
        return digest(parts)

    def read(self, file: str, start: int, stop: int, out: bytearray | memoryview | None = None) -> memoryview:
        """Bytes ``start:stop`` of ``file``, all of them.

        ``out``, when given, is a writable contiguous buffer of at least ``stop - start`` bytes that receives them;
        otherwise a new one is made. Returns the filled part of the buffer.

        Raises:
            SourceError: unknown file, range beyond its end, short read, changed file, I/O or network error.
        """
        info = self.files().get(file)
        if info is None:
            raise SourceError(
                f"{printable(file)}: found no such file in {self.identity.location}; "
                "check that the download is complete and that the file name is right."
            )
        if not 0 <= start <= stop <= info.size:
            raise SourceError(
                f"{printable(file)}: bytes {start}:{stop} were asked for, the file has {info.size} bytes; "
                "it is shorter than its header says: download it again."
            )
        view = memoryview(bytearray(stop - start)) if out is None else memoryview(out).cast("B")
        if len(view) < stop - start:
            raise ValueError(f"the buffer holds {len(view)} bytes, {stop - start} are to be read")
        view = view[: stop - start]
        if view:
            self._read_into(file, start, view)
        return view

    def read_bytes(self, file: str, limit: int = SMALL_FILE_LIMIT) -> bytes:
        """A whole small file. Raises SourceError like :meth:`read`, CheckpointError beyond ``limit`` bytes."""
        info = self.files().get(file)
        size = 0 if info is None else info.size
        if size > limit:
            raise CheckpointError(
                f"{printable(file)}: found {size} bytes; supported: at most {limit} for a file of its kind. "
                "Check that it is what its name says."
            )
        return bytes(self.read(file, 0, size))

    def close(self) -> None:  # noqa: B027 - optional: only sources that hold files or connections need it
        """Let go of files and connections."""

    def __enter__(self) -> Source:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def digest(parts: list[str]) -> str:
    """SHA-256 over a list of strings, unambiguously joined."""
    hashed = hashlib.sha256()
    for part in parts:
        raw = part.encode("utf-8", "surrogateescape")
        hashed.update(len(raw).to_bytes(8, "little") + raw)
    return hashed.hexdigest()
