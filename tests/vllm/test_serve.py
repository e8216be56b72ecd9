"""``vllm serve`` on a packed directory, over HTTP."""

from __future__ import annotations

import json
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.vllm import model
from tests.vllm.conftest import ROOT, Models, environment
from tests.vllm.routes import free_port

pytestmark = pytest.mark.vllm


@pytest.fixture
def server(models: Models, tmp_path: Path) -> Iterator[str]:
    """The address of a running server that was started with no flag for Chord."""
    port = free_port()
    command = [
        str(Path(sys.executable).with_name("vllm")), "serve", str(models.ep2), "--served-model-name", "kimi",
        "--host", "127.0.0.1", "--port", str(port), "--dtype", "float32", "--enforce-eager", "--max-model-len", "512",
        "--max-num-seqs", "4",
    ]  # fmt: skip
    log = tmp_path / "log.txt"
    with log.open("w") as output:
        process = subprocess.Popen(command, env=environment(), cwd=ROOT, stdout=output, stderr=subprocess.STDOUT)
    address = f"http://127.0.0.1:{port}"
    try:
        for _ in range(180):
            assert process.poll() is None, log.read_text()[-6000:]
            try:
                urllib.request.urlopen(f"{address}/health", timeout=1)
                break
            except (urllib.error.URLError, TimeoutError, ConnectionError):
                time.sleep(1)
        else:
            pytest.fail(f"no answer in three minutes: {log.read_text()[-6000:]}")
        yield address
    finally:
        process.terminate()
        process.wait(60)


def test_completions(server: str, models: Models) -> None:
    prompt = model.PROMPTS["short"]
    request: dict[str, Any] = {
        "model": "kimi", "prompt": prompt, "max_tokens": model.TOKENS, "temperature": 0, "ignore_eos": True,
        "logprobs": 1, "echo": True, "return_token_ids": True,
    }  # fmt: skip
    body = json.dumps(request).encode()
    post = urllib.request.Request(f"{server}/v1/completions", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(post, timeout=60) as response:
        (choice,) = json.load(response)["choices"]
    tokens = torch.tensor(choice["token_ids"][-model.TOKENS :])
    answers = {name: {"tokens": tokens} for name in model.PROMPTS}
    expected = model.reference(models.source, answers)["short"]
    said = torch.tensor(choice["logprobs"]["token_logprobs"][1:])
    text = torch.tensor([*prompt, *tokens.tolist()])[1:]
    assert (said - expected.gather(1, text.unsqueeze(1)).squeeze(1)).abs().max() < 1e-3
