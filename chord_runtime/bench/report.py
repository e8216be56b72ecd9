"""Results as Markdown tables, readable in a terminal and in the docs, and as a comparison of two runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import groupby

from chord_runtime.bench.cases import Case
from chord_runtime.bench.results import DENSE, HUMMING, OURS, Results, geometric_mean
from chord_runtime.errors import UsageError
from chord_runtime.units import counted

TOLERANCE = 0.03
"""A point this much slower than before is a regression: runs of the same code differ by up to 2 %."""


def report(results: Results) -> str:
    """The whole report: machine, ceilings, a table for each scenario and projection, and the summary."""
    parts = [_machine(results), _ceilings(results)]
    for _, group in groupby(results.cases, key=lambda case: (case.scenario.name, case.stage)):
        parts.append(_table(results, list(group)))
    parts += [_summary(results), _failures(results)]
    return "\n\n".join(part for part in parts if part)


def brief(results: Results) -> str:
    """One row for each scenario and projection."""
    rows = []
    peers = list(dict.fromkeys(name for case in results.cases for name in results.peers(case)))
    figures: dict[str, Callable[[Case], float | None]] = {
        "Chord µs": results.us,
        "Chord alone µs": results.alone_us,
        **{f"{name} µs": partial(_peer, results, name) for name in peers},
    }
    for _, group in groupby(results.cases, key=lambda case: (case.scenario.name, case.stage)):
        cases = list(group)
        first = cases[0]
        points = _list(str(case.point) for case in cases)
        row = [f"{first.scenario.name} {first.stage.value}", f"{points} {first.scenario.unit}"]
        row += [_list(f"{us:.0f}" if (us := figure(case)) else "–" for case in cases) for figure in figures.values()]
        rows.append([*row, _list(f"{found:.2f}" if (found := results.speedup(case)) else "–" for case in cases)])
    header = ["operation", "points", *figures, "speed-up"]
    return f"{table(header, rows)}\n\n{_total(results)}"


def compare(old: Results, new: Results) -> tuple[str, list[Case]]:
    """A table of the points that both runs measured, and those of them that regressed.

    Raises:
        UsageError: there is no such point.
    """
    shared = [case for case in new.cases if case.key in old.points and old.us(case) and new.us(case)]
    if not shared:
        raise UsageError("nothing to compare: no point was measured in both runs; chord bench --points chooses points")
    ratios = {case.key: (new.us(case) or 0) / (old.us(case) or 1) for case in shared}
    regressed = [case for case in shared if ratios[case.key] > 1 + TOLERANCE]
    rows = [
        [
            case.key,
            _us(old.us(case)),
            _us(new.us(case)),
            f"{ratios[case.key] - 1:+.1%}",
            "slower" if case in regressed else "",
        ]
        for case in shared
    ]
    text = table(["point", "before µs", "now µs", "change", ""], rows)
    mean = geometric_mean(ratios.values())
    if old.machine["device"] != new.machine["device"]:
        text += f"\n\nbefore on {old.machine['device']}, now on {new.machine['device']}: not the same card"
    for name in {**old.method, **new.method}:
        if (before := old.method.get(name)) != (now := new.method.get(name)):
            text += f"\n\n{name}: before {before}, now {now}: not measured alike"
    alone = [key for key in dict.fromkeys([*old.points, *new.points]) if key not in ratios]
    if alone:
        text += f"\n\nleft out, not measured in both: {', '.join(alone)}"
    slower = f"{len(regressed)} slower by over {TOLERANCE:.0%}"
    return f"{text}\n\n{counted(len(shared), 'point')}, geometric mean {(mean or 1) - 1:+.1%}, {slower}", regressed


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table with aligned columns; all but the first are right-aligned."""
    rows = [list(row) for row in rows]
    widths = [max(len(cell) for cell in column) for column in zip(header, *rows, strict=True)]

    def line(cells: Sequence[str]) -> str:
        first, *rest = (
            cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in enumerate(zip(cells, widths, strict=True))
        )
        return "| " + " | ".join([first, *rest]) + " |"

    rule = "|" + "|".join("-" * (w + 2) if i == 0 else "-" * (w + 1) + ":" for i, w in enumerate(widths)) + "|"
    return "\n".join([line(header), rule, *map(line, rows)])


def _machine(results: Results) -> str:
    took = f"{sum(point.seconds for point in results.points.values()):.0f} s"
    facts = {**results.machine, **results.method, "points": f"{len(results.points)}, measured in {took}"}
    return "\n".join(f"{name}: {value}" for name, value in facts.items())


def _ceilings(results: Results) -> str:
    ceilings = results.ceilings
    dense = ", ".join(f"{rate:.0f} TFLOP/s ({size}³)" for size, rate in ceilings.dense_tflops.items())
    return f"ceilings: copy {ceilings.copy_tbps:.2f} TB/s, bulk read {ceilings.read_tbps:.2f} TB/s, cuBLAS bf16 {dense}"


def _table(results: Results, cases: list[Case]) -> str:
    """First what was taken in turns, then what was taken alone and the figures that compare with it."""
    first = cases[0]
    measured = list(dict.fromkeys(name for case in cases for name in results.points[case.key].timings))
    others = [name for name in measured if name not in (OURS, DENSE)]
    elsewhere = list(dict.fromkeys(name for case in cases for name in results.peers(case) if name != HUMMING))
    has_dense = DENSE in measured
    header = [first.scenario.unit, f"{OURS} µs", "20–80 %", *(f"{name} µs" for name in others)]
    header += [f"of {DENSE}"] if has_dense else []
    header += [f"{OURS} alone µs", "TFLOP/s", "TB/s", "floor µs", "of floor", *(f"{name} µs" for name in elsewhere)]
    rows = []
    for case in cases:
        point, alone, floor = results.points[case.key], results.alone_us(case), results.floor_us(case)
        timing = point.timings.get(OURS)
        row = [str(case.point), _us(results.us(case)), f"{timing.low:.1f}–{timing.high:.1f}" if timing else "failed"]
        row += [_us(results.us(case, name)) for name in others]
        row += [_percent(results.of_dense(case))] if has_dense else []
        row += [_us(alone)]
        row += [
            f"{case.flops / alone / 1e6:.0f}" if alone else "",
            f"{case.weight_bytes(point.active) / alone / 1e6:.2f}" if alone else "",
        ]
        row += [_us(floor), _percent(floor / alone if alone else None)]
        row += [_us(results.peers(case).get(name)) for name in elsewhere]
        rows.append([*row, _times(results.speedup(case)), _us(timing.host_us) if timing else ""])
    title = f"### {first.scenario.title}: {first.stage.value}"
    shape = f"{first.scenario.experts} experts, N = {first.n}, K = {first.k}"
    return f"{title}\n\n{shape}\n\n{table([*header, 'speed-up', 'host µs'], rows)}"


def _summary(results: Results) -> str:
    speedups = _speedups(results)
    if not speedups:
        return _total(results)
    rows = []
    for name, group in groupby(results.cases, key=lambda case: case.scenario.name):
        values = [speedups[case.key] for case in group if case.key in speedups]
        rows.append([name, str(len(values)), _times(geometric_mean(values)), _times(min(values, default=None))])
    rows.append(["all", str(len(speedups)), _times(geometric_mean(speedups.values())), _times(min(speedups.values()))])
    header = ["scenario", "points", "geometric mean", "least"]
    return f"### Speed-up over the better W4A16 peer\n\n{table(header, rows)}\n\n{_total(results)}"


def _total(results: Results) -> str:
    speedups = _speedups(results)
    if not speedups:
        return "no speed-up: no W4A16 peer was measured here, and the recorded figures hold for an H200 only"
    least = min(speedups, key=lambda key: speedups[key])
    mean = geometric_mean(speedups.values())
    return f"{len(speedups)} points, geometric mean {_times(mean)}, least {_times(speedups[least])} at {least}"


def _speedups(results: Results) -> dict[str, float]:
    return {case.key: found for case in results.cases if (found := results.speedup(case))}


def _failures(results: Results) -> str:
    lines = [
        f"- {key}: {name}: {reason}" for key, point in results.points.items() for name, reason in point.failures.items()
    ]
    return "### Failures\n\n" + "\n".join(lines) if lines else ""


def _peer(results: Results, name: str, case: Case) -> float | None:
    return results.peers(case).get(name)


def _list(values: Iterable[str]) -> str:
    return " / ".join(values)


def _us(value: float | None) -> str:
    return f"{value:.1f}" if value is not None else ""


def _percent(value: float | None) -> str:
    return f"{value:.0%}" if value is not None else ""


def _times(value: float | None) -> str:
    return f"{value:.2f} ×" if value is not None else ""
