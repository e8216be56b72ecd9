"""The packer's benchmark measures what it says: packing and unpacking invert each other in its own buffers."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
import torch

from chord_runtime.format import bench, native
from chord_runtime.format.packing import pack, pack_gate_up

pytestmark = pytest.mark.skipif(native.library() is None, reason="the native packer was not built")

SMALL = (
    bench.Case("pair", 128, 128, gate_up=True),
    bench.Case("one", 256, 192),
    bench.Case("ranks", bench.CHUNK_ROWS * 2, 256, tp=2),
)


@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.name)
def test_an_expert_is_packed_and_unpacked(case: bench.Case) -> None:
    expert = bench.Expert(case)
    source = [tensor.clone() for part in expert.parts for tensor in part]
    expert.pack()
    if case.gate_up:
        assert torch.equal(expert.packed, pack_gate_up(*source))
    elif case.tp == 1:
        assert torch.equal(expert.packed, pack(*source))
    for part in expert.parts:
        for tensor in part:
            tensor.zero_()
    expert.unpack()
    assert all(map(torch.equal, source, (tensor for part in expert.parts for tensor in part)))
    expert.memcpy()
    if case.tp == 1:
        assert torch.equal(expert.copy, expert.packed)
    else:
        words, _ = expert.parts[0]
        first = words[: bench.CHUNK_ROWS].reshape(-1).view(torch.uint8)
        assert torch.equal(expert.copy[: first.numel()], first)


def test_a_line_of_the_table() -> None:
    line = bench.measure(SMALL[0], 4)
    assert re.fullmatch(r"pair +0\.0( +[\d.]+ \([\d.]+–[\d.]+\)){3} +[\d.]+", line)


def test_the_command_explains_itself() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "chord_runtime.format.bench", "--help"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0 and "memcpy" in done.stdout
