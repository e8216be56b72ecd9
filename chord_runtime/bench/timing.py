"""Two ways of timing, both with CUDA events, a 256 MB buffer zeroed before each call so that L2 is flushed, medians.

In turns: every round calls each contender once (A B A B …), so that all see the same clocks, temperature and power.
Long turns keep a card at its power limit, where clocks are several percent lower than in a short run, so these times
compare with each other only. Alone: ``triton.testing.do_bench`` of one function on a card that has rested, which is how
published figures are taken and what compares with them.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

FLUSH_BYTES = 256 << 20
MIN_ROUNDS = 10
MAX_ROUNDS = 1000
HOST_BURSTS, HOST_BURST = 5, 10
WARM_UP_MS, ALONE_MS = 25, 100
"""do_bench's own defaults."""
REST_SECONDS = 0.2
"""Idle before timing alone: what ran before leaves the card hot and its clocks low."""

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
    host_us: float
    """Median time that the host spends on a call, the device not waited for."""

    @classmethod
    def of(cls, times: list[float], host_us: float) -> Timing:
        """From single times in microseconds."""
        ordered = sorted(times)
        low, high = (ordered[round(share * (len(ordered) - 1))] for share in (0.2, 0.8))
        return cls(statistics.median(ordered), low, high, len(ordered), host_us)


class Timer(Protocol):
    """Times contenders against each other, or one by itself."""

    def measure(self, calls: Mapping[str, Call], budget_ms: float) -> dict[str, Timing]:
        """Take turns for about ``budget_ms`` of measured time a contender."""

    def alone(self, call: Call) -> float:
        """Median in microseconds, after a rest, of 100 ms by itself."""


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
        times = self._rounds(calls, rounds)
        return {name: Timing.of(times[name], _host_us(call)) for name, call in calls.items()}

    def alone(self, call: Call) -> float:
        from triton.testing import do_bench  # of the wheels of torch with CUDA

        torch.cuda.synchronize()
        time.sleep(REST_SECONDS)
        milliseconds: float = do_bench(call, warmup=WARM_UP_MS, rep=ALONE_MS, return_mode="median")
        return milliseconds * 1e3

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


def _host_us(call: Call) -> float:
    """Median over a few bursts, each short enough for the launch queue never to fill up."""
    bursts = []
    for _ in range(HOST_BURSTS):
        torch.cuda.synchronize()
        started = time.perf_counter()
        for _ in range(HOST_BURST):
            call()
        bursts.append((time.perf_counter() - started) / HOST_BURST * 1e6)
    torch.cuda.synchronize()
    return statistics.median(bursts)


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
