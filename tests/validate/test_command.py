"""``chord validate`` as people, scripts and CI run it: exit codes, JSON, annotations, the Hub by environment."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from chord_runtime.cli import cli
from tests.hub_server import HubServer
from tests.validate.editing import Editor


def run(*arguments: str, **environment: str) -> Result:
    return CliRunner().invoke(cli, ["validate", *arguments], env={"GITHUB_ACTIONS": None, **environment})


def test_valid(flat: Editor) -> None:
    result = run(str(flat.path))
    assert result.exit_code == 0
    assert result.output == (
        f"{flat.path}: valid. 2 MoE layers x 4 experts, hidden 128, intermediate 64, top-2, 115 tensors, 0.00 GB; "
        "scales not checked (--scales reads them)\n"
    )
    assert run(str(flat.path), "--scales").exit_code == 0


def test_invalid(flat: Editor) -> None:
    flat.weights(group_size=128)
    flat.group(targets=["MoE"])
    result = run(str(flat.path))
    assert result.exit_code == 1
    first, second, last = result.output.splitlines()
    assert first.startswith(
        "error: config.json: quantization_config.config_groups.group_0.weights.group_size: found 128"
    )
    assert "; supported: groups of 32. Re-quantize with group_size 32, or use Moonshot's" in first
    assert second.startswith("error: config.json: quantization_config.config_groups.group_0.targets: found")
    assert last == f"{flat.path}: not convertible, 2 problems"


def test_warnings_do_not_fail(flat: Editor) -> None:
    flat.tensors(lambda tensors: tensors.pop("lm_head.weight"))
    result = run(str(flat.path))
    assert result.exit_code == 0
    assert result.output.startswith("warning: model.safetensors.index.json: lm_head.weight: found no such tensor")


@pytest.mark.parametrize("form", ["text", "json", "github"])
def test_could_not_tell(form: str, tmp_path: Path) -> None:
    flags = {"text": [], "json": ["--json"], "github": ["--github"]}[form]
    result = run(str(tmp_path / "no" / "such" / "place"), *flags)
    assert result.exit_code == 2
    said = "neither a directory nor a Hub id like owner/name"
    if form == "json":
        parsed = json.loads(result.stdout)
        assert parsed["exit_code"] == 2
        assert said in parsed["error"]
    elif form == "github":
        assert result.stdout.startswith("::error title=chord validate::")
    else:
        assert result.stderr.startswith("error: ")
        assert said in result.stderr


def test_an_unreadable_file_is_not_an_invalid_checkpoint(flat: Editor, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> int:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "preadv", fail)
    result = run(str(flat.path))
    assert result.exit_code == 2
    assert "Input/output error (errno 5)" in result.stderr


def test_ctrl_c_is_not_a_verdict(flat: Editor, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "preadv", interrupt)
    assert run(str(flat.path)).exit_code == 130


def test_json(flat: Editor) -> None:
    result = run(str(flat.path), "--json")
    assert result.exit_code == 0
    parsed = json.loads(result.stdout)
    assert parsed["valid"] is True
    assert parsed["checkpoint"]["layers"] == [1, 2]
    assert parsed["checkpoint"]["tensors"] == 115
    assert parsed["problems"] == parsed["warnings"] == []
    flat.weights(num_bits=8)
    result = run(str(flat.path), "--json")
    assert result.exit_code == 1
    parsed = json.loads(result.stdout)
    assert parsed["checkpoint"] is None
    assert parsed["problems"] == [
        {
            "rule": "num-bits",
            "file": "config.json",
            "key": "quantization_config.config_groups.group_0.weights.num_bits",
            "found": "8",
            "supported": "4 bits",
            "next_step": "Use Moonshot's INT4 checkpoint, or one quantized like it.",
            "more": 0,
        }
    ]


def test_github_annotations(flat: Editor) -> None:
    flat.group(targets=["100%", "a,b:c"])
    for result in (run(str(flat.path), "--github"), run(str(flat.path), GITHUB_ACTIONS="true")):
        assert result.exit_code == 1
        line = result.stdout.splitlines()[0]
        assert line.startswith("::error file=config.json,title=chord validate%3A targets::config.json: ")
        assert '["100%25", "a,b:c"]' in line
    assert not run(str(flat.path), "--no-github", GITHUB_ACTIONS="true").output.startswith("::")


def test_help_has_examples_and_exit_codes() -> None:
    text = " ".join(run("--help").output.split())
    assert "chord validate moonshotai/Kimi-K2-Thinking" in text
    assert re.search(r"Exit codes: 0 .* 1 .* 2 ", text)


# -- a process of its own, pointed at a Hub by its environment -------------------------------------------------


@pytest.fixture
def server(flat: Editor) -> Iterator[HubServer]:
    with HubServer() as server:
        server.add("me/model", flat.path)
        server.add("me/private", flat.path, token="hf_secret")
        server.add("me/gated", flat.path, token="hf_secret", gated=True)
        yield server


def chord(server: HubServer, home: Path, *arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("HF_", "HUGGING", "GITHUB"))}
    return subprocess.run(
        [sys.executable, "-c", "from chord_runtime.cli import main; main()", "validate", *arguments],
        env={**environment, **server.client_environment(home), **more},
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_the_environment_is_honoured(server: HubServer, flat: Editor, tmp_path: Path) -> None:
    home = tmp_path / "home"
    done = chord(server, home, "me/model")
    assert (done.returncode, done.stderr) == (0, "")
    commit = server.repositories["me/model"].commit
    assert done.stdout.startswith(f"me/model at {commit[:12]}: valid. 2 MoE layers x 4 experts")
    assert (home / "hub" / "models--me--model" / "snapshots" / commit / "config.json").exists()

    done = chord(server, home, "me/private")
    assert done.returncode == 2
    assert re.match(r"error: me/private: no such repository, or it is private \(HTTP 401\); .*HF_TOKEN", done.stderr)
    assert chord(server, home, "me/private", HF_TOKEN="hf_secret").returncode == 0
    assert chord(server, home, "me/private", "--token", "hf_secret").returncode == 0
    done = chord(server, home, "me/gated")
    assert done.returncode == 2
    assert f"accept its conditions at {server.endpoint}/me/gated" in done.stderr
    done = chord(server, home, "me/model", "--revision", "v9", "--json")
    assert done.returncode == 2
    assert "no such revision" in json.loads(done.stdout)["error"]

    done = chord(server, home, "me/model", "--revision", commit, HF_HUB_OFFLINE="1")
    assert done.returncode == 1  # config and index are in the cache, the shards are not
    assert "which is missing" in done.stdout
    done = chord(server, tmp_path / "elsewhere", "me/model", HF_HUB_OFFLINE="1")
    assert done.returncode == 2
    assert "HF_HUB_OFFLINE is set" in done.stderr


def test_an_invalid_checkpoint_on_the_hub(server: HubServer, flat: Editor, tmp_path: Path) -> None:
    def work(config: dict[str, Any]) -> None:
        del config["quantization_config"]

    flat.json("config.json", work)
    done = chord(server, tmp_path / "home", "me/model")
    assert done.returncode == 1
    assert "though the experts are packed INT4" in done.stdout
    assert "Traceback" not in done.stderr


def test_a_full_stdout(flat: Editor) -> None:
    command = [sys.executable, "-c", "from chord_runtime.cli import main; main()", "validate", str(flat.path)]
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (
        2, "error: stdout cannot be written: No space left on device\n"
    )  # fmt: skip


def test_a_revision_of_a_directory(flat: Editor) -> None:
    result = run(str(flat.path), "--revision", "v2")
    assert result.exit_code == 2
    assert "--revision goes with a Hub id" in result.stderr
