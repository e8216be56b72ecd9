"""How a command ends that fails: one line on stderr or, with ``--json``, one object on stdout; never a traceback."""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import click

from chord_runtime.errors import ChordError, advice

FAILED, INTERRUPTED = 1, 130


class Console(click.Command):
    """To be mixed into a command or group. With ``--json``, errors have the keys ``error`` and ``exit_code``."""

    unwritable = FAILED
    """Exit code when stdout cannot be written."""

    def told(self, error: BaseException, arguments: list[str]) -> tuple[str, int] | None:
        """Message and exit code for what ends the command; None for a bug, which is raised again."""
        if isinstance(error, click.ClickException):
            return error.format_message(), error.exit_code
        if isinstance(error, click.Abort):
            return "interrupted", INTERRUPTED
        if isinstance(error, ChordError):
            return str(error), FAILED
        if isinstance(error, OSError):
            return _describe(error), FAILED
        return None

    def invoke(self, ctx: click.Context) -> Any:
        """See click, which would end with 1 if nobody reads stdout any more."""
        try:
            return super().invoke(ctx)
        except BrokenPipeError:
            sys.exit(self.unwritable)

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        **extra: Any,
    ) -> Any:
        """See click; a failure is told as this module says."""
        if not standalone_mode:
            return super().main(args, prog_name, complete_var, False, **extra)
        arguments = list(sys.argv[1:] if args is None else args)
        code: Any = None
        try:
            try:
                code = super().main(arguments, prog_name, complete_var, False, **extra)
            except BaseException as error:
                if isinstance(error, OSError) and _is_of_echo(error):
                    raise
                told = self.told(error, arguments)
                if told is None:
                    raise
                message, code = told
                if "--json" in arguments:
                    click.echo(json.dumps({"error": message, "exit_code": code}))
                else:
                    with suppress(OSError):  # a full stderr changes no exit code
                        error.show() if isinstance(error, click.ClickException) else _tell(message)
        except OSError as error:
            # What is left in the buffer cannot be written either, and Python would say so at its end.
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            code = self.unwritable
            with suppress(OSError):
                _tell(f"stdout cannot be written: {error.strerror or error}")
        sys.exit(code)


def _tell(message: str) -> None:
    click.echo(f"error: {message}", err=True)


def _is_of_echo(error: OSError) -> bool:
    """Whether it is stdout that failed: the error does not say."""
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    return frame.f_code is click.echo.__code__


def _describe(error: OSError) -> str:
    try:
        Path.cwd()
    except OSError:
        return "the current directory was deleted: change to one that exists, and run again"
    where = "" if error.filename is None else f"{os.fsdecode(error.filename)}: "
    return f"{where}{error.strerror or error}; {advice(error, 'check the path and its permissions')}"
