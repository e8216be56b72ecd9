"""One task of a plan, done: read, pack, write. Safe to repeat, bounded in memory, and silent about where it runs.

A worker holds one set of buffers and works through a weight in chunks of rows small enough to stay in a core's cache
from the read to the checksum.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import torch
from torch import Tensor

from chord_convert.plan import ExpertsTask, SharedTask, SourceExpert, SourceWeight, Task
from chord_convert.source.base import Source
from chord_convert.source.headers import TensorInfo
from chord_convert.write import ShardWriter, make_stages
from chord_runtime.errors import ScaleError
from chord_runtime.format.block import STRIP_ROWS, packed_bytes
from chord_runtime.format.packing import pack, pack_gate_up

_CHUNK_BYTES = 1 << 20
"""Packed bytes made at a time, but at least one strip."""

Tick = Callable[[int], None]
"""Called with the number of bytes written since the last call; may raise to stop the task."""


class Buffers:
    """A worker's memory, kept from task to task."""

    def __init__(self) -> None:
        self._read: dict[str, bytearray] = {}
        self._stages: list[memoryview] = []

    def reading(self, role: str, size: int) -> memoryview:
        """At least ``size`` bytes for one kind of input."""
        held = self._read.get(role)
        if held is None or len(held) < size:
            held = self._read[role] = bytearray(size)
        return memoryview(held)[:size]

    def stages(self, count: int, least: int) -> list[memoryview]:
        """``count`` stage buffers of at least ``least`` bytes."""
        if len(self._stages) != count or len(self._stages[0]) < least:
            self._stages = make_stages(count, least)
        return self._stages


def run_task(task: Task, source: Source, directory: Path, buffers: Buffers, tick: Tick) -> None:
    """Write the task's files into ``directory``.

    Raises SourceError, ScaleError or OutputError; then, and when ``tick`` raises, none of its files is left behind
    unfinished.
    """
    with ExitStack() as stack:
        least = _CHUNK_BYTES
        if isinstance(task, ExpertsTask):
            least = max(least, packed_bytes(STRIP_ROWS, task.experts[0].gate.words.shape[1] * 8))
        stages = buffers.stages(len(task.outputs), least)
        writers = [
            stack.enter_context(ShardWriter(directory / output.name, output.layout, stage))
            for output, stage in zip(task.outputs, stages, strict=True)
        ]
        if isinstance(task, SharedTask):
            for tensor in task.tensors:
                _copy(tensor, source, writers[0], tick)
        else:
            for expert in task.experts:
                _pack_gate_up(expert, source, writers, buffers, tick)
                _pack_down(expert.down, source, writers, buffers, tick)
        for writer in writers:
            writer.commit()


def _copy(tensor: TensorInfo, source: Source, writer: ShardWriter, tick: Tick) -> None:
    for start in range(tensor.start, tensor.stop, _CHUNK_BYTES):
        stop = min(start + _CHUNK_BYTES, tensor.stop)
        source.read(tensor.file, start, stop, writer.take(stop - start))
        writer.put(stop - start)
        tick(stop - start)


def _pack_gate_up(
    expert: SourceExpert, source: Source, writers: list[ShardWriter], buffers: Buffers, tick: Tick
) -> None:
    rows, words = expert.gate.words.shape
    k, local = words * 8, rows // len(writers)
    step = rows_at_a_time(k) // 2
    for rank, writer in enumerate(writers):
        for row in range(rank * local, (rank + 1) * local, step):
            stop = min(row + step, (rank + 1) * local)
            gate = source_rows(expert.gate, row, stop, source, buffers, "gate")
            up = source_rows(expert.up, row, stop, source, buffers, "up")
            out = writer.take(packed_bytes(2 * (stop - row), k))
            try:
                _store(pack_gate_up(*gate, *up), out)
            except ScaleError as error:
                raise _located(error, (expert.gate, expert.up), row, stop) from None
            writer.put(len(out))
            tick(len(out))


def _pack_down(weight: SourceWeight, source: Source, writers: list[ShardWriter], buffers: Buffers, tick: Tick) -> None:
    rows, words = weight.words.shape
    local = words * 8 // len(writers)
    step = rows_at_a_time(words * 8)
    for row in range(0, rows, step):
        stop = min(row + step, rows)
        codes, scale = source_rows(weight, row, stop, source, buffers, "down")
        for rank, writer in enumerate(writers):
            out = writer.take(packed_bytes(stop - row, local))
            columns = slice(rank * local // 8, (rank + 1) * local // 8)
            groups = slice(rank * local // 32, (rank + 1) * local // 32)
            try:
                _store(pack(codes[:, columns].contiguous(), scale[:, groups].contiguous()), out)
            except ScaleError as error:
                raise _located(error, (weight,), row, stop) from None
            writer.put(len(out))
            tick(len(out))


def rows_at_a_time(k: int) -> int:
    """Packed rows of ``k`` columns in a chunk: whole strips."""
    return max(1, _CHUNK_BYTES // packed_bytes(STRIP_ROWS, k)) * STRIP_ROWS


def source_rows(
    weight: SourceWeight, row: int, stop: int, source: Source, buffers: Buffers, role: str
) -> tuple[Tensor, Tensor]:
    """Rows ``row:stop`` of a source weight: int32 [rows, K/8], bfloat16 [rows, K/32], in the worker's buffers."""
    parts = []
    for tensor, dtype in ((weight.words, torch.int32), (weight.scale, torch.bfloat16)):
        width = tensor.nbytes // tensor.shape[0]
        view = buffers.reading(f"{role}.{dtype}", (stop - row) * width)
        source.read(tensor.file, tensor.start + row * width, tensor.start + stop * width, view)
        parts.append(torch.frombuffer(view, dtype=dtype).view(stop - row, -1))
    return parts[0], parts[1]


def _store(packed: Tensor, out: memoryview) -> None:
    torch.frombuffer(out, dtype=torch.uint8).copy_(packed)


def _located(error: ScaleError, weights: tuple[SourceWeight, ...], row: int, stop: int) -> ScaleError:
    names = " or ".join(weight.scale.name for weight in weights)
    return ScaleError(f"{weights[0].scale.file}: {names}, rows {row} to {stop - 1}: {error}")
