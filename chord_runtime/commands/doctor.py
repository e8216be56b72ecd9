"""``chord doctor``: what is there, what is missing, what to do."""

from __future__ import annotations

import json
from dataclasses import asdict

import click

from chord_runtime.cuda.doctor import Need, Status, examine, lacks

_MARKS = {Status.OK: "ok", Status.OPTIONAL: "-", Status.MISSING: "MISSING"}


@click.command("doctor")
@click.option("--json", "as_json", is_flag=True, help="Print the findings as JSON.")
@click.option(
    "--need",
    type=click.Choice([Need.KERNELS.value, Need.CONVERT.value]),
    default=Need.KERNELS.value,
    show_default=True,
    help="What the exit code speaks of: running the kernels, or only converting.",
)
@click.pass_context
def doctor(context: click.Context, as_json: bool, need: str) -> None:
    """Look at this machine. Exit code 0 if it has what is needed, 1 if something is missing."""
    findings = examine()
    missing = lacks(findings, Need(need))
    if as_json:
        click.echo(
            json.dumps({"need": need, "ready": not missing, "findings": [asdict(item) for item in findings]}, indent=2)
        )
    else:
        for item in findings:
            click.echo(f"{_MARKS[item.status]:8}{item.name:18}{item.found}")
            if item.advice:
                click.echo(f"{'':8}{'':18}→ {item.advice}")
        for purpose in (Need.CONVERT, Need.KERNELS):
            names = ", ".join(item.name for item in lacks(findings, purpose))
            click.echo(f"{purpose.value}: " + (f"not ready ({names})" if names else "ready"))
    context.exit(1 if missing else 0)
