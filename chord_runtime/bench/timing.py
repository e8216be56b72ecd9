"""Interleaved timing: contenders take turns, each call finds the L2 cache flushed, medians are kept.

``triton.testing.do_bench`` times one function after another; clocks and temperature drift between them. Here every
round calls each contender once (A B A B …), so that all see the same card. Otherwise the method is do_bench's: warm-up,
a 256 MB buffer zeroed before each call, CUDA events around the call, the median.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

FLUSH_BYTES = 256 << 20
MIN_ROUNDS = 10
MAX_ROUNDS = 1000

Call = Callable[[], object]


@dataclass(frozen=True)
class Timing:
    """Times of one contender, in microseconds."""

    us: float
    """Median."""
    low: float
    """20th percentile."""
    high: float
    """80th percentile."""
    rounds: int

    @classmethod
    def of(cls, times: list[float]) -> Timing:
        """From single times in microseconds."""
        ordered = sorted(times)
        last = len(ordered) - 1
        return cls(statistics.median(ordered), ordered[round(0.2 * last)], ordered[round(0.8 * last)], len(ordered))


class Timer(Protocol):
    """Times contenders against each other."""

    def measure(self, calls: Mapping[str, Call], budget_ms: float) -> dict[str, Timing]:
        """Take turns for about ``budget_ms`` of measured time a contender."""


class CudaTimer:
    """CUDA events on the current stream."""

    def __init__(self) -> None:
        self._flush = torch.empty(FLUSH_BYTES // 4, dtype=torch.int32, device="cuda")

    def measure(self, calls: Mapping[str, Call], budget_ms: float) -> dict[str, Timing]:
        for call in calls.values():
            call()
        torch.cuda.synchronize()
        first = self._rounds(calls, 3)
        slowest_ms = max(statistics.median(times) for times in first.values()) / 1e3
        rounds = max(MIN_ROUNDS, min(MAX_ROUNDS, round(budget_ms / slowest_ms)))
        self._rounds(calls, max(3, rounds // 6))
        return {name: Timing.of(times) for name, times in self._rounds(calls, rounds).items()}

    def _rounds(self, calls: Mapping[str, Call], rounds: int) -> dict[str, list[float]]:
        events: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {name: [] for name in calls}
        for _ in range(rounds):
            for name, call in calls.items():
                start, end = _event(), _event()
                self._flush.zero_()
                start.record()
                call()
                end.record()
                events[name].append((start, end))
        torch.cuda.synchronize()
        return {name: [start.elapsed_time(end) * 1e3 for start, end in pairs] for name, pairs in events.items()}


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
