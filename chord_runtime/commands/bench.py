"""``chord bench``: measure, or show what was measured."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from chord_runtime.bench.cases import Case, choose
from chord_runtime.bench.report import compare as compare_results
from chord_runtime.bench.report import report
from chord_runtime.bench.results import OURS, Measurement, Results
from chord_runtime.errors import KernelError, UsageError

if TYPE_CHECKING:
    from chord_runtime.bench.layer import LayerResults

_FULL_MS, _QUICK_MS = 300.0, 100.0


@click.command("bench")
@click.option(
    "--points", multiple=True, metavar="PATTERN", help="Only these, as masked/gate_up/8, 'tp8/*', decode. May repeat."
)
@click.option("--quick", is_flag=True, help="First and last point of each scenario, shorter timing: about a minute.")
@click.option(
    "--layer",
    is_flag=True,
    help="Whole MoE layers, 1 to 16384 tokens; PATTERN is then ep8 or tp8 with a number of tokens, as ep8/64.",
)
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
@click.option(
    "--explain", is_flag=True, help="Print which tile is chosen for which shape and rows, and why; measure nothing."
)
@click.pass_context
def bench(
    context: click.Context,
    points: tuple[str, ...],
    quick: bool,
    layer: bool,
    no_peers: bool,
    save: Path | None,
    plot: Path | None,
    source: Path | None,
    compare: Path | None,
    explain: bool,
) -> None:
    """Measure the three operations beside their peers, each point checked against the reference first.

    Tables give the median time, TFLOP/s, TB/s of weight bytes, the share of the floor that the card's own ceilings set,
    and the speed-up over the better of Humming (measured here, when installed) and the published table of
    novitalabs/chord.
    """
    if explain:
        click.echo(_explain())
        return
    if layer:
        if plot or compare:
            raise UsageError("--plot and --compare are for the three operations: leave out --layer")
        _bench_layer(points, quick, not no_peers, save, source)
        return
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


def _explain() -> str:
    """What selection chooses on the GPU that is here; on Hopper where there is none."""
    import torch

    from chord_runtime.cuda import select
    from chord_runtime.cuda.warmup import detected_archs

    return "\n\n".join(map(select.explain, detected_archs() if torch.cuda.device_count() else ["sm_90a"]))


def _bench_layer(
    points: tuple[str, ...], quick: bool, with_peers: bool, save: Path | None, source: Path | None
) -> None:
    from chord_runtime.bench import layer

    results = layer.LayerResults.load(source) if source else _measure_layer(points, quick, with_peers)
    click.echo(layer.report(results))
    if save:
        results.save(save)
    if failed := [key for key, point in results.points.items() if OURS in point.failures]:
        raise KernelError(f"{len(failed)} of {len(results.points)} points failed, the first {failed[0]}")


def _measure_layer(points: tuple[str, ...], quick: bool, with_peers: bool) -> LayerResults:
    from chord_runtime.bench import layer

    cases = layer.choose(points, quick=quick)
    _need_gpu()
    from chord_runtime.bench.contenders import Humming
    from chord_runtime.bench.layer_peers import HummingTorch, HummingVllm
    from chord_runtime.bench.run import machine
    from chord_runtime.bench.timing import CudaTimer

    peers: list[layer.LayerContender] = []
    if with_peers and Humming.version():
        peers = [HummingVllm()] if HummingVllm.available() else [HummingTorch()]
    started = time.perf_counter()
    budget_ms = _QUICK_MS if quick else _FULL_MS
    found = layer.measure(
        cases,
        peers,
        CudaTimer(),
        "cuda",
        budget_ms,
        lambda case, point: _progress(case.key, point),
    )
    method = {
        "timing": f"CUDA graphs in turns, L2 flushed before each, median of CUDA events, {budget_ms:.0f} ms each",
        "took": f"{time.perf_counter() - started:.0f} s",
    }
    return layer.LayerResults(machine(), method, found)


def _need_gpu() -> None:
    import torch

    if not torch.cuda.is_available():
        raise UsageError(
            "chord bench needs a CUDA GPU and none is visible to torch; `chord doctor` shows what is missing, and "
            "`chord bench --from FILE` shows saved results"
        )


def _measure(cases: list[Case], quick: bool, with_peers: bool) -> Results:
    _need_gpu()
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
    found = measure(cases, peers, timer, "cuda", budget_ms, lambda case, point: _progress(case.key, point))
    took = time.perf_counter() - started
    method = {
        "timing": f"median of CUDA events, L2 flushed before each call, contenders in turns, {budget_ms:.0f} ms each",
        "took": f"{took:.0f} s",
    }
    click.echo(err=True)
    return Results(machine(), method, ceilings, found)


def _progress(key: str, point: Measurement) -> None:
    timing = point.timings.get(OURS)
    text = f"{timing.us:.1f} µs" if timing else point.failures.get(OURS, "failed")
    click.echo(f"{key}: {text}", err=True)
