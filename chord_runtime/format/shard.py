"""The safetensors files of a packed directory: their header, built and read. Data bytes pass elsewhere.

A header is JSON of which every byte is decided by the tensors and their checksums. Checksums have a fixed width, so the
header's length, and with it every offset, is known before the data; and a finished file is recognised by building its
header again from what is planned and the checksums it states.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import xxhash

from chord_runtime.errors import FormatError
from chord_runtime.format.files import mend, unreadable
from chord_runtime.format.metadata import CHECKSUMS_KEY, SHARD_KEY, dumps

ALIGNMENT = 4096
"""Data begin at a multiple of this: whole pages, for direct I/O and for readers that go straight to a device."""

MAX_HEADER_BYTES = 100_000_000
CHECKSUM_DIGITS = 32


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor of a file: safetensors dtype, shape, size in bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int


@dataclass(frozen=True)
class ShardLayout:
    """A file to be written: its tensors in order, and the ``chord`` metadata (None for a file of shared tensors)."""

    tensors: tuple[TensorSpec, ...]
    metadata: str | None = None

    @cached_property
    def data_start(self) -> int:
        """First byte of the data, equal to the length of the header."""
        return len(self.header(["0" * CHECKSUM_DIGITS] * len(self.tensors)))

    @cached_property
    def size(self) -> int:
        """Size of the file in bytes."""
        return self.data_start + sum(tensor.nbytes for tensor in self.tensors)

    def header(self, checksums: Sequence[str]) -> bytes:
        """The header, length prefix included, padded with spaces to a multiple of ``ALIGNMENT``."""
        metadata = {"format": "pt"}
        if self.metadata is not None:
            metadata[SHARD_KEY] = self.metadata
        named = {tensor.name: checksum for tensor, checksum in zip(self.tensors, checksums, strict=True)}
        metadata[CHECKSUMS_KEY] = dumps(named)
        entries: dict[str, object] = {"__metadata__": metadata}
        end = 0
        for tensor in self.tensors:
            begin, end = end, end + tensor.nbytes
            entries[tensor.name] = {"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": (begin, end)}
        text = json.dumps(entries, separators=(",", ":")).encode()
        text += b" " * (-(len(text) + 8) % ALIGNMENT)
        return len(text).to_bytes(8, "little") + text


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor in a file: bytes ``start:stop`` from the file's beginning, and the XXH3-128 that they should have."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int
    checksum: str


@dataclass(frozen=True)
class ShardHeader:
    """The header of a file of a packed directory. ``size`` is the file's."""

    raw: bytes
    metadata: Mapping[str, str]
    tensors: Mapping[str, StoredTensor]
    size: int

    @property
    def checksum(self) -> str:
        """XXH3-128 of the header bytes, as the manifest records it."""
        return checksum(self.raw)

    @property
    def shard(self) -> str | None:
        """The ``chord`` metadata, None in a file of shared tensors."""
        return self.metadata.get(SHARD_KEY)


def checksum(data: bytes | memoryview) -> str:
    """XXH3-128 in hex."""
    return xxhash.xxh3_128_hexdigest(data)


def read_shard_header(path: Path) -> ShardHeader:
    """Read the header of one file.

    Raises FormatError if it is missing, malformed, or does not describe exactly the bytes that follow it.
    """
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            prefix = file.read(8)
            length = int.from_bytes(prefix, "little")
            if len(prefix) < 8 or length > min(MAX_HEADER_BYTES, size - 8):
                raise _damaged(path, f"{size} bytes with a header of {length}")
            raw = prefix + file.read(length)
    except OSError as error:
        raise unreadable(path, error) from None
    if len(raw) < 8 + length:
        raise _damaged(path, "a header that ends early")
    try:
        entries = json.loads(raw[8:])
        metadata = entries.pop("__metadata__")
        checksums = json.loads(metadata[CHECKSUMS_KEY])
        tensors = {name: _stored(entry, 8 + length, checksums[name]) for name, entry in entries.items()}
        metadata = {str(key): str(value) for key, value in metadata.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise _damaged(path, f"a header that is not one Chord wrote ({type(error).__name__}: {error})") from None
    end = 8 + length
    for tensor in tensors.values():
        if tensor.start != end or tensor.stop < tensor.start:
            raise _damaged(path, "tensors that do not follow each other")
        end = tensor.stop
    if end != size:
        raise _damaged(path, f"{size} bytes where its header describes {end}")
    return ShardHeader(raw, metadata, tensors, size)


def _stored(entry: Mapping[str, Any], data_start: int, digest: object) -> StoredTensor:
    begin, end = entry["data_offsets"]
    shape = tuple(int(size) for size in entry["shape"])
    if not isinstance(digest, str) or len(digest) != CHECKSUM_DIGITS:
        raise ValueError("a checksum that is not 32 hex digits")
    return StoredTensor(str(entry["dtype"]), shape, data_start + int(begin), data_start + int(end), digest)


def _damaged(path: Path, found: str) -> FormatError:
    return FormatError(f"{path}: found {found}; the file is truncated or altered: {mend(path)}")
