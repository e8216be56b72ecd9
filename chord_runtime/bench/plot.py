"""Latency against the point, one panel a scenario and projection, with the floor drawn."""

from __future__ import annotations

from io import BytesIO
from itertools import groupby
from pathlib import Path
from textwrap import wrap
from typing import Any

from chord_runtime.bench.cases import Case
from chord_runtime.bench.files import target, write
from chord_runtime.bench.results import HUMMING, OURS, Results
from chord_runtime.errors import UsageError

TORCH = "torch bf16"
# Okabe-Ito colours, told apart by colour-blind readers, and a marker of its own for each; ours is the widest line.
_OURS = "#0072B2"
_STYLES: dict[str, dict[str, Any]] = {
    TORCH: {"color": "#999999", "marker": "x", "linewidth": 1.2},
    "novitalabs/chord (published)": {"color": "#009E73", "marker": "^", "linestyle": "--"},
    "humming (recorded)": {"color": "#D55E00", "marker": "s", "linestyle": "--"},
    HUMMING: {"color": "#D55E00", "marker": "s"},
    OURS: {"color": _OURS, "linewidth": 2.6, "marker": "o"},
}
_TITLE = (
    "W4A16 grouped GEMM on {device}: median latency in µs, contenders in turns; "
    "labels: speed-up over the better W4A16 peer"
)
_STYLE = {"font.size": 11, "svg.hashsalt": "chord", "axes.spines.top": False, "axes.spines.right": False}


def paths_of(stem: Path) -> tuple[Path, Path]:
    """``stem``.png and ``stem``.svg.

    Raises:
        UsageError: the stem has no name.
        OutputError: they cannot be written.
    """
    folder = UsageError(
        f"{str(stem)!r} names a folder; give a name that none has, as --plot figure for figure.png and .svg"
    )
    if stem.name in ("", ".."):
        raise folder
    png, svg = (stem.with_name(stem.name + suffix) for suffix in (".png", ".svg"))
    for path in (png, svg):
        target(path)
    if stem.is_dir():  # a name too long for this to answer has been refused
        raise folder
    return png, svg


def plot(results: Results, stem: Path) -> tuple[Path, Path]:
    """Write ``stem``.png and ``stem``.svg, both or none; returns the paths.

    Raises:
        UsageError: matplotlib is not installed, or there is no point to draw.
        OutputError: the files cannot be written.
    """
    paths = paths_of(stem)
    if not results.cases:
        raise UsageError("there is no point to plot: the results hold none, or only points that are not known here")
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
    with pyplot.rc_context(_STYLE):
        size = (0.4 + 3.0 * len(scenarios), 1.1 + 2.8 * len(stages))
        figure, axes = pyplot.subplots(len(stages), len(scenarios), figsize=size, squeeze=False, layout="constrained")
        for row, stage in enumerate(stages):
            for column, name in enumerate(scenarios):
                if cases := panels.get((name, stage)):
                    _panel(axes[row][column], results, cases)
                else:
                    axes[row][column].set_visible(False)
        lines = {line.get_label(): line for axis in axes.flat for line in axis.get_lines()}
        names = [name for name in ["floor", *_STYLES] if name in lines]
        columns = max(1, min(len(names), round(size[0] / 2.4)))
        figure.legend([lines[name] for name in names], names, loc="outside lower center", ncols=columns, frameon=False)
        title = _TITLE.format(device=results.machine["device"].partition(" (")[0])
        figure.suptitle("\n".join(wrap(title, round(11 * size[0]))), fontsize=12)
        png, svg = BytesIO(), BytesIO()
        figure.savefig(png, format="png", dpi=150)
        figure.savefig(svg, format="svg", metadata={"Date": None})
        pyplot.close(figure)
    write({paths[0]: png.getvalue(), paths[1]: svg.getvalue()})
    return paths


def _panel(axis: Any, results: Results, cases: list[Case]) -> None:
    first = cases[0]
    points = [case.point for case in cases]
    floor = [results.floor_us(case) for case in cases]
    shown = list(floor)
    axis.plot(points, floor, color="black", linewidth=1, linestyle=":", label="floor")
    axis.fill_between(points, floor, color="black", alpha=0.06, linewidth=0)
    for name, style in _STYLES.items():
        times = [results.us(case, name) or results.peers(case).get(name) for case in cases]
        if any(times):
            shown += [time for time in times if time and name != TORCH]
            axis.plot(points, [time or float("nan") for time in times], label=name, markersize=5, **style)
    for case in cases:
        if (ours := results.us(case)) and (speedup := results.speedup(case)):
            _label(axis, case.point, ours, f"{speedup:.2f}×")
    axis.set(xscale="log", yscale="log", xlabel=first.scenario.unit)
    axis.set_title(f"{first.scenario.title}\n{first.stage.value}, {first.n} × {first.k}", fontsize=11)
    axis.margins(x=0.12)
    axis.set_ylim(min(shown) * 0.82, max(shown) * 1.3)  # what is far slower must not flatten the rest
    dense = [time for case in cases if (time := results.us(case, TORCH))]
    if dense and min(dense) > max(shown) * 1.3:
        text = f"{TORCH}: {min(dense):.0f}–{max(dense):.0f} ↑"
        axis.text(0.03, 0.97, text, transform=axis.transAxes, va="top", fontsize=9, color="#666666")
    axis.set_xticks(points, [f"{point // 1024}k" if point >= 1024 else str(point) for point in points])
    axis.minorticks_off()
    ticks = _ticks(axis.get_ylim())
    axis.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
    axis.grid(alpha=0.2)


def _label(axis: Any, x: float, y: float, text: str) -> None:
    """Below the point and to its right, where a rising line leaves room, in a white outline."""
    from matplotlib.patheffects import withStroke

    outline = [withStroke(linewidth=3, foreground="white")]
    place = {"xytext": (4, -13), "textcoords": "offset points", "ha": "center"}
    axis.annotate(text, (x, y), color=_OURS, fontsize=9, fontweight="bold", path_effects=outline, zorder=4, **place)


def _ticks(limits: tuple[float, float]) -> list[float]:
    """1, 2, 5 times powers of ten within the limits; steps between them where that gives fewer than three."""
    for digits in ((1, 2, 5), (1, 1.5, 2, 2.5, 3, 4, 5, 7)):
        ticks = [
            tick for power in range(5) for digit in digits if limits[0] <= (tick := digit * 10**power) <= limits[1]
        ]
        if len(ticks) > 2:
            break
    return ticks
