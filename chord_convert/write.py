"""Durable files: written aside, checksummed on the way, synced, renamed. A file under its final name is complete.

Data go out in large aligned writes past the page cache where the file system allows it: the cache is left to whoever
needs it, and the final sync has little left to wait for.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType

import xxhash

from chord_convert.lock import open_locked
from chord_runtime.errors import OutputError
from chord_runtime.format.shard import ALIGNMENT, ShardLayout
from chord_runtime.output import TEMPORARY, output_error, sync_directory

STAGE_BYTES = 16 << 20
"""A worker's buffers for writing, shared among the files it writes at a time."""


class Stage:
    """Two page-aligned buffers: while one is filled, a thread writes the other."""

    def __init__(self, size: int, least: int, thread: ThreadPoolExecutor) -> None:
        """Buffers of some ``size`` bytes that take chunks of at least ``least``."""
        size = (max(size // 2, least + ALIGNMENT) // ALIGNMENT + 1) * ALIGNMENT
        whole = memoryview(mmap.mmap(-1, 2 * size))
        self.front, self._back = whole[:size], whole[size:]
        self._thread = thread
        self._pending: Future[None] | None = None

    def takes(self, least: int) -> bool:
        """Whether a chunk of ``least`` bytes fits behind what a flush leaves."""
        return len(self.front) >= least + ALIGNMENT

    def write(self, descriptor: int, used: int, offset: int) -> int:
        """Write the whole pages among the first ``used`` bytes of the front; returns how many bytes that is.

        The rest stands at the beginning of the new front. Raises the OSError of the write before.
        """
        self.wait()
        whole = used // ALIGNMENT * ALIGNMENT
        self._back[: used - whole] = self.front[whole:used]
        self._pending = self._thread.submit(_write_all, descriptor, self.front[:whole], offset)
        self.front, self._back = self._back, self.front
        return whole

    def wait(self) -> None:
        """Until nothing is being written. Raises the OSError of the last write."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()


class ShardWriter:
    """Writes one safetensors file whose layout is known, tensor after tensor, through a stage.

    ``take(n)`` lends n bytes of the stage to be filled, ``put(n)`` says that they are: chunks may be of any size but do
    not cross the end of a tensor. ``commit()`` makes the file durable under its final name; without it, leaving the
    context removes what was written. Raises OutputError where the file system does.
    """

    def __init__(self, path: Path, layout: ShardLayout, stage: Stage) -> None:
        self._path, self._layout, self._stage = path, layout, stage
        self._temporary = path.with_name(path.name + TEMPORARY)
        self._used = 0
        self._offset = layout.data_start
        self._hash = xxhash.xxh3_128()
        self._checksums: list[str] = []
        self._missing = layout.tensors[0].nbytes
        self._committed = False
        self._file = _open_temporary(self._temporary)
        self._end_tensors()

    def take(self, count: int) -> memoryview:
        """``count`` writable bytes, valid until the next call of any method."""
        if self._used + count > len(self._stage.front):
            try:
                written = self._stage.write(self._file, self._used, self._offset)
            except OSError as error:
                raise output_error(self._path, error) from None
            self._offset += written
            self._used -= written
        return self._stage.front[self._used : self._used + count]

    def put(self, count: int) -> None:
        """The next ``count`` bytes of the current tensor stand in the stage."""
        self._hash.update(self._stage.front[self._used : self._used + count])
        self._used += count
        self._missing -= count
        if self._missing < 0:
            raise ValueError(f"{self._path.name}: a tensor was given {-self._missing} bytes too many")
        self._end_tensors()

    def commit(self) -> None:
        """Write what is left and the header, make everything durable, and give the file its name."""
        if len(self._checksums) != len(self._layout.tensors):
            raise ValueError(f"{self._path.name}: tensors are missing")
        header = self._layout.header(self._checksums)
        try:
            written = self._stage.write(self._file, self._used, self._offset)
            self._stage.wait()
            _set_direct(self._file, False)
            _write_all(self._file, self._stage.front[: self._used - written], self._offset + written)
            _write_all(self._file, memoryview(header), 0)
            os.fsync(self._file)
            self._temporary.rename(self._path)
            self._committed = True
            sync_directory(self._path.parent)
        except OSError as error:
            raise output_error(self._path, error) from None

    def close(self) -> None:
        """Close the file, and remove it unless it was committed."""
        if self._file >= 0:
            with contextlib.suppress(OSError):
                self._stage.wait()
            if not self._committed:
                self._temporary.unlink(missing_ok=True)
            os.close(self._file)
            self._file = -1

    def __enter__(self) -> ShardWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _end_tensors(self) -> None:
        """Note the checksum of the current tensor if it is complete, and of empty ones that follow it."""
        sizes = self._layout.tensors
        while not self._missing and len(self._checksums) < len(sizes):
            self._checksums.append(self._hash.hexdigest())
            self._hash.reset()
            if len(self._checksums) < len(sizes):
                self._missing = sizes[len(self._checksums)].nbytes


def _open_temporary(path: Path) -> int:
    """Open a temporary for this process alone, emptied."""
    try:
        descriptor = open_locked(path)
    except BlockingIOError:
        raise OutputError(f"{path} is being written by another run: end it or wait, then run again") from None
    try:
        os.ftruncate(descriptor, 0)
    except OSError as error:
        os.close(descriptor)
        raise output_error(path, error) from None
    _set_direct(descriptor, True)
    return descriptor


def _set_direct(descriptor: int, wanted: bool) -> None:
    """Turn direct I/O on or off; file systems without it stay as they are."""
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    with contextlib.suppress(OSError):
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags | os.O_DIRECT if wanted else flags & ~os.O_DIRECT)


def _write_all(descriptor: int, data: memoryview, offset: int) -> None:
    while data:
        try:
            count = os.pwrite(descriptor, data, offset)
        except OSError as error:
            # Direct I/O was accepted for the file, but not for this write.
            if error.errno != errno.EINVAL or not fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT:
                raise
            _set_direct(descriptor, False)
            continue
        if not fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT:
            # Starts writing back now, so that the sync at the end does not stall.
            os.posix_fadvise(descriptor, offset, count, os.POSIX_FADV_DONTNEED)
        data, offset = data[count:], offset + count
