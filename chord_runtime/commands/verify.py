"""``chord verify``: is a packed directory what was written, and is it its source?"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path

import click

from chord_runtime.units import human
from chord_runtime.verify import Verification
from chord_runtime.verify import verify as verify_directory

_SHOWN = 50


@click.command()
@click.argument("directory", type=click.Path(path_type=Path))
@click.option("--against", metavar="MODEL", help="Also unpack everything and compare it with this directory or Hub id.")
@click.option("--revision", help="Branch, tag or commit of --against on the Hub.")
@click.option("--token", help="Hub token. Default: HF_TOKEN, or that of `hf auth login`.")
@click.option("--workers", type=click.IntRange(1, 256), help="Threads. Default: one a processor.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
def verify(
    directory: Path, against: str | None, revision: str | None, token: str | None, workers: int | None, as_json: bool
) -> None:
    """Check every checksum of a packed DIRECTORY; with --against, prove it bit for bit from its source.

    Names each missing, surplus, truncated or altered file. Exit code 0: all as written; 1: not.
    """
    results = {"checksums": verify_directory(directory, workers)}
    if against is not None and not results["checksums"].findings:
        from chord_convert.against import compare

        results["against"] = compare(directory, against, revision, token, workers)
    if as_json:
        click.echo(json.dumps({name: asdict(result) for name, result in results.items()}, indent=1))
    else:
        _show(directory, results, against)
    if any(result.findings for result in results.values()):
        sys.exit(1)


def _show(directory: Path, results: dict[str, Verification], against: str | None) -> None:
    for name, result in results.items():
        for finding in result.findings[:_SHOWN]:
            click.echo(f"{finding.file}: {finding.problem}")
        if len(result.findings) > _SHOWN:
            click.echo(f"and {len(result.findings) - _SHOWN} more")
        rate = human(round(result.checked_bytes / max(result.seconds, 1e-9)))
        speed = f"{human(result.checked_bytes)} in {result.seconds:.1f} s ({rate}/s)"
        what = "as written" if name == "checksums" else f"equal to {against}, unpacked"
        verdict = f"{len(result.findings)} problems" if result.findings else f"every byte is {what}"
        click.echo(f"{directory}: {result.files} files, {result.tensors} tensors, {speed}: {verdict}")
    if against is not None and "against" not in results:
        click.echo(f"not compared with {against}: mend the checksums first (convert again)")
