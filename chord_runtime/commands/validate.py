"""``chord validate``: can this checkpoint be converted? Headers and config only, a few seconds over the Hub too."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from chord_runtime.errors import ChordError, UsageError
from chord_runtime.units import counted

if TYPE_CHECKING:
    from chord_convert.report import Problem
    from chord_convert.validate import Report

VALID, INVALID, UNKNOWN = 0, 1, 2


@click.command(
    "validate",
    epilog="Exit codes: 0 it can be converted, 1 it cannot (every reason is printed), 2 could not tell (the source "
    "cannot be read, or the command line is wrong).",
)
@click.argument("model")
@click.option("--revision", help="Branch, tag or commit on the Hub.  [default: main]")
@click.option("--token", envvar="HF_TOKEN", show_envvar=True, help="Token for private and gated repositories.")
@click.option("--scales", is_flag=True, help="Read the values of all scales too (about 5% of the checkpoint).")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option(
    "--github/--no-github",
    envvar="GITHUB_ACTIONS",
    help="Print problems as GitHub annotations.  [default: on in GitHub Actions]",
)
@click.pass_context
def validate(
    context: click.Context,
    model: str,
    revision: str | None,
    token: str | None,
    scales: bool,
    as_json: bool,
    github: bool,
) -> None:
    """Say whether MODEL, a Hub id or a directory, is an INT4 Kimi K2.x checkpoint that Chord can convert.

    Only config, index and headers are read: a few MB over the Hub. All problems are found in one run, one line each:
    file, key, what was found, what is supported, what to do next.

    \b
    chord validate moonshotai/Kimi-K2-Thinking
    chord validate ./my-requant --scales
    chord validate owner/private-model --revision v2 --token hf_… --json
    """
    try:
        report = _run(model, revision, token, scales)
    except ChordError as error:
        if as_json or not github:
            raise
        click.echo(f"::error title=chord validate::{_escape(str(error))}")
        context.exit(UNKNOWN)
    if as_json:
        click.echo(json.dumps(_as_dict(model, report, scales), indent=2))
    else:
        _print(model, report, scales, github)
    context.exit(INVALID if report.problems else VALID)


def _run(model: str, revision: str | None, token: str | None, scales: bool) -> Report:
    from tqdm import tqdm

    from chord_convert.source import open_source
    from chord_convert.validate import validate as check

    if revision is not None and Path(model).is_dir():
        raise UsageError(f"--revision goes with a Hub id; {model} is a directory, validated as it is")
    with (
        open_source(model, revision, token) as source,
        tqdm(unit="B", unit_scale=True, desc="scales", disable=None if scales else True, leave=False) as bar,
    ):
        return check(source, scales=scales, progress=bar.update)


def _print(model: str, report: Report, scales: bool, github: bool) -> None:
    for level, problems in (("error", report.problems), ("warning", report.warnings)):
        for problem in problems:
            click.echo(_annotation(level, problem) if github else f"{level}: {problem}")
    commit = f" at {report.identity.commit[:12]}" if report.identity.commit else ""
    if report.checkpoint is None:
        count = sum(1 + problem.more for problem in report.problems)
        click.echo(f"{model}{commit}: not convertible, {counted(count, 'problem')}")
        return
    found = report.checkpoint
    size = sum(tensor.nbytes for tensor in found.tensors.values())
    click.echo(
        f"{model}{commit}: valid. {len(found.layers)} MoE layers x {found.num_experts} experts, hidden {found.hidden}, "
        f"intermediate {found.intermediate}, top-{found.top_k}, {len(found.tensors):,} tensors, {size / 1e9:.2f} GB"
        + ("" if scales else "; scales not checked (--scales reads them)")
    )


def _as_dict(model: str, report: Report, scales: bool) -> dict[str, Any]:
    found = report.checkpoint
    return {
        "model": model,
        "valid": found is not None,
        "scales_checked": scales,
        "name": report.identity.name,
        "commit": report.identity.commit,
        "problems": [problem.as_dict() for problem in report.problems],
        "warnings": [problem.as_dict() for problem in report.warnings],
        "checkpoint": found
        and {
            "prefix": found.prefix,
            "layers": list(found.layers),
            "num_experts": found.num_experts,
            "hidden": found.hidden,
            "intermediate": found.intermediate,
            "top_k": found.top_k,
            "tensors": len(found.tensors),
            "bytes": sum(tensor.nbytes for tensor in found.tensors.values()),
        },
    }


def _annotation(level: str, problem: Problem) -> str:
    """A workflow command of GitHub Actions, which shows the problem at the file it names."""
    place = f"file={_escape(problem.file, ':,')}," if problem.file and "*" not in problem.file else ""
    return f"::{level} {place}title=chord validate%3A {_escape(problem.rule, ':,')}::{_escape(str(problem))}"


def _escape(text: str, more: str = "") -> str:
    for character in f"%\r\n{more}":
        text = text.replace(character, f"%{ord(character):02X}")
    return text
