"""A run's numbers: what is saved as JSON, and what follows from it."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from chord_runtime.bench.cases import Case, all_cases
from chord_runtime.bench.ceilings import Ceilings, dense_flops
from chord_runtime.bench.files import load_json, write_json
from chord_runtime.bench.peers import CHORD_PUBLISHED, HUMMING_RECORDED, RECORDED_DEVICE
from chord_runtime.bench.timing import Timing
from chord_runtime.errors import UsageError

FORMAT = 1
OURS = "chord"
HUMMING = "humming"
DENSE_SIZE = 4096
DENSE = f"cuBLAS {DENSE_SIZE}³"


@dataclass(frozen=True)
class Measurement:
    """One case."""

    active: int
    """Experts with at least one row."""
    error: float | None
    """Relative error of Chord against the reference; None if the check failed."""
    timings: dict[str, Timing]
    """By contender, taken in turns."""
    failures: dict[str, str] = field(default_factory=dict)
    """Contenders that could not run, with the reason."""
    alone_us: float | None = None
    """Chord by itself on a rested card; None where it was not taken."""
    seconds: float = 0.0
    """What measuring it took, all told."""


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
        return RECORDED_DEVICE in self.machine["device"]

    def us(self, case: Case, contender: str = OURS) -> float | None:
        """Median time of a contender in turns, if it ran."""
        timing = self.points[case.key].timings.get(contender)
        return timing.us if timing else None

    def alone_us(self, case: Case) -> float | None:
        """Chord's time by itself; in turns where nothing else was taken."""
        return self.points[case.key].alone_us or self.us(case)

    def floor_us(self, case: Case) -> float:
        """What the measured ceilings allow."""
        return self.ceilings.floor_us(case.moved_bytes(self.points[case.key].active), case.flops)

    def of_dense(self, case: Case) -> float | None:
        """Chord's rate of arithmetic over cuBLAS', both in turns; None where cuBLAS had no turn."""
        ours, dense = self.us(case), self.us(case, DENSE)
        return case.flops / ours * dense / dense_flops(DENSE_SIZE) if ours and dense else None

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

    def speedups(self, case: Case) -> dict[str, float]:
        """Each peer's time over ours, taken as the peer's was: in turns if it ran here, else alone."""
        turns, alone = self.us(case), self.alone_us(case)
        ours = {name: turns if name == HUMMING else alone for name in self.peers(case)}
        return {name: us / own for name, us in self.peers(case).items() if (own := ours[name])}

    def speedup(self, case: Case) -> float | None:
        """The least of the speed-ups; None where there is none."""
        return min(self.speedups(case).values(), default=None)

    def mean_speedup(self, cases: Iterable[Case]) -> float | None:
        """Geometric mean of the speed-ups."""
        return geometric_mean(speedup for case in cases if (speedup := self.speedup(case)))

    def merged(self, other: Results) -> Results:
        """The points of both; where both have one, and for the ceilings, the other's.

        Raises:
            UsageError: they are not of one machine, or not measured alike.
        """
        check_same(self.machine | self.method, other.machine | other.method)
        return replace(other, points=self.points | other.points)

    def save(self, path: Path) -> None:
        """Write as JSON, whole or not at all; raises OutputError if it cannot be written."""
        write_json(path, {"format": FORMAT, **asdict(self)})

    @classmethod
    def load(cls, path: Path) -> Results:
        """Read what ``save`` wrote.

        Raises:
            UsageError: the file is not such JSON, or of another format.
        """
        data = load_json(path, FORMAT)
        points = {key: measurement(point) for key, point in data["points"].items()}
        return cls(data["machine"], data["method"], Ceilings(**data["ceilings"]), points)


def geometric_mean(values: Iterable[float]) -> float | None:
    """None of nothing."""
    logs = [math.log(value) for value in values]
    return math.exp(sum(logs) / len(logs)) if logs else None


def check_same(old: dict[str, str], new: dict[str, str]) -> None:
    """Raise UsageError unless two runs were measured alike, as far as what they say of themselves goes."""
    different = [name for name in {**old, **new} if old.get(name) != new.get(name)]
    if different:
        raise UsageError(
            "results measured differently do not go together: "
            + "; ".join(f"{name} {old.get(name)!r} and {new.get(name)!r}" for name in different)
            + ". Save them in files of their own"
        )


def measurement(point: dict[str, Any]) -> Measurement:
    """From JSON."""
    timings = {name: Timing(**timing) for name, timing in point["timings"].items()}
    return Measurement(**point | {"timings": timings})
