"""``chord-convert``: a Kimi K2.x INT4 checkpoint becomes a packed directory."""

from __future__ import annotations

import json
import os
import signal
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click

from chord_runtime.console import INTERRUPTED, Console
from chord_runtime.errors import Unfinished, UsageError
from chord_runtime.format.layout import ALL_MODES, Mode, ParallelLayout, Placement
from chord_runtime.units import counted, human
from chord_runtime.version import VERSION

if TYPE_CHECKING:
    from chord_convert.convert import Result
    from chord_convert.plan import Plan

DONE, USAGE, UNFINISHED, TERMINATED = 0, 2, 3, 143
_GO_ON = "The same command goes on from the files that are finished."


class _Terminated(BaseException):
    """SIGTERM."""


class _Command(Console):
    def told(self, error: BaseException, arguments: list[str]) -> tuple[str, int] | None:
        match error:
            case click.Abort():
                return f"stopped. {_GO_ON}", INTERRUPTED
            case _Terminated():
                return f"terminated. {_GO_ON}", TERMINATED
            case UsageError():
                return str(error), USAGE
            case Unfinished():
                return f"{error}\nUnfinished. {_GO_ON}", UNFINISHED
        return super().told(error, arguments)


def _parse_ranks(text: str | None, size: int) -> tuple[int, ...] | None:
    """``0,3-5`` → (0, 3, 4, 5). Of ranks beyond ``size``, which the plan refuses, only those named are kept."""
    if text is None:
        return None
    ranks: set[int] = set()
    for piece in text.split(","):
        first, dash, last = piece.strip().partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()) or (dash and int(last) < int(first)):
            raise UsageError(f"--ranks {text}: found {piece!r}; supported: numbers and ranges such as 0,3-5")
        begin, end = int(first), int(last if dash else first)
        ranks.update((begin, end), range(begin, min(end, size)))
    return tuple(sorted(ranks))


def _parse_modes(names: tuple[str, ...]) -> tuple[Mode, ...]:
    return ALL_MODES if not names or "all" in names else tuple(mode for mode in ALL_MODES if mode.value in names)


@click.command(
    cls=_Command,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
    epilog="Exit codes: 0 done, 1 refused or failed, 2 wrong usage, 3 unfinished (no space, a failing "
    "disk or network): run it again, 130 Ctrl-C, 143 SIGTERM.",
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
@click.option("-o", "--output", help="Directory. Default: NAME-chord-epN-tpM.")
@click.option("--ranks", help="Expert-parallel ranks to write, such as 0,3-5; may be extended later. Default: all.")
@click.option("--experts-only", is_flag=True, help="Leave out all tensors but the routed experts.")
@click.option("--revision", help="Branch, tag or commit on the Hub. Default: main.")
@click.option("--token", help="Hub token. Default: HF_TOKEN, or that of `hf auth login`.")
@click.option("--workers", type=click.IntRange(1, 256), default=2, show_default=True, help="Files written at a time.")
@click.option("--executor", type=click.Choice(["threads", "ray"]), default="threads", show_default=True)
@click.option("--address", help="Ray cluster to use (with --executor ray), such as auto. Default: one started here.")
@click.option("--part", help="i/n: do every n-th task from task i; auto: as torchrun, srun, mpirun "
              "or an indexed Kubernetes job say.")  # fmt: skip
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
    model: str, modes: tuple[str, ...], ep: int | None, tp: int | None, placement: str, output: str | None,
    ranks: str | None, experts_only: bool, revision: str | None, token: str | None, workers: int, executor: str,
    address: str | None, part: str | None, dry_run: bool, as_json: bool, log_json: bool,
) -> int:  # fmt: skip
    from chord_convert.convert import Run, convert, free_space, prepare
    from chord_convert.executors import threads
    from chord_convert.executors.parts import parse_part
    from chord_convert.plan import Options
    from chord_convert.progress import Progress

    if ep is None and tp is None:
        raise UsageError("say how the experts will be divided: --ep N, --tp N, or both (--ep 1 for a single GPU)")
    if address is not None and executor != "ray":
        raise UsageError("--address goes with --executor ray")
    if output == "":
        raise UsageError("-o: found an empty name; supported: a directory, new or of an earlier run")
    if revision is not None and Path(model).is_dir():
        raise UsageError(f"--revision goes with a Hub id; {model} is a directory, converted as it is")
    if token is not None and Path(model).is_dir():
        click.echo(f"warning: --token is not used: {model} is a directory", err=True)
    layout = ParallelLayout(ep or 1, tp or 1, Placement(placement))
    options = Options(layout, _parse_modes(modes), _parse_ranks(ranks, layout.ep_size), experts_only)
    share = None if part is None else parse_part(part)
    run: Run = threads.run
    if executor == "ray":
        from chord_convert.executors import ray

        ray.require()
        run = partial(ray.run, address=address, token=token)
    prepared = prepare(model, options, revision, token)
    name = Path(prepared.source.identity.name).name
    directory = Path(output or f"{name}-chord-ep{layout.ep_size}-tp{layout.tp_size}")
    free = free_space(directory)
    with prepared.source:
        for warning in prepared.warnings:
            click.echo(f"warning: {warning}", err=True)
        if not as_json:
            _show_plan(prepared.plan, directory, free)
        result = None
        if not dry_run:
            terminal = sys.stderr.isatty()
            progress = Progress(bar=terminal and not log_json, log=log_json, lines=not terminal)
            result = convert(prepared, directory, workers=workers, part=share, run=run, progress=progress)
            if progress.has_zero:
                click.echo(
                    "warning: some codes stand for −8, which Moonshot's never do: re-quantized weights", err=True
                )
    if as_json:
        done = {} if result is None else vars(result)
        plan = prepared.plan.to_json()
        click.echo(json.dumps({**plan, "output": str(directory), "free_bytes": free, **done}, indent=1))
    elif result is not None:
        _show_result(result, directory)
    return DONE


def _show_plan(plan: Plan, directory: Path, free: int) -> None:
    for line in plan.lines():
        click.echo(line)
    enough = "" if free >= plan.write_bytes else "  NOT ENOUGH, unless an earlier run has written part of it"
    click.echo(f"writes    {human(plan.write_bytes)} to {directory}, where {human(free)} are free{enough}")


def _show_result(result: Result, directory: Path) -> None:
    kept = f", {human(result.kept_bytes)} were there" if result.kept_bytes else ""
    speed = f" in {result.seconds:.1f} s ({result.written_bytes / max(result.seconds, 1e-9) / 1e9:.2f} GB/s)"
    click.echo(f"written   {human(result.written_bytes)}{speed if result.written_bytes else ''}{kept}")
    if result.missing_files:
        left = f"left to other parts: {counted(result.missing_files, 'file')}"
        click.echo(f"This part is done; {left}. The last part finishes.")
    else:
        click.echo(f"finished  {directory}")


def _terminate(*_: object) -> NoReturn:
    raise _Terminated


def _leave(code: int, *_: object) -> NoReturn:
    os._exit(code)


def main() -> None:
    """Run the command; a failure is told as ``chord_runtime.console`` says."""
    signal.signal(signal.SIGTERM, _terminate)
    try:
        cli()
    finally:
        # Python now waits for threads that still write. One more signal ends that too; what they leave behind is
        # removed by the next run.
        for number, code in ((signal.SIGINT, INTERRUPTED), (signal.SIGTERM, TERMINATED)):
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, partial(_leave, code))


if __name__ == "__main__":
    main()
