"""Is a packed directory still what was written? Every byte is read once and its checksum compared."""

from __future__ import annotations

import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import xxhash

from chord_runtime.errors import FormatError, UnreadableError
from chord_runtime.format.files import DataFile, unreadable
from chord_runtime.format.layout import MANIFEST, experts_file, parse_experts_file
from chord_runtime.format.shard import StoredTensor
from chord_runtime.packed_dir import PackedDir

_CHUNK_BYTES = 1 << 20  # stays in a core's cache between the read and the checksum


@dataclass(frozen=True)
class Finding:
    """One thing wrong: the file (and tensor, if one) and what was found."""

    file: str
    problem: str
    unreadable: bool = False
    """The file is there and cannot be read now: nothing is said of its bytes."""


@dataclass(frozen=True)
class Verification:
    """What was checked and what was found. No findings: every byte is as written, or equal to the source's."""

    findings: tuple[Finding, ...]
    files: int
    tensors: int
    checked_bytes: int
    seconds: float


class _Findings:
    """Findings and bytes counted from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.found: list[Finding] = []
        self.checked = 0

    def add(self, file: str, problem: str) -> None:
        with self._lock:
            self.found.append(Finding(file, problem))

    def add_error(self, file: str, error: FormatError) -> None:
        with self._lock:
            self.found.append(Finding(file, str(error), isinstance(error, UnreadableError)))

    def count(self, size: int) -> None:
        with self._lock:
            self.checked += size


def verify(directory: Path, workers: int | None = None) -> Verification:
    """Check all files of a packed directory against its manifest and checksums.

    Missing, surplus, truncated, unreadable and altered files are findings, the manifest among them. Raises FormatError
    if there is no manifest.
    """
    started = time.monotonic()
    findings = _Findings()
    try:
        packed = PackedDir(directory)
    except FormatError as error:
        if not os.path.lexists(directory / MANIFEST):
            raise
        finding = Finding(MANIFEST, str(error), isinstance(error, UnreadableError))
        return Verification((finding,), 1, 0, 0, time.monotonic() - started)
    held: dict[tuple[int, int, int], set[int]] = {}
    tensors = 0
    with ThreadPoolExecutor(workers or os.cpu_count(), thread_name_prefix="verify") as pool:
        for place, experts, count in pool.map(
            lambda name: _check_shard(packed, name, findings), _present(packed, findings)
        ):
            tensors += count
            if place is not None:
                held.setdefault(place, set()).update(experts)
    _check_coverage(packed, held, findings)
    found = tuple(sorted(findings.found, key=lambda finding: (finding.file, finding.problem)))
    return Verification(found, len(packed.manifest.files), tensors, findings.checked, time.monotonic() - started)


def _present(packed: PackedDir, findings: _Findings) -> list[str]:
    """Names of listed shards that are there; notes files missing, surplus, or, beside the shards, altered."""
    # A link to a directory is one surplus file, whatever it leads to.
    paths = (path for path in packed.path.rglob("*") if path.is_symlink() or not path.is_dir())
    there = {str(path.relative_to(packed.path)) for path in paths}
    for name in sorted(there - packed.manifest.files.keys() - {MANIFEST}):
        findings.add(name, "a file that the manifest does not list: surplus")
    for name in sorted(packed.manifest.files.keys() - there):
        findings.add(name, "a directory stands in its place" if (packed.path / name).is_dir() else "missing")
    shards = set(packed.shards()) & there
    for name in sorted((packed.manifest.files.keys() & there) - shards):
        _check_small(packed, name, findings)
    return sorted(shards)


def _check_small(packed: PackedDir, name: str, findings: _Findings) -> None:
    recorded = packed.manifest.files[name]
    try:
        data = (packed.path / name).read_bytes()
    except OSError as error:
        findings.add_error(name, unreadable(packed.path / name, error))
        return
    findings.count(len(data))
    if (len(data), xxhash.xxh3_128_hexdigest(data)) != (recorded.size, recorded.checksum):
        findings.add(name, f"altered: {len(data)} bytes that are not the {recorded.size} the manifest records")


def _check_coverage(packed: PackedDir, held: dict[tuple[int, int, int], set[int]], findings: _Findings) -> None:
    packing = packed.manifest.packing
    unknown = {parse_experts_file(finding.file) for finding in findings.found if finding.unreadable}
    for layer in packing.layers:
        for ep_rank in packed.manifest.ep_ranks:
            for tp_rank in range(packing.layout.tp_size):
                wanted = set(packing.layout.experts_of(ep_rank, packing.shape.num_experts))
                lacking = sorted(wanted - held.get((layer, ep_rank, tp_rank), set()))
                if lacking and (layer, ep_rank, tp_rank) not in unknown:
                    name = experts_file(layer, ep_rank, packing.layout, tp_rank)
                    findings.add(name, f"experts {lacking[0]} to {lacking[-1]} ({len(lacking)}) are in no valid file")


def _check_shard(
    packed: PackedDir, name: str, findings: _Findings
) -> tuple[tuple[int, int, int] | None, tuple[int, ...], int]:
    """Check one safetensors file; returns its place if it is an experts file, and its experts and number of tensors."""
    place, tensors = parse_experts_file(name), 0
    experts: tuple[int, ...] = ()
    try:
        if place is None:
            header = packed.header(name)
        else:
            file = packed.open_experts(name)
            header, experts = file.header, file.metadata.experts
        findings.count(len(header.raw))
        tensors = len(header.tensors)
        with DataFile(packed.path / name) as data:
            for key, tensor in header.tensors.items():
                _check_tensor(data, name, key, tensor, findings)
    except FormatError as error:
        findings.add_error(name, error)
    return place, experts, tensors


def _check_tensor(data: DataFile, file: str, name: str, tensor: StoredTensor, findings: _Findings) -> None:
    digest = xxhash.xxh3_128()
    buffer = memoryview(bytearray(min(_CHUNK_BYTES, tensor.stop - tensor.start)))
    for start in range(tensor.start, tensor.stop, _CHUNK_BYTES):
        chunk = buffer[: tensor.stop - start]
        data.read(start, [chunk])
        digest.update(chunk)
    findings.count(tensor.stop - tensor.start)
    if digest.hexdigest() != tensor.checksum:
        findings.add(file, f"{name}: altered: XXH3-128 {digest.hexdigest()}, written was {tensor.checksum}")


def read_exactly(path: Path, start: int, out: memoryview) -> None:
    """Fill ``out`` from byte ``start`` of a file. Raises FormatError if that cannot be."""
    with DataFile(path) as file:
        file.read(start, [out])
