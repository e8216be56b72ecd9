"""``chord-convert``: a Kimi K2.x INT4 checkpoint becomes a packed directory."""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

import click

from chord_runtime.errors import ChordError, Unfinished, UsageError
from chord_runtime.format.layout import ALL_MODES, Mode, ParallelLayout, Placement
from chord_runtime.units import human
from chord_runtime.version import VERSION

DONE, FAILED, USAGE, UNFINISHED, INTERRUPTED = 0, 1, 2, 3, 130
_GO_ON = "Finished files are kept; the same command goes on from there."


def _parse_ranks(text: str | None) -> tuple[int, ...] | None:
    """``0,3-5`` → (0, 3, 4, 5)."""
    if text is None:
        return None
    ranks: set[int] = set()
    for piece in text.split(","):
        first, dash, last = piece.strip().partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()) or (dash and int(last) < int(first)):
            raise UsageError(f"--ranks {text}: found {piece!r}; supported: numbers and ranges such as 0,3-5")
        ranks.update(range(int(first), int(last if dash else first) + 1))
    return tuple(sorted(ranks))


def _parse_modes(names: tuple[str, ...]) -> tuple[Mode, ...]:
    return ALL_MODES if not names or "all" in names else tuple(mode for mode in ALL_MODES if mode.value in names)


@click.command(
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
    epilog="Exit codes: 0 done, 1 refused or failed, 2 wrong usage, 3 unfinished: run it again, 130 Ctrl-C.",
)
@click.argument("model")
@click.option(
    "--mode", "modes", multiple=True, type=click.Choice([*(mode.value for mode in ALL_MODES), "all"]),
    help="Operators the weights may be used with; repeatable. Default: all. The bytes are the same for each.",
)  # fmt: skip
@click.option("--ep", type=click.IntRange(1), help="Expert-parallel size: files are grouped for so many ranks.")
@click.option("--tp", type=click.IntRange(1), help="Tensor-parallel size: each expert is cut into so many slices.")
@click.option(
    "--placement", type=click.Choice([p.value for p in Placement]), default=Placement.LINEAR.value, show_default=True,
    help="Which experts a rank's files hold.",
)  # fmt: skip
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Directory. Default: NAME-chord-epN-tpM.")
@click.option("--ranks", help="Expert-parallel ranks to write, such as 0,3-5. Default: all.")
@click.option("--experts-only", is_flag=True, help="Leave out all tensors but the routed experts.")
@click.option("--revision", help="Branch, tag or commit on the Hub. Default: main.")
@click.option("--token", help="Hub token. Default: HF_TOKEN, or that of `hf auth login`.")
@click.option("--workers", type=click.IntRange(1, 256), default=2, show_default=True, help="Files written at a time.")
@click.option("--executor", type=click.Choice(["threads", "ray"]), default="threads", show_default=True)
@click.option("--address", help="Ray cluster to use (with --executor ray), such as auto. Default: one started here.")
@click.option("--part", help="i/n: do every n-th task from task i; auto: as the launcher's RANK and WORLD_SIZE say.")
@click.option("--dry-run", is_flag=True, help="Print the plan and stop.")
@click.option("--json", "as_json", is_flag=True, help="Print plan and result as JSON.")
@click.option("--log-json", is_flag=True, help="Write progress to stderr as JSON lines.")
@click.version_option(VERSION, prog_name="chord-convert")
def cli(**arguments: Any) -> None:
    """Pack the INT4 experts of MODEL, a directory or a Hub id, for Chord's kernels.

    Interrupted runs are resumed by the same command; a directory with a manifest is complete.

    \b
    Examples:
      chord-convert moonshotai/Kimi-K2-Thinking --ep 8 --dry-run
      chord-convert ./Kimi-K2.6 --ep 8 -o ./Kimi-K2.6-chord
      chord-convert moonshotai/Kimi-K2-Thinking --ep 16 --ranks 0-7 -o /data/node0
      chord-convert ./Kimi-K2.6 --ep 2 --tp 4 --mode masked --mode contiguous -o out
      srun -n 8 chord-convert /shared/Kimi-K2.6 --ep 8 -o /shared/out --part auto
    """
    sys.exit(_convert(**arguments))


def _convert(
    model: str, modes: tuple[str, ...], ep: int | None, tp: int | None, placement: str, output: Path | None,
    ranks: str | None, experts_only: bool, revision: str | None, token: str | None, workers: int, executor: str,
    address: str | None, part: str | None, dry_run: bool, as_json: bool, log_json: bool,
) -> int:  # fmt: skip
    from chord_convert.convert import convert, prepare
    from chord_convert.executors.parts import parse_part
    from chord_convert.plan import Options
    from chord_convert.progress import Progress

    if ep is None and tp is None:
        raise UsageError("say how the experts will be divided: --ep N, --tp N, or both (--ep 1 for a single GPU)")
    if address is not None and executor != "ray":
        raise UsageError("--address goes with --executor ray")
    layout = ParallelLayout(ep or 1, tp or 1, Placement(placement))
    options = Options(layout, _parse_modes(modes), _parse_ranks(ranks), experts_only)
    share = None if part is None else parse_part(part)
    prepared = prepare(model, options, revision, token)
    name = Path(prepared.source.identity.name).name
    directory = output or Path(f"{name}-chord-ep{layout.ep_size}-tp{layout.tp_size}")
    with prepared.source:
        for warning in prepared.warnings:
            click.echo(f"warning: {warning}", err=True)
        _show_plan(prepared.plan, directory, as_json, dry_run)
        if dry_run:
            return DONE
        progress = Progress(bar=sys.stderr.isatty() and not log_json, log=log_json)
        if executor == "ray":
            from chord_convert.executors import ray

            run = partial(ray.run, address=address, token=token)
            result = convert(prepared, directory, workers=workers, part=share, run=run, progress=progress)
        else:
            result = convert(prepared, directory, workers=workers, part=share, progress=progress)
    if progress.has_zero:
        click.echo("warning: some codes stand for −8, which Moonshot's files never use: re-quantized weights", err=True)
    _show_result(result, directory, as_json)
    return DONE


def _show_plan(plan: Any, directory: Path, as_json: bool, dry_run: bool) -> None:
    from chord_convert.convert import free_space

    free = free_space(directory)
    if as_json:
        if dry_run:
            click.echo(json.dumps({**plan.to_json(), "output": str(directory), "free_bytes": free}, indent=1))
        return
    for line in plan.lines():
        click.echo(line)
    enough = "" if free >= plan.write_bytes else "  NOT ENOUGH, unless an earlier run has written part of it"
    click.echo(f"writes    {human(plan.write_bytes)} to {directory}, where {human(free)} are free{enough}")


def _show_result(result: Any, directory: Path, as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps({"output": str(directory), **vars(result)}, indent=1))
        return
    kept = f", {human(result.kept_bytes)} were there" if result.kept_bytes else ""
    speed = f" in {result.seconds:.1f} s ({result.written_bytes / max(result.seconds, 1e-9) / 1e9:.2f} GB/s)"
    click.echo(f"written   {human(result.written_bytes)}{speed if result.written_bytes else ''}{kept}")
    if result.missing_files:
        left = f"{result.missing_files} files are left to other parts"
        click.echo(f"This part is done; {left}, the last of which finishes.")
    else:
        click.echo(f"finished  {directory}")


def main() -> None:
    """Run the command; errors are one line on stderr and an exit code, never a traceback."""
    try:
        cli(standalone_mode=False)
    except click.exceptions.Exit as stop:
        sys.exit(stop.exit_code)
    except click.ClickException as error:
        error.show()
        sys.exit(USAGE)
    except (KeyboardInterrupt, click.Abort):
        click.echo(f"Stopped. {_GO_ON}", err=True)
        sys.exit(INTERRUPTED)
    except UsageError as error:
        click.echo(f"error: {error}", err=True)
        sys.exit(USAGE)
    except Unfinished as error:
        click.echo(f"error: {error}\nUnfinished. {_GO_ON}", err=True)
        sys.exit(UNFINISHED)
    except ChordError as error:
        click.echo(f"error: {error}", err=True)
        sys.exit(FAILED)
