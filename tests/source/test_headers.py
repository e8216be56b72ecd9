"""Safetensors headers: equal to the safetensors library on what it writes, one clear error on everything else."""

from __future__ import annotations

import copy
import json
import struct
import time
import tracemalloc
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, deserialize
from safetensors.torch import save

from chord_convert.source.headers import HeaderError, read_header, scan_headers
from chord_convert.source.parallel import map_in_threads
from chord_runtime.errors import SourceError
from tests.source.memory import MemorySource

DTYPES = [torch.bfloat16, torch.float32, torch.int32, torch.int64, torch.uint8, torch.bool, torch.float8_e4m3fn]


def file_of(header: Any, data: int = 0) -> bytes:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(raw)) + raw + bytes(data)


def entry(dtype: str = "U8", shape: Any = (4,), offsets: Any = (0, 4)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


def problems_of(content: bytes) -> list[str]:
    with pytest.raises(HeaderError) as caught:
        read_header(MemorySource({"a.safetensors": content}), "a.safetensors")
    assert all(problem.file == "a.safetensors" for problem in caught.value.problems)
    return [str(problem) for problem in caught.value.problems]


shapes = st.lists(st.integers(0, 5), max_size=4)
names = st.text(st.characters(codec="utf-8"), min_size=1, max_size=20).filter(lambda name: name != "__metadata__")
tensor_sets = st.dictionaries(names, st.tuples(st.sampled_from(DTYPES), shapes), max_size=8)


@given(tensor_sets, st.dictionaries(st.text(st.characters(codec="utf-8")), st.text(st.characters(codec="utf-8"))))
def test_reads_what_the_library_writes(spec: dict[str, Any], metadata: dict[str, str]) -> None:
    tensors = {
        name: torch.arange(int(torch.Size(shape).numel())).to(dtype).view(shape)
        for name, (dtype, shape) in spec.items()
    }
    content = save(tensors, metadata=metadata or None)
    header = read_header(MemorySource({"a.safetensors": content}), "a.safetensors")
    theirs = dict(deserialize(content))
    assert header.keys() == theirs.keys()
    for name, info in header.items():
        assert (info.dtype, list(info.shape)) == (theirs[name]["dtype"], theirs[name]["shape"])
        assert content[info.start : info.stop] == theirs[name]["data"]
        assert info.nbytes == tensors[name].nbytes


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)


@st.composite
def damaged_headers(draw: st.DrawFn) -> bytes:
    """A valid file of up to four tensors with something replaced, removed, cut off or overwritten."""
    sizes = draw(st.lists(st.integers(0, 6), min_size=1, max_size=4))
    header: dict[str, Any] = {}
    begin = 0
    for number, size in enumerate(sizes):
        header[f"t{number}"] = entry("U8", (size,), (begin, begin + size))
        begin += size
    victim = draw(st.sampled_from(sorted(header)))
    part = draw(st.sampled_from(["none", "entry", "dtype", "shape", "data_offsets", "extra", "metadata", "raw"]))
    value = draw(json_values)
    if part == "entry":
        header[victim] = value
    elif part == "extra":
        header[draw(st.text(max_size=3))] = copy.deepcopy(draw(st.sampled_from([value, header[victim]])))
    elif part == "metadata":
        header["__metadata__"] = value
    elif part in ("dtype", "shape", "data_offsets"):
        change = draw(st.sampled_from(["replace", "remove", "small"]))
        if change == "remove":
            del header[victim][part]
        elif change == "small" and part != "dtype":
            header[victim][part] = draw(st.lists(st.integers(-2, 8), max_size=3))
        else:
            header[victim][part] = value
    content = bytearray(file_of(header, begin))
    if part == "raw":
        for _ in range(draw(st.integers(1, 4))):
            content[draw(st.integers(0, len(content) - 1))] = draw(st.integers(0, 255))
    return bytes(content[: draw(st.sampled_from([len(content), draw(st.integers(0, len(content)))]))])


@settings(max_examples=600, deadline=None)
@given(damaged_headers())
def test_damaged_headers_end_as_in_the_library(content: bytes) -> None:
    source = MemorySource({"a.safetensors": content})
    try:
        header = read_header(source, "a.safetensors")
    except HeaderError as error:
        assert str(error).startswith("a.safetensors")
        assert str(error).isprintable()
        return
    # What we accept, the library accepts, and it means the same. (We refuse more: keys that are written twice.)
    theirs = dict(deserialize(content))
    assert {name: (info.dtype, list(info.shape)) for name, info in header.items()} == {
        name: (info["dtype"], info["shape"]) for name, info in theirs.items()
    }


@settings(max_examples=300, deadline=None)
@given(damaged_headers())
def test_nothing_valid_is_refused(content: bytes) -> None:
    try:
        deserialize(content)
    except (SafetensorError, ValueError):
        return
    length = int.from_bytes(content[:8], "little")
    pairs: list[list[tuple[str, Any]]] = []
    json.loads(content[8 : 8 + length], object_pairs_hook=lambda found: pairs.append(found) or dict(found))
    if any(len(dict(found)) != len(found) for found in pairs):
        return
    read_header(MemorySource({"a.safetensors": content}), "a.safetensors")


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=64))
def test_random_bytes(content: bytes) -> None:
    try:
        read_header(MemorySource({"a.safetensors": content}), "a.safetensors")
    except HeaderError:
        return
    deserialize(content)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "a file of 0 bytes"),
        (b"\x08\x00\x00", "a file of 3 bytes"),
        (struct.pack("<Q", 200_000_000) + b"{}", "header length: found 200000000 bytes; supported: at most 100000000"),
        (struct.pack("<Q", 2**63) + b"{}", "header length: found 9223372036854775808 bytes"),
        (struct.pack("<Q", 50) + b"{}", "header length: found 50 bytes in a file of 10"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 5\n", "git lfs pull"),
        (file_of(b"[1, 2]"), "a first byte b'['"),
        (file_of(b' {"a": 1}'), "a first byte b' '"),
        (file_of(b'{"a": '), "text that is not JSON"),
        (file_of(b'{"a\xff": 1}'), "bytes that are not UTF-8 at offset 3"),
        (file_of(b'{"a": 1, "a": 2}'), 'the key "a" twice'),
        (file_of(b'{"a": {"dtype": "U8", "dtype": "I8", "shape": [], "data_offsets": [0, 1]}}', 1), '"dtype" twice'),
        (file_of(b'{"a": NaN}'), "NaN, which is not JSON"),
        (file_of(b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}"), "nested too deeply"),
        (file_of(b'{"a": ' + b"9" * 10_000 + b"}"), "a number of more digits"),
        (file_of({"a": 5}), "5 instead of an object"),
        (file_of({"a": entry("Q4")}, 4), 'dtype "Q4", which safetensors does not define'),
        (file_of({"a": entry(dtype=["U8"])}, 4), 'dtype ["U8"]'),
        (file_of({"a": entry(shape=(-4,))}, 4), "shape [-4], not a list of sizes"),
        (file_of({"a": entry(shape=(4.0,))}, 4), "shape [4.0], not a list of sizes"),
        (file_of({"a": entry(shape=(True, 4))}, 4), "shape [true, 4], not a list of sizes"),
        (file_of({"a": entry(shape=(2**40, 2**40, 0))}, 4), "more bytes than 64 bits can count"),
        (file_of({"a": entry(shape=[2**63] * 60)}, 4), "more bytes than 64 bits can count"),
        (file_of({"a": entry(offsets=(4, 0))}, 4), "run backwards"),
        (file_of({"a": entry(offsets=(-4, 0))}, 4), "not two offsets"),
        (file_of({"a": entry(offsets=(0, 2**64))}, 4), "not two offsets"),
        (file_of({"a": entry(offsets=(0, 4, 4))}, 4), "not two offsets"),
        (file_of({"a": entry(shape=(5,))}, 4), "4 bytes of data for U8 [5], which takes 5"),
        (file_of({"a": entry("F4", (3,), (0, 2))}, 2), "which takes 1.5"),
        (file_of({"a": entry(), "__metadata__": {"k": 1}}, 4), '__metadata__: found {"k": 1}'),
        (file_of({"a": entry(), "__metadata__": "k"}, 4), "a map of strings to strings"),
        (file_of({"a": entry(), "b": entry(offsets=(2, 6))}, 6), "b: found an overlap of 2 bytes after a"),
        (file_of({"a": entry(), "b": entry(offsets=(5, 9))}, 9), "b: found a hole of 1 bytes after a"),
        (file_of({"a": entry(offsets=(1, 5))}, 5), "a hole of 1 bytes after the header"),
        (file_of({"a": entry()}, 3), "the file ends too early"),
        (file_of({"a": entry()}, 5), "the file is longer than its tensors"),
        (file_of(b'{"\\ud800": 1}'), "a name that is not valid Unicode"),
    ],
)
def test_says_what_is_wrong(content: bytes, said: str) -> None:
    found = problems_of(content)
    assert any(said in line for line in found), found
    assert all(line.isprintable() and len(line) < 600 for line in found)


def test_every_bad_tensor_is_named() -> None:
    lines = problems_of(file_of({"a": entry("Q4"), "b": entry(shape=(9,)), "c": entry(offsets=(0, 4))}, 4))
    assert [line.split(": ")[1] for line in lines] == ["a", "b"]


def test_a_length_that_lies_allocates_nothing() -> None:
    content = struct.pack("<Q", 90_000_000) + b"{}" + bytes(100)
    tracemalloc.start()
    problems_of(content)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 20


def test_one_read_for_an_ordinary_header_and_two_for_a_long_one() -> None:
    short = save({"a": torch.zeros(4)})
    long = save({f"{'x' * 200}{number}": torch.zeros(1) for number in range(4000)})
    source = MemorySource({"short.safetensors": short, "long.safetensors": long})
    headers, _ = scan_headers(source, list(source.files()))
    assert [len(tensors) for tensors in headers.values()] == [1, 4000]
    assert [read[0] for read in source.reads].count("short.safetensors") == 1
    assert [read[0] for read in source.reads].count("long.safetensors") == 2
    assert max(stop for file, _, stop in source.reads if file == "long.safetensors") < len(long)


def test_scan_keeps_the_good_files() -> None:
    good = save({"a": torch.zeros(4)})
    source = MemorySource({"good.safetensors": good, "bad.safetensors": b"x"})
    headers, problems = scan_headers(source, list(source.files()))
    assert list(headers) == ["good.safetensors"]
    assert [problem.file for problem in problems] == ["bad.safetensors"]


def test_unknown_file() -> None:
    with pytest.raises(SourceError, match="no such file"):
        read_header(MemorySource({}), "a.safetensors")


def test_the_first_error_stops_the_rest() -> None:
    begun: list[int] = []

    def work(number: int) -> int:
        begun.append(number)
        if number == 3:
            raise SourceError("the third")
        time.sleep(0.01)
        return number

    done: list[int] = []
    with pytest.raises(SourceError, match="the third"):
        done.extend(map_in_threads(work, range(1000), 2, "test"))
    assert len(begun) < 100
    assert list(map_in_threads(str, range(5), 2, "test")) == ["0", "1", "2", "3", "4"]
