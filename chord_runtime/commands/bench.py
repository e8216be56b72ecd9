"""``chord bench``: measure, or show what was measured."""

from __future__ import annotations

import time
from pathlib import Path

import click

from chord_runtime.bench.cases import Case, choose
from chord_runtime.bench.report import compare as compare_results
from chord_runtime.bench.report import report
from chord_runtime.bench.results import OURS, Measurement, Results
from chord_runtime.errors import KernelError, UsageError

_FULL_MS, _QUICK_MS = 300.0, 100.0


@click.command("bench")
@click.option(
    "--points", multiple=True, metavar="PATTERN", help="Only these, as masked/gate_up/8, 'tp8/*', decode. May repeat."
)
@click.option("--quick", is_flag=True, help="First and last point of each scenario, shorter timing: about a minute.")
@click.option("--no-peers", is_flag=True, help="Time Chord alone.")
@click.option("--save", type=click.Path(dir_okay=False, path_type=Path), help="Write the results as JSON.")
@click.option("--plot", type=click.Path(path_type=Path), metavar="STEM", help="Write STEM.png and STEM.svg.")
@click.option(
    "--from", "source", type=click.Path(dir_okay=False, path_type=Path), help="Show saved results; needs no GPU."
)
@click.option(
    "--compare",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Saved results to hold these against; exit code 1 if slower.",
)
@click.pass_context
def bench(
    context: click.Context,
    points: tuple[str, ...],
    quick: bool,
    no_peers: bool,
    save: Path | None,
    plot: Path | None,
    source: Path | None,
    compare: Path | None,
) -> None:
    """Measure the three operations beside their peers, each point checked against the reference first.

    Tables give the median time, TFLOP/s, TB/s of weight bytes, the share of the floor that the card's own ceilings set,
    and the speed-up over the better of Humming (measured here, when installed) and the published table of
    novitalabs/chord.
    """
    before = Results.load(compare) if compare else None
    results = Results.load(source) if source else _measure(choose(points, quick=quick), quick, not no_peers)
    click.echo(report(results))
    if save:
        results.save(save)
    if plot:
        from chord_runtime.bench.plot import plot as draw

        click.echo("plotted: " + ", ".join(str(path) for path in draw(results, plot)))
    failed = [key for key, point in results.points.items() if OURS in point.failures]
    if failed:
        raise KernelError(f"{len(failed)} of {len(results.points)} points failed, the first {failed[0]}")
    if before:
        text, regressed = compare_results(before, results)
        click.echo(f"\n{text}")
        context.exit(1 if regressed else 0)


def _measure(cases: list[Case], quick: bool, with_peers: bool) -> Results:
    import torch

    if not torch.cuda.is_available():
        raise UsageError(
            "chord bench needs a CUDA GPU and none is visible to torch; `chord doctor` shows what is missing, and "
            "`chord bench --from FILE` shows saved results"
        )
    from chord_runtime.bench.ceilings import measure_ceilings
    from chord_runtime.bench.contenders import Contender, Humming, TorchGrouped
    from chord_runtime.bench.run import machine, measure
    from chord_runtime.bench.timing import CudaTimer

    peers: list[Contender] = []
    if with_peers:
        peers = [Humming(), TorchGrouped()] if Humming.version() else [TorchGrouped()]
    started = time.perf_counter()
    budget_ms = _QUICK_MS if quick else _FULL_MS
    timer = CudaTimer()
    ceilings = measure_ceilings(timer, budget_ms)
    found = measure(cases, peers, timer, "cuda", budget_ms, _progress)
    took = time.perf_counter() - started
    method = {
        "timing": f"median of CUDA events, L2 flushed before each call, contenders in turns, {budget_ms:.0f} ms each",
        "took": f"{took:.0f} s",
    }
    click.echo(err=True)
    return Results(machine(), method, ceilings, found)


def _progress(case: Case, point: Measurement) -> None:
    timing = point.timings.get(OURS)
    text = f"{timing.us:.1f} µs" if timing else point.failures.get(OURS, "failed")
    click.echo(f"{case.key}: {text}", err=True)
