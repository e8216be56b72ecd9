"""Safetensors headers, read without the data and without trust.

The file is ``u64 little-endian n``, ``n`` bytes of JSON, then the tensors' bytes. The rules are those of the
reference implementation (header at most 100 MB, offsets that cover the data exactly, without holes or overlaps),
with one addition: a key written twice is an error.
"""

from __future__ import annotations

import sys
import threading
from dataclasses import dataclass
from typing import Any, NoReturn

from chord_convert.report import Problem, show
from chord_convert.report import name as printable
from chord_convert.source import strict_json
from chord_convert.source.base import Source
from chord_convert.source.parallel import map_in_threads
from chord_runtime.errors import CheckpointError

MAX_HEADER_BYTES = 100_000_000
# The header of a full Kimi MoE shard is just below this, so one read (one request to the Hub) fetches it.
_FIRST_READ_BYTES = 512 << 10
# Larger headers than any real one are parsed one at a time, so that hostile files cannot multiply memory.
_LARGE_HEADER_BYTES = 4 << 20
_large_header = threading.Lock()

DTYPE_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
    "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "U16": 16, "I16": 16, "F16": 16, "BF16": 16, "U32": 32, "I32": 32,
    "F32": 32, "U64": 64, "I64": 64, "F64": 64, "C64": 64,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where a tensor lies: bytes ``start:stop`` of ``file`` (absolute, header included), row-major."""

    name: str
    file: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int

    @property
    def nbytes(self) -> int:
        """Size of the tensor's data in bytes."""
        return self.stop - self.start


Tensors = dict[str, TensorInfo]
"""One file's tensors by name."""


class HeaderError(CheckpointError):
    """A header that is not valid; ``problems`` lists everything wrong with it."""

    def __init__(self, problems: list[Problem]) -> None:
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        super().__init__(f"{problems[0]}{more}")
        self.problems = problems


def read_header(source: Source, file: str) -> Tensors:
    """Read and check one file's header.

    Raises:
        HeaderError: the header is malformed or does not fit the file's size.
        SourceError: the file cannot be read.
    """
    size = source.files()[file].size if file in source.files() else 0
    first = source.read(file, 0, min(size, _FIRST_READ_BYTES))
    length = header_length(bytes(first[:8]), file, size)
    if length <= _LARGE_HEADER_BYTES:
        return parse_header(_rest(source, file, first, length), file, size)
    with _large_header:
        return parse_header(_rest(source, file, first, length), file, size)


def _rest(source: Source, file: str, first: memoryview, length: int) -> bytes | memoryview:
    if 8 + length <= len(first):
        return first[8 : 8 + length]
    whole = bytearray(length)
    whole[: len(first) - 8] = first[8:]
    source.read(file, len(first), 8 + length, memoryview(whole)[len(first) - 8 :])
    return memoryview(whole)


def header_length(raw: bytes, file: str, size: int) -> int:
    """Length of the JSON in bytes, from the file's first eight. Raises HeaderError when ``size`` cannot hold it."""
    if len(raw) < 8 or size < 10:
        _refuse(file, "", f"a file of {size} bytes", "8 bytes of length and a header of at least 2 bytes")
    if raw == b"version ":
        _refuse(file, "", "a Git LFS pointer", "the file itself", "Fetch it with `git lfs pull`.")
    length = int.from_bytes(raw, "little")
    if length > MAX_HEADER_BYTES:
        _refuse(file, "header length", f"{length} bytes", f"at most {MAX_HEADER_BYTES}, as the safetensors library")
    if 8 + length > size:
        _refuse(file, "header length", f"{length} bytes in a file of {size}", "a header that lies inside its file")
    return length


def parse_header(raw: bytes | memoryview, file: str, size: int) -> Tensors:
    """Parse the JSON of a header (without the eight bytes of length) of a file of ``size`` bytes in all.

    Raises:
        HeaderError: anything wrong, all of it listed.
    """
    if bytes(raw[:1]) != b"{":
        _refuse(file, "header", f"a first byte {bytes(raw[:1])!r}", "a JSON object that starts with '{'")
    try:
        parsed = strict_json.parse(raw)
    except ValueError as error:
        _refuse(file, "header", str(error), "one JSON object")
    if not isinstance(parsed, dict):
        _refuse(file, "header", f"a JSON {type(parsed).__name__}", "one JSON object")
    problems: list[Problem] = []
    metadata = parsed.pop("__metadata__", None)
    if metadata is not None and not (
        isinstance(metadata, dict) and all(isinstance(value, str) for value in metadata.values())
    ):
        problems.append(_problem(file, "__metadata__", show(metadata), "a map of strings to strings"))
    data_start = 8 + len(raw)
    file = sys.intern(file)
    tensors: Tensors = {}
    for key, entry in parsed.items():
        found = _entry(key, entry)
        if isinstance(found, str):
            problems.append(_problem(file, printable(key), found, _ENTRY_SUPPORTED))
        else:
            dtype, shape, start, stop = found
            tensors[key] = TensorInfo(key, file, dtype, shape, data_start + start, data_start + stop)
    if not problems:
        problems += _layout(tensors, file, data_start, size)
    if problems:
        raise HeaderError(problems)
    return tensors


_ENTRY_SUPPORTED = 'an entry {"dtype": …, "shape": […], "data_offsets": [begin, end]} whose sizes agree'


def _entry(key: str, entry: Any) -> tuple[str, tuple[int, ...], int, int] | str:
    """dtype, shape, begin and end of one header entry, or the phrase that says what is wrong with it."""
    if not _is_utf8(key):
        return "a name that is not valid Unicode"
    if not isinstance(entry, dict):
        return f"{show(entry)} instead of an object"
    dtype, shape, offsets = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    bits = DTYPE_BITS.get(dtype) if isinstance(dtype, str) else None
    if bits is None:
        return f"dtype {show(dtype)}, which safetensors does not define"
    if not isinstance(shape, list) or not all(map(_is_size, shape)):
        return f"shape {show(shape)}, not a list of sizes"
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(map(_is_size, offsets)):
        return f"data_offsets {show(offsets)}, not two offsets"
    begin, end = offsets
    if begin > end:
        return f"data_offsets {show(offsets)} that run backwards"
    total = bits
    for dimension in shape:
        total *= dimension
        if total >> 67:
            return f"shape {show(shape)}, more bytes than 64 bits can count"
    if total % 8 or total // 8 != end - begin:
        return f"{end - begin} bytes of data for {dtype} {show(shape)}, which takes {total / 8:g}"
    return sys.intern(str(dtype)), tuple(shape), begin, end


def _is_size(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 64


def _is_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _layout(tensors: Tensors, file: str, data_start: int, size: int) -> list[Problem]:
    """Tensors must cover the data exactly: no holes, no overlaps, nothing after the last, nothing missing."""
    problems = []
    expected, before = data_start, ""
    for tensor in sorted(tensors.values(), key=lambda t: (t.start, t.stop)):
        if tensor.start != expected:
            kind = "an overlap" if tensor.start < expected else "a hole"
            found = f"{kind} of {abs(tensor.start - expected)} bytes after {before or 'the header'}"
            problems.append(_problem(file, printable(tensor.name), found, "tensors that follow each other exactly"))
        expected, before = max(expected, tensor.stop), printable(tensor.name)
    if expected != size:
        kind = "ends too early: truncated or still downloading" if expected > size else "is longer than its tensors"
        found = f"{size} bytes where the header describes {expected}; the file {kind}"
        problems.append(_problem(file, "", found, "a file exactly as long as its header says"))
    return problems


def _problem(file: str, key: str, found: str, supported: str, step: str = "Download the file again.") -> Problem:
    return Problem("header", printable(file), key, found, supported, step)


def _refuse(file: str, key: str, found: str, supported: str, step: str = "Download the file again.") -> NoReturn:
    raise HeaderError([_problem(file, key, found, supported, step)])


def scan_headers(source: Source, files: list[str], workers: int = 16) -> tuple[dict[str, Tensors], list[Problem]]:
    """The tensors of each of ``files``, whose headers are read concurrently, and every problem found.

    A file whose header is not valid is missing from the first result and present in the second.

    Raises:
        SourceError: a file cannot be read.
    """
    headers: dict[str, Tensors] = {}
    problems: list[Problem] = []

    def attempt(file: str) -> Tensors | list[Problem]:
        try:
            return read_header(source, file)
        except HeaderError as error:
            return error.problems

    for file, result in zip(files, map_in_threads(attempt, files, workers, "headers"), strict=True):
        if isinstance(result, dict):
            headers[file] = result
        else:
            problems += result
    return headers, problems
