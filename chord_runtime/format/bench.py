"""Speed of the native packer beside memcpy on the same core: ``python -m chord_runtime.format.bench``.

Full-size Kimi K2 experts, more of them in turn than caches hold. Each round packs, copies as many bytes, and unpacks,
one after the other, so that all three see the same machine. Figures are medians of the rounds and their quartiles.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from chord_runtime.format import native
from chord_runtime.format.block import GROUP_SIZE, packed_bytes

HIDDEN, INTERMEDIATE = 7168, 2048
EXPERTS = 6
CHUNK_ROWS = 896
"""Rows that the converter reads, and then cuts into TP ranks, at a time: about what a core's cache holds."""


@dataclass(frozen=True)
class Case:
    """What is packed: gate and up, or one weight, of [rows, k] each, cut along K for ``tp`` ranks."""

    name: str
    rows: int
    k: int
    gate_up: bool = False
    tp: int = 1

    @property
    def nbytes(self) -> int:
        """Bytes of source, and of the packed weight."""
        return packed_bytes(self.rows * (2 if self.gate_up else 1), self.k)


CASES = (
    Case("w13: gate and up", INTERMEDIATE, HIDDEN, gate_up=True),
    Case("w2: down", HIDDEN, INTERMEDIATE),
    Case("w2 cut for 8 TP ranks", HIDDEN, INTERMEDIATE, tp=8),
)


class Expert:
    """Source and packed bytes of one expert."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.parts = [_source(case) for _ in range(2 if case.gate_up else 1)]
        self.packed = torch.zeros(case.nbytes, dtype=torch.uint8)
        self.copy = torch.zeros(case.nbytes, dtype=torch.uint8)
        self.chunk = [torch.empty_like(tensor[:CHUNK_ROWS]) for tensor in self.parts[0]]

    def pack(self) -> None:
        """Pack. With several ranks: by chunks of rows, each read first, as the converter does."""
        case, out = self.case, self.packed.data_ptr()
        if case.tp == 1:
            native.pack(out, *(_rows(*part, case.k) for part in self.parts))
            return
        k = case.k // case.tp
        for row in range(0, case.rows, CHUNK_ROWS):
            words, scale = self._read(row)
            for rank in range(case.tp):
                native.pack(out, _rows(words[:, rank * k // 8 :], scale[:, rank * k // GROUP_SIZE :], k))
                out += packed_bytes(CHUNK_ROWS, k)

    def memcpy(self) -> None:
        """Move as many bytes, by the same chunks read first."""
        if self.case.tp == 1:
            ctypes.memmove(self.copy.data_ptr(), self.packed.data_ptr(), self.case.nbytes)
            return
        out = self.copy.data_ptr()
        for row in range(0, self.case.rows, CHUNK_ROWS):
            for tensor in self._read(row):
                ctypes.memmove(out, tensor.data_ptr(), tensor.nbytes)
                out += tensor.nbytes

    def unpack(self) -> None:
        """The inverse of ``pack``, into the source's memory."""
        case, packed = self.case, self.packed.data_ptr()
        if case.tp == 1:
            native.unpack(packed, *(_rows(*part, case.k) for part in self.parts))
            return
        k = case.k // case.tp
        for row in range(0, case.rows, CHUNK_ROWS):
            words, scale = (tensor[row : row + CHUNK_ROWS] for tensor in self.parts[0])
            for rank in range(case.tp):
                native.unpack(packed, _rows(words[:, rank * k // 8 :], scale[:, rank * k // GROUP_SIZE :], k))
                packed += packed_bytes(CHUNK_ROWS, k)

    def _read(self, row: int) -> list[Tensor]:
        for to, source in zip(self.chunk, self.parts[0], strict=True):
            ctypes.memmove(to.data_ptr(), source[row:].data_ptr(), to.nbytes)
        return self.chunk


def _rows(words: Tensor, scale: Tensor, k: int) -> native.Rows:
    strides = 4 * words.stride(0), 2 * scale.stride(0)
    return native.Rows(words.data_ptr(), scale.data_ptr(), len(words), k, *strides)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m chord_runtime.format.bench", description=__doc__)
    parser.add_argument("--rounds", type=int, default=30, help="how often each is measured (default 30)")
    rounds = parser.parse_args().rounds
    if native.library() is None:
        raise SystemExit("there is no native packer to measure")
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    print(f"{rounds} rounds on one core, GB/s of packed bytes: median (quartiles)\n")
    print(f"{'':<24}{'MB':>6}{'pack':>20}{'memcpy':>20}{'unpack':>20}{'pack : memcpy':>16}")
    for case in CASES:
        print(measure(case, rounds))


def measure(case: Case, rounds: int) -> str:
    """One line of the table."""
    experts = [Expert(case) for _ in range(EXPERTS)]
    speeds: dict[str, list[float]] = {"pack": [], "memcpy": [], "unpack": []}
    for number in range(-EXPERTS, rounds):
        expert = experts[number % EXPERTS]
        found = {name: case.nbytes / _time(getattr(expert, name)) / 1e9 for name in speeds}
        if number >= 0:  # before that every expert's memory is touched for the first time
            for name, speed in found.items():
                speeds[name].append(speed)
    ratio = statistics.median(speeds["pack"]) / statistics.median(speeds["memcpy"])
    shown = "".join(f"{_shown(speed):>20}" for speed in speeds.values())
    return f"{case.name:<24}{case.nbytes / 1e6:>6.1f}{shown}{ratio:>16.2f}"


def _source(case: Case) -> tuple[Tensor, Tensor]:
    words = torch.randint(-(2**31), 2**31, (case.rows, case.k // 8), dtype=torch.int32)
    return words, (torch.randn(case.rows, case.k // GROUP_SIZE) * 0.02).bfloat16()


def _time(run: Callable[[], None]) -> float:
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


def _shown(values: list[float]) -> str:
    low, middle, high = statistics.quantiles(values, n=4)
    return f"{middle:.1f} ({low:.1f}–{high:.1f})"


if __name__ == "__main__":
    main()
