"""``chord``: look at checkpoints and packed directories, measure kernels, and find out what is missing."""

from __future__ import annotations

import importlib

import click

from chord_runtime.console import FAILED, Console
from chord_runtime.version import VERSION

COMMANDS = {
    "validate": "Is this checkpoint one that Chord can convert?",
    "inspect": "What a packed directory holds: layers, ranks, modes, sizes, provenance.",
    "verify": "Check every checksum of a packed directory, or prove it against its source.",
    "bench": "Measure the kernels beside their peers.",
    "warmup": "Compile kernels ahead of their first use.",
    "doctor": "What is here, what is missing, and what to do about it.",
}

_VERDICTS, _UNKNOWN = ("validate", "verify"), 2
"""Commands whose exit code 1 is a verdict, and the code that stands for none."""


class _Commands(Console, click.Group):
    """Imports a command's module when it is called, so that ``chord --help`` needs neither torch nor CUDA."""

    unwritable = _UNKNOWN

    def told(self, error: BaseException, arguments: list[str]) -> tuple[str, int] | None:
        told = super().told(error, arguments)
        if told is not None and told[1] == FAILED and arguments[0] in _VERDICTS:
            return told[0], _UNKNOWN
        return told

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        command = getattr(importlib.import_module(f"chord_runtime.commands.{cmd_name}"), cmd_name)
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(VERSION, prog_name="chord")
def cli() -> None:
    """Kimi K2.x INT4 experts: look at checkpoints and packed directories, measure and prepare kernels.

    \b
    chord validate moonshotai/Kimi-K2-Thinking     headers and config only: seconds, no download
    chord inspect ./Kimi-K2-chord                   what a packed directory holds
    chord verify ./Kimi-K2-chord --against MODEL    proof that the bytes are the source's
    """


def main() -> None:
    """Run the group; a failure is told as ``console`` says."""
    cli()


if __name__ == "__main__":
    main()
