"""Proof that a packed directory holds its source: what unpacking gives is compared with the source, bit for bit."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from chord_convert.buffers import Buffers
from chord_convert.checkpoint import Checkpoint
from chord_convert.plan import SourceWeight, source_expert
from chord_convert.source import Source, open_source
from chord_convert.source.headers import TensorInfo
from chord_convert.source.parallel import map_in_threads
from chord_convert.tasks import rows_at_a_time, source_rows
from chord_convert.validate import validate
from chord_runtime.errors import FormatError
from chord_runtime.format.block import packed_bytes
from chord_runtime.format.layout import ExpertShape, Projection
from chord_runtime.format.packing import unpack, unpack_gate_up
from chord_runtime.format.shard import StoredTensor
from chord_runtime.packed_dir import ExpertsFile, PackedDir
from chord_runtime.verify import Finding, Verification, read_exactly

_CHUNK_BYTES = 1 << 20
_Check = Callable[[Buffers], str | None]
"""Compares one packed weight or shared tensor; returns what differs."""


def compare(
    directory: Path, model: str, revision: str | None = None, token: str | None = None, workers: int | None = None
) -> Verification:
    """Unpack every expert in ``directory`` and compare it, and every other tensor, with ``model``.

    Raises FormatError if the directory is damaged or the model is of another geometry, CheckpointError if it is not a
    valid checkpoint, SourceError if it cannot be read.
    """
    started = time.monotonic()
    packed = PackedDir(directory)
    with open_source(model, revision, token) as source:
        comparison = _Comparison(packed, validate(source).require(), source)
        checks = [*comparison.experts(packed.experts_files()), *comparison.shared(packed.shared_files())]
        findings = _run(checks, workers) + comparison.absent
    return Verification(
        findings=tuple(sorted(findings, key=lambda finding: (finding.file, finding.problem))),
        files=len(packed.shards()),
        tensors=len(checks),
        checked_bytes=comparison.size,
        seconds=time.monotonic() - started,
    )


def differing(directory: Path, names: Collection[str], checkpoint: Checkpoint, source: Source) -> list[str]:
    """Which of the files ``names`` of a directory with a manifest do not hold what the source does; others may be lost.

    Files without weights are left out. Raises FormatError and SourceError like ``compare``.
    """
    packed = PackedDir(directory)
    comparison = _Comparison(packed, checkpoint, source)
    experts = [name for name in packed.experts_files() if name in names]
    shared = [name for name in packed.shared_files() if name in names]
    findings = _run([*comparison.experts(experts), *comparison.shared(shared)], None)
    surplus = [finding for finding in comparison.absent if finding.file in names]
    return sorted({finding.file for finding in findings + surplus})


def _run(checks: Iterable[tuple[str, _Check]], workers: int | None) -> list[Finding]:
    buffers = threading.local()

    def run(named: tuple[str, _Check]) -> Finding | None:
        if not hasattr(buffers, "own"):
            buffers.own = Buffers()
        different = named[1](buffers.own)
        return None if different is None else Finding(named[0], different)

    found = map_in_threads(run, checks, workers or os.cpu_count() or 1, "compare")
    return [finding for finding in found if finding is not None]


class _Comparison:
    def __init__(self, packed: PackedDir, checkpoint: Checkpoint, source: Source) -> None:
        self._packed, self._checkpoint, self._source = packed, checkpoint, source
        self.absent: list[Finding] = []
        self.size = 0
        packing = packed.manifest.packing
        here = (packing.shape, packing.layers, packing.prefix)
        shape = ExpertShape(checkpoint.num_experts, checkpoint.hidden, checkpoint.intermediate)
        if here != (shape, tuple(checkpoint.layers), checkpoint.prefix):
            raise FormatError(
                f"{packed.path} holds {packing.shape} in layers {packing.layers[0]} to {packing.layers[-1]} of "
                f"{packing.prefix}; {source.identity.name} has {shape}: it is not this directory's source"
            )

    def experts(self, names: Iterable[str]) -> Iterator[tuple[str, _Check]]:
        """A check for each packed weight of experts files."""
        for name in names:
            file = self._packed.open_experts(name)
            for expert in file.metadata.experts:
                yield name, self._check_gate_up(file, expert)
                yield name, self._check_down(file, expert)

    def shared(self, names: Iterable[str]) -> Iterator[tuple[str, _Check]]:
        """A check for each tensor of shared files; those that are on one side only are noted as absent."""
        if self._packed.manifest.experts_only:
            return
        wanted = {name: self._checkpoint.tensors[name] for name in self._checkpoint.other_tensors}
        for file in names:
            for name, stored in self._packed.header(file).tensors.items():
                original = wanted.pop(name, None)
                if original is None:
                    self.absent.append(Finding(file, f"{name}: the source has no such tensor"))
                else:
                    yield file, self._check_copy(file, original, stored)
        for name in wanted:
            self.absent.append(Finding(name, "a tensor of the source that is in no shared file"))

    def _check_gate_up(self, file: ExpertsFile, expert: int) -> _Check:
        stored = file.tensor(expert, Projection.W13)
        original = source_expert(self._checkpoint, file.metadata.layer, expert)
        n, k = self._shape(Projection.W13)
        first = file.metadata.tp_rank * n // 2
        self.size += stored.stop - stored.start

        def check(buffers: Buffers) -> str | None:
            for row, stop, packed in self._strips(file, stored, n, k, buffers):
                gate_words, gate_scale, up_words, up_scale = unpack_gate_up(packed, stop - row, k)
                for weight, role, words, scale in (
                    (original.gate, "gate", gate_words, gate_scale),
                    (original.up, "up", up_words, up_scale),
                ):
                    rows = source_rows(weight, first + row // 2, first + stop // 2, self._source.read, buffers, role)
                    if not _same((words, scale), rows.tensors()):
                        return _differs(weight, first + row // 2, first + stop // 2)
            return None

        return check

    def _check_down(self, file: ExpertsFile, expert: int) -> _Check:
        stored = file.tensor(expert, Projection.W2)
        original = source_expert(self._checkpoint, file.metadata.layer, expert).down
        n, k = self._shape(Projection.W2)
        rank = file.metadata.tp_rank
        self.size += stored.stop - stored.start

        def check(buffers: Buffers) -> str | None:
            for row, stop, packed in self._strips(file, stored, n, k, buffers):
                rows = source_rows(original, row, stop, self._source.read, buffers, "down")
                if not _same(unpack(packed, stop - row, k), rows.columns(rank * k, (rank + 1) * k).tensors()):
                    return _differs(original, row, stop)
            return None

        return check

    def _check_copy(self, file: str, original: TensorInfo, stored: StoredTensor) -> _Check:
        self.size += original.nbytes

        def check(buffers: Buffers) -> str | None:
            if (original.dtype, original.shape) != (stored.dtype, stored.shape):
                return f"{original.name}: {stored.dtype} {list(stored.shape)}, not the source's"
            for at in range(0, original.nbytes, _CHUNK_BYTES):
                size = min(_CHUNK_BYTES, original.nbytes - at)
                ours, theirs = buffers.reading("ours", size), buffers.reading("theirs", size)
                read_exactly(self._packed.path / file, stored.start + at, ours)
                self._source.read(original.file, original.start + at, original.start + at + size, theirs)
                if ours != theirs:
                    return f"{original.name}: differs from {original.file}"
            return None

        return check

    def _shape(self, projection: Projection) -> tuple[int, int]:
        packing = self._packed.manifest.packing
        return packing.shape.packed(projection, packing.layout.tp_size)

    def _strips(
        self, file: ExpertsFile, stored: StoredTensor, n: int, k: int, buffers: Buffers
    ) -> Iterator[tuple[int, int, Tensor]]:
        """(row, stop, packed bytes of these rows) over a packed weight, whole strips at a time."""
        step, at = rows_at_a_time(k), stored.start
        for row in range(0, n, step):
            stop = min(row + step, n)
            view = buffers.reading("packed", packed_bytes(stop - row, k))
            read_exactly(self._packed.path / file.name, at, view)
            at += len(view)
            yield row, stop, torch.frombuffer(view, dtype=torch.uint8)


def _same(unpacked: tuple[Tensor, Tensor], original: tuple[Tensor, Tensor]) -> bool:
    return torch.equal(unpacked[0], original[0]) and torch.equal(
        unpacked[1].view(torch.int16), original[1].view(torch.int16)
    )


def _differs(weight: SourceWeight, row: int, stop: int) -> str:
    return f"{weight.words.name}: rows {row} to {stop - 1} do not unpack to those of {weight.words.file}"
