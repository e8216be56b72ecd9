"""The snippets that users copy do what they say, and the documentation names every rule."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.hub_server import HubServer
from tests.validate.cases import CASES
from tests.validate.editing import Editor

ROOT = Path(__file__).parents[2]


def shell(command: str, directory: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return subprocess.run(
        ["bash", "-c", command],
        cwd=directory,
        env={**os.environ, **environment, "PATH": path},
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_pre_commit_hook(flat: Editor) -> None:
    (repository,) = yaml.safe_load((ROOT / "examples/validate/.pre-commit-config.yaml").read_text())["repos"]
    (hook,) = repository["hooks"]
    assert shell(hook["entry"], flat.path).returncode == 0
    for file in ("config.json", "hf_quant_config.json", "model.safetensors.index.json", flat.shards()[0]):
        assert re.search(hook["files"], file)
    assert not re.search(hook["files"], "README.md")
    flat.weights(num_bits=8)
    done = shell(hook["entry"], flat.path)
    assert done.returncode == 1
    assert "weights.num_bits: found 8; supported: 4 bits" in done.stdout


@pytest.mark.parametrize("bits", [4, 8])
def test_workflow(flat: Editor, tmp_path: Path, bits: int) -> None:
    flat.weights(num_bits=bits)
    workflow = yaml.safe_load((ROOT / "examples/validate/github-workflow.yml").read_text())
    step = workflow["jobs"]["validate"]["steps"][-1]
    assert set(step["env"]) == {"MODEL", "REVISION", "HF_TOKEN"}
    with HubServer() as server:
        server.add("me/model", flat.path, token="hf_secret")
        values = {"MODEL": "me/model", "REVISION": "main", "HF_TOKEN": "hf_secret", "GITHUB_ACTIONS": "true"}
        done = shell(step["run"], tmp_path, **values, **server.client_environment(tmp_path / "home"))
    assert done.returncode == (0 if bits == 4 else 1)
    assert done.stdout.startswith("me/model at " if bits == 4 else "::error file=config.json,title=chord validate")


def test_the_documentation_names_every_rule() -> None:
    text = (ROOT / "docs" / "validate.md").read_text()
    named = set(re.findall(r"`([a-z0-9-]+)`", text))
    rules = {case.rule for case in CASES} | {"scale-value", "recorded-shape", "total-size", "incomplete-model"}
    assert rules - named == set()
