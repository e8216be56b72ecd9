"""A run's numbers: what is saved as JSON, and what follows from it."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from chord_runtime.bench.cases import Case, all_cases
from chord_runtime.bench.ceilings import Ceilings
from chord_runtime.bench.peers import CHORD_PUBLISHED, HUMMING_RECORDED, RECORDED_DEVICE
from chord_runtime.bench.timing import Timing
from chord_runtime.errors import UsageError

FORMAT = 1
OURS = "chord"
HUMMING = "humming"


@dataclass(frozen=True)
class Measurement:
    """One case."""

    active: int
    """Experts with at least one row."""
    error: float | None
    """Relative error of Chord against the reference; None if the check failed."""
    timings: dict[str, Timing]
    """By contender."""
    failures: dict[str, str] = field(default_factory=dict)
    """Contenders that could not run, with the reason."""


@dataclass(frozen=True)
class Results:
    """A whole run."""

    machine: dict[str, str]
    """Device and versions."""
    method: dict[str, str]
    """How it was measured."""
    ceilings: Ceilings
    points: dict[str, Measurement]
    """By case key."""

    @property
    def cases(self) -> list[Case]:
        """The cases measured, in report order."""
        return [case for case in all_cases() if case.key in self.points]

    @property
    def recorded_apply(self) -> bool:
        """Whether figures recorded on another H200 may stand beside these."""
        return RECORDED_DEVICE in self.machine.get("device", "")

    def us(self, case: Case, contender: str = OURS) -> float | None:
        """Median time of a contender, if it ran."""
        timing = self.points[case.key].timings.get(contender)
        return timing.us if timing else None

    def floor_us(self, case: Case) -> float:
        """What the measured ceilings allow."""
        return self.ceilings.floor_us(case.moved_bytes(self.points[case.key].active), case.flops)

    def peers(self, case: Case) -> dict[str, float]:
        """The W4A16 peers that count: Humming as measured here (else as recorded), and published Chord."""
        found = {}
        measured = self.us(case, HUMMING)
        if measured is not None:
            found[HUMMING] = measured
        if self.recorded_apply:
            if measured is None:
                found[HUMMING_RECORDED.name] = HUMMING_RECORDED.us(case)
            found[CHORD_PUBLISHED.name] = CHORD_PUBLISHED.us(case)
        return found

    def speedup(self, case: Case) -> float | None:
        """Time of the better peer over ours; None where either is missing."""
        ours, peers = self.us(case), self.peers(case)
        return min(peers.values()) / ours if ours and peers else None

    def mean_speedup(self, cases: Iterable[Case]) -> float | None:
        """Geometric mean of the speed-ups."""
        return geometric_mean(speedup for case in cases if (speedup := self.speedup(case)))

    def save(self, path: Path) -> None:
        """Write as JSON."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"format": FORMAT, **asdict(self)}, indent=1) + "\n")

    @classmethod
    def load(cls, path: Path) -> Results:
        """Read what ``save`` wrote.

        Raises:
            UsageError: the file is not such JSON, or of another format.
        """
        try:
            data = json.loads(path.read_text())
            if data["format"] != FORMAT:
                raise UsageError(f"{path} has results of format {data['format']}; this version reads {FORMAT}")
            points = {key: _measurement(point) for key, point in data["points"].items()}
            return cls(data["machine"], data["method"], Ceilings(**data["ceilings"]), points)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UsageError(f"{path} is not a file of bench results ({type(error).__name__}: {error})") from error


def geometric_mean(values: Iterable[float]) -> float | None:
    """None of nothing."""
    logs = [math.log(value) for value in values]
    return math.exp(sum(logs) / len(logs)) if logs else None


def _measurement(point: dict[str, Any]) -> Measurement:
    timings = {name: Timing(**timing) for name, timing in point["timings"].items()}
    return Measurement(point["active"], point["error"], timings, point["failures"])
