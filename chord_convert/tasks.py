"""One task of a plan, done: read, pack, write. Safe to repeat, bounded in memory, and silent about where it runs.

A worker holds one set of buffers and works through a weight in chunks of rows small enough to stay in a core's cache
from the read to the checksum.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from chord_convert.buffers import Buffers
from chord_convert.host import HostRows, pack_rows
from chord_convert.plan import SharedTask, SourceExpert, SourceWeight, Task
from chord_convert.source.base import Source
from chord_convert.source.headers import TensorInfo
from chord_convert.spans import SpanReader
from chord_convert.write import ShardWriter
from chord_runtime.errors import ScaleError
from chord_runtime.format.block import STRIP_ROWS, packed_bytes

_CHUNK_BYTES = 1 << 20
"""Packed bytes made at a time, but at least one strip."""

_REMOTE_COPY_BYTES = 4 << 20
"""The same for tensors that are copied from a remote source."""

Read = Callable[[str, int, int, memoryview], memoryview]
"""``Source.read`` into a buffer."""

Tick = Callable[[int], None]
"""Called with the number of bytes written since the last call; may raise to stop the task."""


def run_task(task: Task, source: Source, directory: Path, buffers: Buffers, tick: Tick) -> bool:
    """Write the task's files into ``directory``. Returns whether a code is 0 (see ``format.packing.pack_into``).

    Raises SourceError, ScaleError or OutputError; then, and when ``tick`` raises, none of its files is left behind
    unfinished.
    """
    with ExitStack() as stack:
        writers = [
            stack.enter_context(ShardWriter(directory / output.name, output.layout, stage))
            for output, stage in zip(task.outputs, buffers.stages(len(task.outputs), _largest_chunk(task)), strict=True)
        ]
        work = _Work(source, writers, buffers, tick)
        if isinstance(task, SharedTask):
            for tensor in task.tensors:
                work.copy(tensor)
        else:
            for expert in task.experts:
                work.pack(expert)
        for writer in writers:
            writer.commit()
    return work.has_zero


class _Work:
    def __init__(self, source: Source, writers: list[ShardWriter], buffers: Buffers, tick: Tick) -> None:
        self._source, self._writers, self._buffers, self._tick = source, writers, buffers, tick
        self._spans = SpanReader(source, buffers) if source.remote else None
        self._read: Read = source.read if self._spans is None else self._spans.read
        self.has_zero = False

    def copy(self, tensor: TensorInfo) -> None:
        """A tensor, bit for bit."""
        (writer,) = self._writers
        chunk = _REMOTE_COPY_BYTES if self._source.remote else _CHUNK_BYTES
        for start in range(tensor.start, tensor.stop, chunk):
            stop = min(start + chunk, tensor.stop)
            self._source.read(tensor.file, start, stop, writer.take(stop - start))
            writer.put(stop - start)
            self._tick(stop - start)

    def pack(self, expert: SourceExpert) -> None:
        """w13, then w2."""
        if self._spans is not None:
            self._spans.load(expert.tensors())
        self._pack_gate_up(expert)
        self._pack_down(expert.down)

    def _pack_gate_up(self, expert: SourceExpert) -> None:
        """w13 of an expert: each tp rank has the same channels of gate and up."""
        rows, words = expert.gate.words.shape
        k, local = words * 8, rows // len(self._writers)
        step = rows_at_a_time(k) // 2
        for rank, writer in enumerate(self._writers):
            for row in range(rank * local, (rank + 1) * local, step):
                stop = min(row + step, (rank + 1) * local)
                gate = source_rows(expert.gate, row, stop, self._read, self._buffers, "gate")
                up = source_rows(expert.up, row, stop, self._read, self._buffers, "up")
                with _located((expert.gate, expert.up), row, stop):
                    self._put(writer, packed_bytes(2 * (stop - row), k), gate, up)

    def _pack_down(self, weight: SourceWeight) -> None:
        """w2 of an expert: each tp rank has some columns of every row."""
        rows, words = weight.words.shape
        local = words * 8 // len(self._writers)
        step = rows_at_a_time(words * 8)
        for row in range(0, rows, step):
            stop = min(row + step, rows)
            whole = source_rows(weight, row, stop, self._read, self._buffers, "down")
            for rank, writer in enumerate(self._writers):
                with _located((weight,), row, stop):
                    part = whole.columns(rank * local, (rank + 1) * local)
                    self._put(writer, packed_bytes(stop - row, local), part)

    def _put(self, writer: ShardWriter, size: int, weight: HostRows, up: HostRows | None = None) -> None:
        self.has_zero |= pack_rows(writer.take(size), weight, up)
        writer.put(size)
        self._tick(size)


def _largest_chunk(task: Task) -> int:
    if isinstance(task, SharedTask):
        return _REMOTE_COPY_BYTES
    return max(_CHUNK_BYTES, packed_bytes(STRIP_ROWS, task.experts[0].gate.words.shape[1] * 8))


def rows_at_a_time(k: int) -> int:
    """Packed rows of ``k`` columns in a chunk: whole strips."""
    return max(1, _CHUNK_BYTES // packed_bytes(STRIP_ROWS, k)) * STRIP_ROWS


def source_rows(weight: SourceWeight, row: int, stop: int, read: Read, buffers: Buffers, role: str) -> HostRows:
    """Rows ``row:stop`` of a source weight, in the worker's buffers for ``role``."""

    def rows(tensor: TensorInfo, kind: str) -> memoryview:
        width = tensor.nbytes // tensor.shape[0]
        view = buffers.reading(f"{role}.{kind}", (stop - row) * width)
        return read(tensor.file, tensor.start + row * width, tensor.start + stop * width, view)

    return HostRows.whole(rows(weight.words, "words"), rows(weight.scale, "scale"), stop - row)


@contextmanager
def _located(weights: tuple[SourceWeight, ...], row: int, stop: int) -> Iterator[None]:
    """Says of a scale that the format cannot hold whose it is."""
    try:
        yield
    except ScaleError as error:
        names = " or ".join(weight.scale.name for weight in weights)
        where = f"{weights[0].scale.file}: {names}, rows {row} to {stop - 1}"
        raise ScaleError(f"{where}: {error}") from None
