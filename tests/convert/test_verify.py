"""chord verify and chord inspect: what was altered is named, file by file."""

from __future__ import annotations

import errno
import io
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result
from safetensors.torch import load_file, save_file

from chord_convert.against import compare
from chord_runtime.cli import cli
from chord_runtime.errors import ChordError, FormatError, OutputError
from chord_runtime.format.layout import MANIFEST, PROGRESS
from chord_runtime.format.shard import read_shard_header
from chord_runtime.verify import verify
from tests.checkpoints import write_checkpoint
from tests.convert.helpers import options, run

EXPERTS = "experts-layer001-ep001of002-tp00of01-00.safetensors"
SHARED = "shared-00000.safetensors"


def chord(*arguments: str) -> Result:
    return CliRunner().invoke(cli, list(arguments))


@pytest.fixture
def copy(packed: Path, tmp_path: Path) -> Path:
    shutil.copytree(packed, tmp_path / "copy")
    return tmp_path / "copy"


def flip(file: str, at: int) -> Callable[[Path], None]:
    def change(directory: Path) -> None:
        with (directory / file).open("r+b") as opened:
            opened.seek(at, os.SEEK_SET if at >= 0 else os.SEEK_END)
            byte = opened.read(1)[0]
            opened.seek(-1, os.SEEK_CUR)
            opened.write(bytes([byte ^ 1]))

    return change


def dangle(directory: Path) -> None:
    (directory / "config.json").unlink()
    (directory / "config.json").symlink_to("gone")


@pytest.mark.parametrize(
    ("change", "file", "message"),
    [
        (flip(EXPERTS, -1), EXPERTS, "experts.7.down_proj.weight_packed: altered: XXH3-128"),
        (flip(EXPERTS, 4096 * 4), EXPERTS, "altered: XXH3-128"),
        (flip(SHARED, -1), SHARED, "altered: XXH3-128"),
        (flip(EXPERTS, 30), EXPERTS, "header"),
        (flip("tokenizer.json", 3), "tokenizer.json", "altered"),
        (flip("config.json", 3), "config.json", "altered"),
        (lambda d: os.truncate(d / EXPERTS, 60_000), EXPERTS, "60000 bytes where its header describes"),
        (lambda d: os.truncate(d / EXPERTS, 5), EXPERTS, "5 bytes"),
        (lambda d: (d / EXPERTS).unlink(), EXPERTS, "missing"),
        (lambda d: (d / EXPERTS).unlink(), EXPERTS, r"experts 4 to 7 (4) are in no valid file"),
        (lambda d: (d / "LICENSE").unlink(), "LICENSE", "missing"),
        (lambda d: (d / "extra.safetensors").touch(), "extra.safetensors", "surplus"),
        (lambda d: (d / "more").symlink_to("/"), "more", "surplus"),
        (
            lambda d: ((d / "config.json").unlink(), (d / "config.json").symlink_to("gone")),
            "config.json",
            "cannot be read",
        ),
        (
            lambda d: shutil.copy(d / EXPERTS.replace("ep001", "ep000"), d / EXPERTS),
            EXPERTS,
            "the header is not the one that the manifest records",
        ),
    ],
)
def test_what_was_altered_is_named(copy: Path, change: Callable[[Path], None], file: str, message: str) -> None:
    change(copy)
    findings = verify(copy).findings
    assert any(finding.file == file and message in finding.problem for finding in findings), findings
    assert {finding.file for finding in findings} == {file}
    result = chord("verify", str(copy))
    assert result.exit_code == 1
    assert file in result.output
    assert "delete the files named, then run chord-convert again with the same options" in result.output


def test_a_good_directory(packed: Path, model: Path) -> None:
    result = chord("verify", str(packed), "--against", str(model))
    assert result.exit_code == 0, result.output
    assert "every byte is as written" in result.output
    assert "unpacked" in result.output
    data = json.loads(chord("verify", str(packed), "--json").stdout)
    sizes = sum(path.stat().st_size for path in packed.iterdir() if path.name != MANIFEST)
    assert data["checksums"]["checked_bytes"] == sizes


@pytest.mark.parametrize("kind", ["weight_packed", "weight_scale"])
@pytest.mark.parametrize("module", ["gate_proj", "up_proj", "down_proj"])
def test_one_bit_of_the_source_is_seen(packed: Path, tmp_path: Path, kind: str, module: str) -> None:
    model = write_checkpoint(tmp_path / "model")
    assert compare(packed, str(model)).findings == ()
    file = sorted(model.glob("model-*"))[2]
    tensors = load_file(file)
    name = f"model.layers.2.mlp.experts.5.{module}.{kind}"
    tensors[name].view(-1).view(torch.int16)[-1] ^= 1
    save_file(tensors, file)
    (finding,) = compare(packed, str(model)).findings
    assert finding.file == "experts-layer002-ep001of002-tp00of01-00.safetensors"
    assert f"experts.5.{module}" in finding.problem


def test_other_tensors_are_compared(packed: Path, tmp_path: Path) -> None:
    model = write_checkpoint(tmp_path / "model")
    file = sorted(model.glob("model-*"))[0]
    tensors = load_file(file)
    tensors["model.layers.0.mlp.up_proj.weight"][1, 1] += 1
    save_file(tensors, file)
    (finding,) = compare(packed, str(model)).findings
    assert finding.file == SHARED
    assert "model.layers.0.mlp.up_proj.weight: differs" in finding.problem


def test_against_another_model(packed: Path, tmp_path: Path) -> None:
    other = write_checkpoint(tmp_path / "other", experts=16)
    with pytest.raises(FormatError, match="it is not this directory's source"):
        compare(packed, str(other))


def test_unfinished_and_foreign_directories(copy: Path, tmp_path: Path) -> None:
    (copy / MANIFEST).unlink()
    (tmp_path / "file").touch()
    for path, message in (
        (copy, f"{copy} has no {MANIFEST}: it is not a packed directory, or its conversion has not finished"),
        (tmp_path / "file", f"{tmp_path}/file is not a directory; supported: one that chord-convert has made: check"),
        (tmp_path / "nowhere", f"{tmp_path}/nowhere is not a directory"),
    ):
        for command, code in (("inspect", 1), ("verify", 2)):
            result = chord(command, str(path))
            assert result.exit_code == code and result.stderr.startswith(f"error: {message}")


def test_an_interrupted_conversion_is_named_with_its_command(model: Path, tmp_path: Path) -> None:
    """By the directory alone: what is told, with the source's place, is what goes on."""
    out = tmp_path / "out"
    command = [sys.executable, "-m", "chord_convert", str(model), "-o", str(out)]
    asked = ["--ep", "4", "--tp", "2", "--placement", "round_robin", "--mode", "masked", "--ranks", "0,2"]
    assert subprocess.run([*command, *asked, "--experts-only", "--part", "0/8"], check=False).returncode == 0
    assert not (out / MANIFEST).exists()
    for name, code in (("inspect", 1), ("verify", 2)):
        result = chord(name, str(out))
        assert result.exit_code == code
        assert result.stderr.startswith(f"error: {out} is unfinished: its conversion was interrupted, or")
    begun = result.stderr.split("it was begun as: ")[1].split()
    assert begun[:2] == ["chord-convert", model.name] and begun[-2:] == ["-o", str(out)]
    assert subprocess.run([*command, *begun[2:-2]], check=False).returncode == 0
    assert chord("inspect", str(out)).exit_code == 0


@pytest.mark.parametrize("record", ["", "[]", "{}", '{"packing": {}}'])
def test_a_record_that_says_nothing_is_no_crash(tmp_path: Path, record: str) -> None:
    (tmp_path / PROGRESS).write_text(record)
    assert "its conversion has not finished" in chord("inspect", str(tmp_path)).stderr


@pytest.mark.parametrize("name", [EXPERTS, SHARED, "config.json", MANIFEST])
def test_what_cannot_be_read_is_not_called_wrong(copy: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    os_open, io_open = os.open, io.open

    def opening(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(path: Any, *rest: Any, **more: Any) -> Any:
            if str(path) == str(copy / name):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
            return real(path, *rest, **more)

        return call

    monkeypatch.setattr(os, "open", opening(os_open))
    monkeypatch.setattr(io, "open", opening(io_open))
    (finding,) = verify(copy).findings
    assert (finding.file, finding.unreadable) == (name, True)
    result = chord("verify", str(copy))
    assert result.exit_code == 2
    assert "Permission denied; check its permissions" in result.output
    assert "files that cannot be read may be whole: keep them" in result.output
    assert "delete" not in result.output
    if name != MANIFEST:
        (copy / "LICENSE").unlink()
        result = chord("verify", str(copy))
        assert result.exit_code == 1
        assert "to mend it, delete the files named, then run chord-convert again" in result.output
        assert ", save those that cannot be read\nfiles that cannot be read may be whole: keep them" in result.output


def test_a_source_that_cannot_be_compared_with(packed: Path, tmp_path: Path) -> None:
    result = chord("verify", str(packed), "--against", str(tmp_path / "nowhere"), "--json")
    assert result.exit_code == 2 and str(tmp_path / "nowhere") in json.loads(result.stdout)["error"]


def test_an_interrupted_run_does_not_say_altered(packed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("chord_runtime.commands.verify.verify_directory", interrupt)
    assert chord("verify", str(packed)).exit_code == 130


def test_a_directory_in_place_of_a_shard(copy: Path, model: Path) -> None:
    """One clear error, and no work is done before it: also where the rest of the directory is unfinished."""
    (copy / EXPERTS).unlink()
    (copy / EXPERTS).mkdir()
    assert f"{EXPERTS}: a directory stands in its place" in chord("verify", str(copy)).output
    message = f"{EXPERTS} is a directory where a file of the conversion belongs: move it away"
    with pytest.raises(OutputError, match=message):
        run(model, copy)
    (copy / MANIFEST).unlink()
    with pytest.raises(OutputError, match=message):
        run(model, copy)


def make_directory(directory: Path) -> None:
    (directory / MANIFEST).unlink()
    (directory / MANIFEST).mkdir()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda d: flip(MANIFEST, 40)(d), MANIFEST),
        (lambda d: flip(MANIFEST, -40)(d), MANIFEST),
        (make_directory, "cannot be read: Is a directory"),
        (lambda d: (d / MANIFEST).write_bytes(b"\xff\xfe\xff"), "is not JSON"),
    ],
)
def test_an_altered_manifest_is_a_finding(copy: Path, damage: Callable[[Path], None], message: str) -> None:
    damage(copy)
    (finding,) = verify(copy).findings
    assert finding.file == MANIFEST and message in finding.problem
    result = chord("verify", str(copy))
    assert result.exit_code == 1 and "1 problem" in result.output and "1 problems" not in result.output
    assert str(copy / MANIFEST) in chord("inspect", str(copy)).stderr


def test_a_file_is_opened_once_for_its_header_and_once_for_its_data(
    packed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[str] = []
    os_open = os.open

    def counting(path: str, *rest: int) -> int:
        opened.append(Path(path).name)
        return os_open(path, *rest)

    monkeypatch.setattr(os, "open", counting)
    assert verify(packed).findings == ()
    assert sorted(opened) == sorted(path.name for path in packed.glob("*.safetensors"))


def test_inspect(model: Path, tmp_path: Path) -> None:
    run(model, tmp_path / "out", options(4, 2, ranks=(0, 2)))
    text = chord("inspect", str(tmp_path / "out")).output
    for part in ("ep 4 × tp 2, linear", "8 experts each", "contiguous, masked, indexed", "model, commit not known"):
        assert part in text
    data = json.loads(chord("inspect", str(tmp_path / "out"), "--json").stdout)
    assert [(rank["ep_rank"], rank["tp_rank"], rank["experts"]) for rank in data["ranks"]] == [
        (0, 0, [0, 1]), (0, 1, [0, 1]), (2, 0, [4, 5]), (2, 1, [4, 5])
    ]  # fmt: skip
    assert data["expert_bytes"] == sum(path.stat().st_size for path in (tmp_path / "out").glob("experts-*"))
    assert data["expert_bytes"] == sum(rank["bytes"] for rank in data["ranks"])


def test_nothing_advises_to_delete_the_manifest(copy: Path) -> None:
    """Without it, whole shards are of no use to anyone."""
    manifest = copy / MANIFEST
    manifest.write_bytes(manifest.read_bytes()[:-100])
    result = chord("verify", str(copy))
    assert result.exit_code == 1 and MANIFEST in result.output
    assert "to mend it" not in result.output


def test_shards_without_a_manifest_are_told_apart_from_foreign_files(copy: Path, model: Path) -> None:
    (copy / MANIFEST).unlink()
    with pytest.raises(ChordError, match="bring the manifest back from a copy"):
        run(model, copy)


def test_a_shard_that_cannot_be_opened_is_not_called_damaged(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Path, *args: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(FormatError, match="Permission denied; check its permissions"):
        read_shard_header(next(copy.glob("experts-*")))


def test_a_full_stdout_is_one_line(packed: Path) -> None:
    command = [sys.executable, "-c", "from chord_runtime.cli import main; main()", "inspect", str(packed)]
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 2 and done.stderr == "error: stdout cannot be written: No space left on device\n"
