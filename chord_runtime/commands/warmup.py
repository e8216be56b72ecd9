"""``chord warmup``: compile the kernels before they are needed; with ``--check``, the gate that CI passes through."""

from __future__ import annotations

import json
import time

import click

from chord_runtime.cuda.compile import SHARED_LIMIT
from chord_runtime.cuda.warmup import Outcome, detected_archs, instantiations, warm_up
from chord_runtime.errors import KernelError


@click.command("warmup")
@click.option(
    "--arch",
    "archs",
    multiple=True,
    type=click.Choice(list(SHARED_LIMIT)),
    help="Target; may be repeated. Default: the GPUs here.",
)
@click.option("--jobs", type=click.IntRange(min=1), help="Compiles at once. Default: one for each core.")
@click.option(
    "--check",
    is_flag=True,
    help="Fail on serialised wgmma, spills, or shared memory over the limit; keeping the kernels is then optional.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object a kernel instead of the table.")
def warmup(archs: tuple[str, ...], jobs: int | None, check: bool, as_json: bool) -> None:
    """Compile every kernel that selection can choose into the disk cache. Needs no GPU when --arch is given."""
    started = time.perf_counter()
    outcomes = []
    work = instantiations(archs or detected_archs())
    if not as_json:
        click.echo(_row("kernel", "arch", "registers", "shared B", "spill B", "seconds", "from"))
    for outcome in warm_up(work, jobs=jobs, keep=not check):
        outcomes.append(outcome)
        click.echo(json.dumps(as_dict(outcome)) if as_json else _line(outcome))
    broken = [outcome for outcome in outcomes if outcome.cubin is None]
    flawed = [outcome for outcome in outcomes if outcome.problems]
    if not as_json:
        click.echo(f"{len(outcomes)} kernels in {time.perf_counter() - started:.1f} s")
    if broken or (check and flawed):
        first = (broken or flawed)[0]
        raise KernelError(f"{len(broken or flawed)} of {len(outcomes)} kernels failed; the first: {first.problems[0]}")


def as_dict(outcome: Outcome) -> dict[str, object]:
    """The outcome as JSON carries it."""
    facts: dict[str, object] = {"kernel": outcome.name, "arch": outcome.arch, "defines": dict(outcome.defines)}
    if cubin := outcome.cubin:
        facts |= {
            "registers": cubin.registers,
            "shared": cubin.static_shared + cubin.dynamic_shared,
            "spill_stores": cubin.spill_stores,
            "spill_loads": cubin.spill_loads,
            "stack": cubin.stack,
            "cached": cubin.cached,
        }
    return facts | {"seconds": round(outcome.seconds, 4), "problems": list(outcome.problems)}


def _line(outcome: Outcome) -> str:
    defines = (f"{key.removeprefix('CHORD_').lower()}={value}" for key, value in sorted(outcome.defines.items()))
    title = " ".join([outcome.name, *defines])
    cubin, seconds = outcome.cubin, f"{outcome.seconds:.2f}"
    if cubin is None:
        line = _row(title, outcome.arch, "-", "-", "-", seconds, "failed")
    else:
        spills = str(cubin.spill_stores + cubin.spill_loads)
        source = "cache" if cubin.cached else "NVRTC"
        line = _row(
            title,
            outcome.arch,
            str(cubin.registers),
            str(cubin.static_shared + cubin.dynamic_shared),
            spills,
            seconds,
            source,
        )
    return "\n".join([line, *(f"    {problem}" for problem in outcome.problems)])


def _row(title: str, arch: str, *cells: str) -> str:
    return f"{arch:8}" + "".join(f"{cell:>10}" for cell in cells) + f"  {title}"
