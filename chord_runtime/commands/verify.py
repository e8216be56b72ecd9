"""``chord verify``: is a packed directory what was written, and is it its source?"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import click

from chord_runtime.format.files import mend
from chord_runtime.format.layout import MANIFEST
from chord_runtime.units import counted, human
from chord_runtime.verify import Verification
from chord_runtime.verify import verify as verify_directory

_SHOWN = 50
AS_WRITTEN, ALTERED, UNKNOWN = 0, 1, 2


@click.command(
    epilog="Exit codes: 0 all as written (and equal to the source), 1 not (each finding is printed), 2 could not tell "
    "(no manifest, nothing wrong but files that cannot be read, a source that cannot be read or is another model, or a "
    "wrong command line)."
)
@click.argument("directory", type=click.Path(path_type=Path))
@click.option("--against", metavar="MODEL", help="Also unpack everything and compare it with this directory or Hub id.")
@click.option("--revision", help="Branch, tag or commit of --against on the Hub.")
@click.option("--token", help="Hub token. Default: HF_TOKEN, or that of `hf auth login`.")
@click.option("--workers", type=click.IntRange(1, 256), help="Threads. Default: one a processor.")
@click.option("--json", "as_json", is_flag=True, help="Print the result, or the error, as JSON.")
@click.pass_context
def verify(
    context: click.Context,
    directory: Path,
    against: str | None,
    revision: str | None,
    token: str | None,
    workers: int | None,
    as_json: bool,
) -> None:
    """Check every checksum of a packed DIRECTORY; with --against, prove it bit for bit from its source.

    Names each missing, surplus, truncated or altered file.
    """
    results = _run(directory, against, revision, token, workers)
    if as_json:
        click.echo(json.dumps({name: asdict(result) for name, result in results.items()}, indent=1))
    else:
        _show(directory, results, against)
    findings = [finding for result in results.values() for finding in result.findings]
    wrong = any(not finding.unreadable for finding in findings)
    context.exit(ALTERED if wrong else UNKNOWN if findings else AS_WRITTEN)


def _run(
    directory: Path, against: str | None, revision: str | None, token: str | None, workers: int | None
) -> dict[str, Verification]:
    results = {"checksums": verify_directory(directory, workers)}
    if against is not None and not results["checksums"].findings:
        from chord_convert.against import compare

        results["against"] = compare(directory, against, revision, token, workers)
    return results


def _show(directory: Path, results: dict[str, Verification], against: str | None) -> None:
    for name, result in results.items():
        for finding in result.findings[:_SHOWN]:
            click.echo(f"{finding.file}: {finding.problem}")
        if len(result.findings) > _SHOWN:
            click.echo(f"and {len(result.findings) - _SHOWN} more")
        rate = human(round(result.checked_bytes / max(result.seconds, 1e-9)))
        count = f"{counted(result.files, 'file')}, {counted(result.tensors, 'tensor')}"
        speed = f"{human(result.checked_bytes)} in {result.seconds:.1f} s ({rate}/s)"
        what = "as written" if name == "checksums" else f"equal to {against}, unpacked"
        verdict = counted(len(result.findings), "problem") if result.findings else f"every byte is {what}"
        click.echo(f"{directory}: {count}, {speed}: {verdict}")
    if findings := results["checksums"].findings:
        unreadable = any(finding.unreadable for finding in findings)
        # Without the manifest nothing goes on.
        if any(finding.file != MANIFEST and not finding.unreadable for finding in findings):
            click.echo(f"to mend it, {mend('the files named')}" + (", save those that cannot be read" * unreadable))
        if unreadable:
            click.echo("files that cannot be read may be whole: keep them, do what their lines say, and verify again")
        if against is not None:
            click.echo(f"not compared with {against}: mend the files first")
