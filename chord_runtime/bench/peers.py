"""What others get at the same points, in microseconds, with where each figure comes from.

Both columns were taken on an H200; on another card they say nothing, and reports leave them out there.
"""

from __future__ import annotations

from dataclasses import dataclass

from chord_runtime.bench.cases import Case, Stage


@dataclass(frozen=True)
class Recorded:
    """One peer's figures: scenario → projection → µs in the order of the scenario's points."""

    name: str
    source: str
    figures: dict[str, dict[Stage, tuple[float, ...]]]

    def us(self, case: Case) -> float:
        """The figure for a case."""
        return self.figures[case.scenario.name][case.stage][case.scenario.points.index(case.point)]


G, D = Stage.GATE_UP, Stage.DOWN

CHORD_PUBLISHED = Recorded(
    "novitalabs/chord (published)",
    "the table that novitalabs/chord publishes for its own H200",
    {
        "masked": {G: (249, 267, 329, 435), D: (133, 139, 164, 233)},
        "contiguous": {G: (607, 1187, 2318), D: (310, 604, 1196)},
        "decode": {G: (222, 246, 254, 260), D: (112, 117, 123, 126)},
        "prefill": {G: (314, 383, 546, 998, 1743), D: (163, 205, 293, 533, 937)},
        "tp8": {G: (366, 415, 568, 1015, 1843), D: (265, 327, 470, 848, 1724)},
    },
)

HUMMING_RECORDED = Recorded(
    "humming (recorded)",
    "humming-kernels 0.1.20 on one H200, torch 2.11, median of do_bench with L2 flushed, 2026-11-29",
    {
        "masked": {G: (241, 275, 345, 525), D: (131, 143, 166, 259)},
        "contiguous": {G: (725, 1296, 2209), D: (372, 657, 1158)},
        "decode": {G: (212, 234, 252, 244), D: (116, 131, 133, 133)},
        "prefill": {G: (287, 354, 569, 1012, 1911), D: (150, 189, 289, 523, 1001)},
        "tp8": {G: (292, 359, 590, 1043, 2013), D: (202, 308, 501, 929, 1807)},
    },
)

RECORDED = (HUMMING_RECORDED, CHORD_PUBLISHED)

RECORDED_DEVICE = "H200"
"""Part of the name of the devices that the figures hold for."""
