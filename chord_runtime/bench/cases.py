"""What is measured: each scenario, projection and point once, with the work it implies."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from fnmatch import fnmatchcase

from chord_runtime.errors import UsageError
from chord_runtime.format.block import packed_bytes
from chord_runtime.format.layout import Mode

TOP_K = 8
MAX_M = 128
"""Rows that the masked layout reserves for each expert."""


class Stage(str, Enum):
    """The two GEMMs of an MoE layer."""

    GATE_UP = "gate_up"
    DOWN = "down"


@dataclass(frozen=True)
class Scenario:
    """One way of calling: layout, experts of the rank, shapes, and the points along its axis."""

    name: str
    title: str
    mode: Mode
    experts: int
    shapes: dict[Stage, tuple[int, int]]
    """(N, K) of each projection."""
    points: tuple[int, ...]
    unit: str
    """What a point counts."""
    points_per_token: int = 1
    """Points for one of the tokens whose top-8 is drawn: 8 where a point counts routed rows."""

    def tokens(self, point: int) -> int:
        """Tokens whose top-8 experts are drawn among this rank's."""
        if self.mode is not Mode.INDEXED:
            return point * self.experts // TOP_K
        return point // self.points_per_token


_EP8 = {Stage.GATE_UP: (4096, 7168), Stage.DOWN: (7168, 2048)}
_TP8 = {Stage.GATE_UP: (512, 7168), Stage.DOWN: (7168, 256)}
_TOKENS = (1024, 2048, 4096, 8192, 16384)

SCENARIOS = (
    Scenario("masked", "Masked decode, EP8", Mode.MASKED, 48, _EP8, (8, 16, 32, 64), "rows per expert"),
    Scenario("contiguous", "Contiguous prefill, EP8", Mode.CONTIGUOUS, 48, _EP8, (128, 256, 512), "rows per expert"),
    Scenario("decode", "Indexed decode, EP8", Mode.INDEXED, 48, _EP8, (20, 30, 40, 50), "tokens"),
    Scenario("prefill", "Indexed prefill, EP8", Mode.INDEXED, 48, _EP8, _TOKENS, "routed rows", TOP_K),
    Scenario("tp8", "Indexed, TP8", Mode.INDEXED, 384, _TP8, _TOKENS, "tokens"),
)


@dataclass(frozen=True)
class Case:
    """One point of one scenario and projection."""

    scenario: Scenario
    stage: Stage
    point: int

    @property
    def key(self) -> str:
        """Its name in files and filters: ``masked/gate_up/8``."""
        return f"{self.scenario.name}/{self.stage.value}/{self.point}"

    @property
    def n(self) -> int:
        """Rows of one expert's weight."""
        return self.scenario.shapes[self.stage][0]

    @property
    def k(self) -> int:
        """Columns of one expert's weight."""
        return self.scenario.shapes[self.stage][1]

    @property
    def tokens(self) -> int:
        """Tokens whose top-8 experts are drawn; also the seed of the draw."""
        return self.scenario.tokens(self.point)

    @property
    def routed(self) -> int:
        """Rows that experts compute."""
        return self.tokens * TOP_K

    @property
    def rows(self) -> int:
        """Rows of an expert on average, rounded up: what kernels are chosen by."""
        return -(-self.routed // self.scenario.experts)

    @property
    def fan_out(self) -> int:
        """Routed rows that read one input row: top_k for an indexed gate_up, else 1."""
        return TOP_K if self.scenario.mode is Mode.INDEXED and self.stage is Stage.GATE_UP else 1

    @property
    def flops(self) -> int:
        """Multiplications and additions of the routed rows."""
        return 2 * self.routed * self.n * self.k

    def weight_bytes(self, active: int) -> int:
        """Bytes of the packed weights of ``active`` experts: codes and scales."""
        return active * packed_bytes(self.n, self.k)

    def moved_bytes(self, active: int) -> int:
        """The least that memory must move: active weights, input rows and output rows, each once."""
        return self.weight_bytes(active) + 2 * (self.routed // self.fan_out * self.k + self.routed * self.n)


def all_cases() -> list[Case]:
    """Every point, in the order in which reports show them."""
    return [Case(s, stage, point) for s in SCENARIOS for stage in s.shapes for point in s.points]


def choose(patterns: Iterable[str] = (), *, quick: bool = False) -> list[Case]:
    """The cases whose key matches one of the patterns (``masked/*``, ``*/down/*``, ``tp8``); all without patterns.

    ``quick`` keeps the first and the last point of each scenario and projection.

    Raises:
        UsageError: a pattern that matches nothing.
    """
    cases = [
        case for case in all_cases() if not quick or case.point in (case.scenario.points[0], case.scenario.points[-1])
    ]
    patterns = list(patterns)
    for pattern in patterns:
        if not any(matches(case.key, pattern) for case in cases):
            names = ", ".join(scenario.name for scenario in SCENARIOS)
            raise UsageError(
                f"no point matches {pattern!r}; points are SCENARIO/STAGE/POINT with SCENARIO one of {names} and STAGE "
                f"gate_up or down, for example masked/gate_up/8 or 'tp8/*'"
                + (" (without --quick there are more)" if quick else "")
            )
    return [case for case in cases if not patterns or any(matches(case.key, pattern) for pattern in patterns)]


def case_of(key: str) -> Case:
    """The case that a key names.

    Raises:
        UsageError: there is none.
    """
    [case] = choose([key])
    return case


def matches(key: str, pattern: str) -> bool:
    """Whether a point's key is meant by a pattern, or lies under it."""
    return fnmatchcase(key, pattern) or key.startswith(pattern + "/")
