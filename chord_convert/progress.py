"""What a conversion says while it runs: a bar on a terminal, JSON lines when asked for, or a line a minute."""

from __future__ import annotations

import json
import sys
import threading
import time
from typing import Any, TextIO

from tqdm import tqdm

from chord_convert.plan import Task
from chord_runtime.units import human

_LOG_SECONDS = 5.0
_LINE_SECONDS = 60.0
_RATE_SECONDS = 1.0


class Progress:
    """Counts bytes by worker; safe to use from several threads.

    ``bar`` shows a tqdm bar with bytes, GB/s, time left and each worker's GB/s. ``log`` writes one JSON object a line:
    ``start``, ``progress`` (every five seconds), ``file`` and ``end``. ``lines``, when neither is asked for, writes
    a line a minute. Otherwise it is quiet.
    """

    def __init__(self, bar: bool = False, log: bool = False, lines: bool = False, stream: TextIO | None = None) -> None:
        self._stream = sys.stderr if stream is None else stream
        self._with_bar, self._log, self._lines = bar, log, lines and not bar and not log
        self._bar: tqdm[Any] | None = None
        self._lock = threading.RLock()
        self._workers: dict[int, int] = {}
        self._rated: dict[int, int] = {}
        self._done = self._total = 0
        self.has_zero = False
        """Whether a code 0 (the value −8) was seen: Moonshot's own files have none."""
        self._started = self._shown = time.monotonic()

    def start(self, total: int, kept: int) -> None:
        """``total`` bytes are to be written in all, of which ``kept`` are there from an earlier run."""
        self._total, self._done = total, kept
        self._started = self._shown = time.monotonic()
        if self._with_bar:
            self._bar = tqdm(
                total=total, initial=kept, unit="B", unit_scale=True, file=self._stream, dynamic_ncols=True
            )  # fmt: skip
        self.event("start", total_bytes=total, kept_bytes=kept)

    def add(self, worker: int, count: int) -> None:
        """A worker has written ``count`` bytes."""
        with self._lock:
            self._done += count
            self._workers[worker] = self._workers.get(worker, 0) + count
            if self._bar is not None:
                self._bar.update(count)
            now = time.monotonic()
            if now - self._shown >= (_LOG_SECONDS if self._log else _LINE_SECONDS if self._lines else _RATE_SECONDS):
                self._show(now)

    def _show(self, now: float) -> None:
        """With the lock held."""
        seconds, self._shown = now - self._shown, now
        rates = {w: round((n - self._rated.get(w, 0)) / seconds / 1e9, 2) for w, n in sorted(self._workers.items())}
        self._rated = dict(self._workers)
        if self._bar is not None:
            self._bar.set_postfix_str(" ".join(f"w{w} {rate:.2f}" for w, rate in rates.items()) + " GB/s")
        speed = sum(self._workers.values()) / max(now - self._started, 1e-9)
        left = round((self._total - self._done) / speed) if speed else None
        if self._lines:
            rest = "" if left is None else f", {left} s left"
            done = f"{human(self._done)} of {human(self._total)}"
            print(f"written   {done}, {speed / 1e9:.2f} GB/s{rest}", file=self._stream, flush=True)
        self.event(
            "progress", done_bytes=self._done, total_bytes=self._total, gb_per_s=round(speed / 1e9, 3),
            seconds_left=left, workers_gb_per_s=rates,
        )  # fmt: skip

    def done(self, task: Task, has_zero: bool, **where: Any) -> None:
        """A task's files are finished. ``has_zero``: see ``run_task``."""
        with self._lock:
            self.has_zero |= has_zero
        for output in task.outputs:
            self.event("file", name=output.name, bytes=output.layout.size, **where)

    def event(self, kind: str, /, **fields: Any) -> None:
        """Log an event, if a log was asked for."""
        if self._log:
            line = json.dumps({"event": kind, "time": round(time.time(), 3), **fields})
            with self._lock:
                print(line, file=self._stream, flush=True)

    def say(self, text: str) -> None:
        """A line for people, on a terminal or beside a line a minute."""
        if self._with_bar or self._lines:
            print(text, file=self._stream, flush=True)

    def close(self) -> None:
        """Take the bar away."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None
