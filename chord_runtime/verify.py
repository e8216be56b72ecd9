"""Is a packed directory still what was written? Every byte is read once and its checksum compared."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import xxhash

from chord_runtime.errors import FormatError
from chord_runtime.format.layout import MANIFEST, experts_file, parse_experts_file
from chord_runtime.format.shard import StoredTensor
from chord_runtime.packed_dir import PackedDir

_CHUNK_BYTES = 1 << 20  # stays in a core's cache between the read and the checksum
_Item = TypeVar("_Item")


@dataclass(frozen=True)
class Finding:
    """One thing wrong: the file (and tensor, if one) and what was found."""

    file: str
    problem: str


@dataclass(frozen=True)
class Verification:
    """What was checked and what was found; no findings means that every byte is as it was written."""

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

    def count(self, size: int) -> None:
        with self._lock:
            self.checked += size


def verify(directory: Path, workers: int | None = None) -> Verification:
    """Check all files of a packed directory against its manifest and checksums.

    Missing, surplus, truncated and altered files are findings. Raises FormatError if there is no valid manifest.
    """
    started = time.monotonic()
    packed, findings = PackedDir(directory), _Findings()
    tensors: list[tuple[str, str, StoredTensor]] = []
    held: dict[tuple[int, int, int], set[int]] = {}
    for name in _present(packed, findings):
        if name not in packed.shards():
            continue
        try:
            place = parse_experts_file(name)
            if place is None:
                header = packed.header(name)
            else:
                file = packed.open_experts(name)
                header = file.header
                held.setdefault(place, set()).update(file.metadata.experts)
        except FormatError as error:
            findings.add(name, str(error))
            continue
        findings.count(len(header.raw))
        tensors += [(name, key, tensor) for key, tensor in header.tensors.items()]
    _check_coverage(packed, held, findings)
    _each(lambda item: _check_tensor(packed.path, *item, findings), tensors, workers)
    found = tuple(sorted(findings.found, key=lambda finding: (finding.file, finding.problem)))
    return Verification(found, len(packed.manifest.files), len(tensors), findings.checked, time.monotonic() - started)


def _present(packed: PackedDir, findings: _Findings) -> list[str]:
    """Names of listed files that are there; notes those missing, surplus, or, beside the weights, altered."""
    there = {str(path.relative_to(packed.path)) for path in packed.path.rglob("*") if not path.is_dir()}
    for name in sorted(there - packed.manifest.files.keys() - {MANIFEST}):
        findings.add(name, "a file that the manifest does not list: surplus")
    present = []
    for name, recorded in sorted(packed.manifest.files.items()):
        if name not in there:
            findings.add(name, "missing")
            continue
        present.append(name)
        if name in packed.shards():
            continue
        data = (packed.path / name).read_bytes()
        findings.count(len(data))
        if (len(data), xxhash.xxh3_128_hexdigest(data)) != (recorded.size, recorded.checksum):
            findings.add(name, f"altered: {len(data)} bytes that are not the {recorded.size} the manifest records")
    return present


def _check_coverage(packed: PackedDir, held: dict[tuple[int, int, int], set[int]], findings: _Findings) -> None:
    packing = packed.manifest.packing
    for layer in packing.layers:
        for ep_rank in packed.manifest.ep_ranks:
            for tp_rank in range(packing.layout.tp_size):
                wanted = set(packing.layout.experts_of(ep_rank, packing.shape.num_experts))
                lacking = sorted(wanted - held.get((layer, ep_rank, tp_rank), set()))
                if lacking:
                    name = experts_file(layer, ep_rank, packing.layout, tp_rank)
                    findings.add(name, f"experts {lacking[0]} to {lacking[-1]} ({len(lacking)}) are in no valid file")


def _check_tensor(directory: Path, file: str, name: str, tensor: StoredTensor, findings: _Findings) -> None:
    digest = xxhash.xxh3_128()
    buffer = memoryview(bytearray(min(_CHUNK_BYTES, tensor.stop - tensor.start)))
    try:
        for start in range(tensor.start, tensor.stop, _CHUNK_BYTES):
            chunk = buffer[: tensor.stop - start]
            read_exactly(directory / file, start, chunk)
            digest.update(chunk)
    except FormatError as error:
        findings.add(file, f"{name}: {error}")
        return
    findings.count(tensor.stop - tensor.start)
    if digest.hexdigest() != tensor.checksum:
        findings.add(file, f"{name}: altered: XXH3-128 {digest.hexdigest()}, written was {tensor.checksum}")


def read_exactly(path: Path, start: int, out: memoryview) -> None:
    """Fill ``out`` from byte ``start`` of a file. Raises FormatError if that cannot be."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            while out:
                count = os.preadv(descriptor, [out], start)
                if count == 0:
                    raise FormatError(f"{path} ends at byte {start}: it was shortened")
                out, start = out[count:], start + count
        finally:
            os.close(descriptor)
    except OSError as error:
        raise FormatError(f"{path} cannot be read at byte {start}: {error.strerror}") from None


def _each(work: Callable[[_Item], None], items: Iterable[_Item], workers: int | None) -> None:
    with ThreadPoolExecutor(workers or os.cpu_count(), thread_name_prefix="verify") as pool:
        for _ in pool.map(work, items):
            pass
