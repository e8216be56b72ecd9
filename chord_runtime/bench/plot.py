"""Latency against the point, one panel a scenario and projection, with the floor drawn."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path
from typing import Any

from chord_runtime.bench.cases import Case
from chord_runtime.bench.results import OURS, Results
from chord_runtime.errors import UsageError

# Okabe-Ito colours, told apart by colour-blind readers; ours is the darkest and widest line.
_STYLES: dict[str, dict[str, Any]] = {
    OURS: {"color": "#0072B2", "linewidth": 2.4, "marker": "o"},
    "humming": {"color": "#D55E00", "marker": "s"},
    "humming (recorded)": {"color": "#D55E00", "marker": "s", "linestyle": "--"},
    "novitalabs/chord (published)": {"color": "#009E73", "marker": "^", "linestyle": "--"},
    "torch bf16": {"color": "#999999", "marker": "x"},
}


def plot(results: Results, stem: Path) -> list[Path]:
    """Write ``stem``.png and ``stem``.svg; returns the paths.

    Raises:
        UsageError: matplotlib is not installed.
    """
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError as error:
        raise UsageError("plots need matplotlib: pip install 'chord-moe[bench]'") from error

    grouped = groupby(results.cases, key=lambda case: (case.scenario.name, case.stage))
    panels = {key: list(cases) for key, cases in grouped}
    scenarios = list(dict.fromkeys(name for name, _ in panels))
    stages = list(dict.fromkeys(stage for _, stage in panels))
    with pyplot.rc_context(
        {"font.size": 9, "svg.hashsalt": "chord", "axes.spines.top": False, "axes.spines.right": False}
    ):
        size = (3.1 * len(scenarios), 2.9 * len(stages) + 0.6)
        figure, axes = pyplot.subplots(len(stages), len(scenarios), figsize=size, squeeze=False, layout="constrained")
        for row, stage in enumerate(stages):
            for column, name in enumerate(scenarios):
                if cases := panels.get((name, stage)):
                    _panel(axes[row][column], results, cases)
                else:
                    axes[row][column].set_visible(False)
        lines = {line.get_label(): line for axis in axes.flat for line in axis.get_lines()}
        figure.legend(lines.values(), lines.keys(), loc="outside lower center", ncols=len(lines), frameon=False)
        figure.suptitle(f"W4A16 grouped GEMM on {results.machine['device']}: median latency, L2 flushed")
        paths = [stem.with_name(stem.name + suffix) for suffix in (".png", ".svg")]
        stem.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(paths[0], dpi=150)
        figure.savefig(paths[1], metadata={"Date": None})
        pyplot.close(figure)
    return paths


def _panel(axis: Any, results: Results, cases: list[Case]) -> None:
    first = cases[0]
    points = [case.point for case in cases]
    floor = [results.floor_us(case) for case in cases]
    axis.plot(points, floor, color="black", linewidth=1, linestyle=":", label="floor")
    axis.fill_between(points, floor, color="black", alpha=0.06, linewidth=0)
    for name, style in _STYLES.items():
        times = [results.us(case, name) or results.peers(case).get(name) for case in cases]
        if any(times):
            axis.plot(points, [time or float("nan") for time in times], label=name, markersize=4, **style)
    axis.set(xscale="log", yscale="log", xlabel=first.scenario.unit, ylabel="µs")
    axis.set_title(f"{first.scenario.title}\n{first.stage.value}: N={first.n}, K={first.k}", fontsize=9)
    axis.set_xticks(points, [str(point) for point in points])
    axis.minorticks_off()
    ticks = _ticks(axis.get_ylim())
    axis.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
    axis.grid(alpha=0.2)


def _ticks(limits: tuple[float, float]) -> list[float]:
    """1, 2, 5 times powers of ten within the limits."""
    candidates = (digit * 10.0**power for power in range(5) for digit in (1, 2, 5))
    return [tick for tick in candidates if limits[0] <= tick <= limits[1]]
