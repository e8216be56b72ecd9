"""``chord bench``: measure, or show what was measured."""

from __future__ import annotations

from dataclasses import replace
from functools import reduce
from pathlib import Path
from typing import TYPE_CHECKING, Generic, TypeVar

import click

from chord_runtime.bench.cases import Case, choose
from chord_runtime.bench.files import target
from chord_runtime.bench.plot import paths_of
from chord_runtime.bench.plot import plot as draw
from chord_runtime.bench.report import brief as brief_report
from chord_runtime.bench.report import compare as compare_results
from chord_runtime.bench.report import report
from chord_runtime.bench.results import OURS, Measurement, Results
from chord_runtime.errors import KernelError, UsageError

if TYPE_CHECKING:
    from chord_runtime.bench.layer import LayerCase, LayerResults

AnyResults = TypeVar("AnyResults", Results, "LayerResults")

_FULL_MS, _QUICK_MS = 300.0, 100.0
_TIMING = "L2 flushed before each call, median of CUDA events"


@click.command("bench")
@click.option(
    "--points", multiple=True, metavar="PATTERN", help="Only these, as masked/gate_up/8, 'tp8/*', decode. May repeat."
)
@click.option(
    "--quick", is_flag=True, help="First and last point of each scenario, shorter timing: less than a minute."
)
@click.option(
    "--layer",
    is_flag=True,
    help="Whole MoE layers, 1 to 16384 tokens; PATTERN is then ep8 or tp8 with a number of tokens, as ep8/64.",
)
@click.option("--no-peers", is_flag=True, help="Leave out Humming and torch; contiguous is still held against cuBLAS.")
@click.option(
    "--save",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write the results as JSON after each point, beside the points that the file has already.",
)
@click.option("--brief", is_flag=True, help="Print one row for each operation and projection.")
@click.option("--plot", type=click.Path(path_type=Path), metavar="STEM", help="Write STEM.png and STEM.svg.")
@click.option(
    "--from",
    "sources",
    multiple=True,
    type=click.Path(dir_okay=False, path_type=Path),
    help="Show saved results; needs no GPU. May repeat: the points of all files together.",
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
    brief: bool,
    plot: Path | None,
    sources: tuple[Path, ...],
    compare: Path | None,
    explain: bool,
) -> None:
    """Measure the three operations beside their peers, each point checked against the reference first.

    Tables give the median time, taken in turns with the peers and alone, TFLOP/s, TB/s of weight bytes, the share of
    the floor that the card's own ceilings set, and the least speed-up over Humming (measured here, when installed) and
    the published table of novitalabs/chord.
    """
    if explain:
        if any(value for name, value in context.params.items() if name != "explain"):
            raise UsageError("--explain measures and shows nothing else: leave out the other options")
        click.echo(_explain())
        return
    if layer and (plot or compare or brief):
        raise UsageError("--brief, --plot and --compare are for the three operations: leave out --layer")
    if sources and (points or quick or no_peers):
        raise UsageError(
            "--points, --quick and --no-peers say what is measured, and --from measures nothing: leave out one"
        )
    if save:
        target(save)
    if plot:
        paths_of(plot)
    if layer:
        _bench_layer(points, quick, not no_peers, save, sources)
        return
    before = Results.load(compare) if compare else None
    if sources:
        results = _together(Results, sources, save)
    else:
        results = _measure(choose(points, quick=quick), quick, not no_peers, save)
    click.echo(brief_report(results) if brief else report(results))
    if plot:
        click.echo("plotted: " + ", ".join(str(path) for path in draw(results, plot)))
    regressed: list[Case] = []
    if before:
        text, regressed = compare_results(before, results)
        click.echo(f"\n{text}")
    _fail_if_any(results)
    context.exit(1 if regressed else 0)


def _explain() -> str:
    """What selection chooses on the GPU that is here; on Hopper where there is none."""
    import torch

    from chord_runtime.cuda import select
    from chord_runtime.cuda.warmup import detected_archs

    return "\n\n".join(map(select.explain, detected_archs() if torch.cuda.device_count() else ["sm_90a"]))


def _bench_layer(
    points: tuple[str, ...], quick: bool, with_peers: bool, save: Path | None, sources: tuple[Path, ...]
) -> None:
    from chord_runtime.bench import layer

    if sources:
        results = _together(layer.LayerResults, sources, save)
    else:
        results = _measure_layer(points, quick, with_peers, save)
    click.echo(layer.report(results))
    _fail_if_any(results)


def _together(kind: type[AnyResults], sources: tuple[Path, ...], save: Path | None) -> AnyResults:
    """The points of all these files; saved beside those that ``save`` has."""
    results = reduce(lambda old, new: old.merged(new), map(kind.load, sources))
    if isinstance(results, Results) and not results.cases:
        names = ", ".join(map(str, sources))
        raise UsageError(f"{names}: no point that is known here; measure with `chord bench --save`")
    if save:
        _beside(save, results).save(save)
    return results


def _beside(path: Path | None, results: AnyResults) -> AnyResults:
    """The results, with those that the file has already."""
    return results if path is None or not path.exists() else type(results).load(path).merged(results)


def _fail_if_any(results: Results | LayerResults) -> None:
    if failed := [key for key, point in results.points.items() if OURS not in point.timings]:
        raise KernelError(f"{len(failed)} of {len(results.points)} points failed, the first {failed[0]}")


class _Saved(Generic[AnyResults]):
    """Takes each point as it is measured: tells it, and writes it beside those that the file has."""

    def __init__(self, empty: AnyResults, path: Path | None) -> None:
        self._results: AnyResults = _beside(path, empty)
        self._path = path

    def __call__(self, case: Case | LayerCase, point: Measurement) -> None:
        timing = point.timings.get(OURS)
        text = f"{timing.us:.1f} µs" if timing else point.failures.get(OURS, "failed")
        click.echo(f"{case.key}: {text} ({point.seconds:.1f} s)", err=True)
        if self._path:
            self._results.points[case.key] = point
            self._results.save(self._path)


def _measure_layer(points: tuple[str, ...], quick: bool, with_peers: bool, save: Path | None) -> LayerResults:
    from chord_runtime.bench import layer

    cases = layer.choose(points, quick=quick)
    _need_gpu()
    from chord_runtime.bench import humming
    from chord_runtime.bench.layer_peers import Humming, HummingVllm
    from chord_runtime.bench.run import machine
    from chord_runtime.bench.timing import CudaTimer

    peers: list[layer.LayerContender] = []
    if with_peers and humming.version():
        peers = [HummingVllm()] if HummingVllm.available() else [Humming()]
    budget_ms = _QUICK_MS if quick else _FULL_MS
    method = {"timing": f"CUDA graphs in turns, {_TIMING}, {budget_ms:.0f} ms each"}
    layer.compile_ahead(cases, peers)
    results = layer.LayerResults(machine(), method, {})
    found = layer.measure(cases, peers, CudaTimer(), "cuda", budget_ms, _Saved(results, save))
    click.echo(err=True)
    return replace(results, points=found)


def _need_gpu() -> None:
    import torch

    if not torch.cuda.is_available():
        raise UsageError(
            "chord bench needs a CUDA GPU and none is visible to torch; `chord doctor` shows what is missing, and "
            "`chord bench --from FILE` shows saved results"
        )


def _measure(cases: list[Case], quick: bool, with_peers: bool, save: Path | None) -> Results:
    _need_gpu()
    from chord_runtime.bench import humming
    from chord_runtime.bench.ceilings import measure_ceilings
    from chord_runtime.bench.contenders import Contender, Dense, Humming, TorchGrouped
    from chord_runtime.bench.run import compile_ahead, machine, measure
    from chord_runtime.bench.timing import CudaTimer

    contenders: list[Contender] = [Dense()]
    if with_peers:
        contenders = [*([Humming()] if humming.version() else []), TorchGrouped(), Dense()]
    budget_ms = _QUICK_MS if quick else _FULL_MS
    method = {
        "in turns": f"Chord, peers and cuBLAS one after another, {_TIMING}, {budget_ms:.0f} ms each",
        "alone": f"triton.testing.do_bench of 100 ms after a rest: {_TIMING}; ceilings too",
    }
    timer = CudaTimer()
    compile_ahead(cases, contenders)
    results = Results(machine(), method, measure_ceilings(timer), {})
    found = measure(cases, contenders, timer, "cuda", budget_ms, _Saved(results, save))
    click.echo(err=True)
    return replace(results, points=found)
