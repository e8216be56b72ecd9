"""How commands end that fail: every one of them in the same way."""

from __future__ import annotations

import errno
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result

from chord_convert.cli import cli as convert
from chord_runtime.cli import cli as chord
from chord_runtime.console import Console
from chord_runtime.errors import KernelError


def failing(error: BaseException, *arguments: str) -> Result:
    @click.command(cls=Console)
    @click.option("--json", "as_json", is_flag=True)
    def command(as_json: bool) -> None:
        raise error

    return CliRunner().invoke(command, arguments)


@pytest.mark.parametrize(
    ("number", "message"),
    [
        (errno.EMFILE, "error: some/file: Too many open files; raise the limit on open files (ulimit -n)\n"),
        (errno.ENAMETOOLONG, "error: some/file: File name too long; choose a shorter name"),
        (errno.EACCES, "error: some/file: Permission denied; check its permissions"),
        (errno.EIO, "error: some/file: Input/output error; check the path and its permissions"),
    ],
)
def test_errors_of_the_system_name_the_path(number: int, message: str) -> None:
    result = failing(OSError(number, os.strerror(number), "some/file"))
    assert (result.exit_code, result.stdout) == (1, "") and result.stderr.startswith(message)
    told = json.loads(failing(OSError(number, os.strerror(number), "some/file"), "--json").stdout)
    assert f"error: {told['error']}\n" == result.stderr and told["exit_code"] == 1


def test_a_directory_that_was_deleted_under_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    with pytest.raises(FileNotFoundError) as caught:
        Path("x").absolute()
    assert failing(caught.value).stderr.startswith("error: the current directory was deleted: change to one")


def test_bugs_are_no_errors_of_the_user() -> None:
    assert isinstance(failing(ZeroDivisionError()).exception, ZeroDivisionError)


@pytest.mark.parametrize(
    ("command", "arguments", "code"),
    [
        (chord, ["validate", "no/such/place"], 2),
        (chord, ["validate"], 2),
        (chord, ["verify", "nowhere"], 2),
        (chord, ["verify", "nowhere", "--workers", "0"], 2),
        (chord, ["inspect", "nowhere"], 1),
        (chord, ["inspect"], 2),
        (chord, ["warmup", "--arch", "sm_1"], 2),
        (chord, ["doctor", "--need", "luck"], 2),
        (convert, ["nowhere"], 2),
        (convert, ["no/such/place", "--ep", "2"], 2),
        (convert, ["x" * 300, "--ep", "2"], 1),
    ],
)
def test_with_json_an_error_is_json(command: click.Command, arguments: list[str], code: int) -> None:
    plain = CliRunner().invoke(command, arguments)
    assert (plain.exit_code, plain.stdout) == (code, "") and plain.stderr
    result = CliRunner().invoke(command, [*arguments, "--json"])
    told = json.loads(result.stdout)
    assert (result.exit_code, result.stderr, told["exit_code"]) == (code, "", code)
    assert told["error"] in plain.stderr


def test_kernels_that_fail_are_told_after_those_that_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise KernelError("no NVRTC")

    monkeypatch.setattr("chord_runtime.commands.warmup.warm_up", fail)
    result = CliRunner().invoke(chord, ["warmup", "--arch", "sm_90a", "--json"])
    assert json.loads(result.stdout.splitlines()[-1]) == {"error": "no NVRTC", "exit_code": 1}


@pytest.mark.parametrize(("command", "to", "code"), [("verify nowhere", "2>/dev/full", 2), ("doctor", "| true", 2)])
def test_nobody_reads(command: str, to: str, code: int) -> None:
    """A full stderr changes no exit code, and a reader of stdout that has gone is no verdict."""
    program = f"import sys; sys.argv[1:] = {command.split()!r}; from chord_runtime.cli import main; main()"
    shell = f"set -o pipefail; {sys.executable} -c {shlex.quote(program)} {to}"
    done = subprocess.run(["bash", "-c", shell], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (code, "", "")


@pytest.mark.parametrize(("command", "code"), [(["verify", "."], 130), (["inspect", "."], 130)])
def test_ctrl_c_is_no_verdict(command: list[str], code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("chord_runtime.format.metadata.Manifest.read", interrupt)
    result = CliRunner().invoke(chord, command)
    assert (result.exit_code, result.stderr.strip()) == (code, "error: interrupted")
