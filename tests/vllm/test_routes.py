"""Every way into vLLM gives what Transformers gives in FP32: a real engine on the CPU, packed by ``chord-convert``."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from chord_runtime.format.block import packed_bytes
from chord_runtime.format.layout import Projection
from chord_runtime.format.metadata import Manifest
from tests.vllm import model
from tests.vllm.conftest import ROOT, Models, environment

pytestmark = pytest.mark.vllm

TOLERANCE = 1e-3
TEXT = {"language_model_only": True}

Routes = dict[str, dict[str, Any]]


def alone(models: Models) -> Routes:
    """One process, without the opt-in."""
    packed = str(models.ep2)
    return {
        "packed": {"model": packed},
        "packed, own loader": {"model": packed, "load_format": "chord"},
        "packed, as humming": {"model": packed, "quantization": "humming"},
        "packed, batched": {"model": packed, "batched": True},
        "packed for contiguous alone": {"model": str(models.contiguous)},
        "by name": {"model": str(models.source), "quantization": "chord"},
        "nested, packed": {"model": str(models.nested), **TEXT},
        "nested, own loader": {"model": str(models.nested), "load_format": "chord", **TEXT},
        "nested, by name": {"model": str(models.nested_source), "quantization": "chord", **TEXT},
    }


def compiled(models: Models) -> Routes:
    """With torch.compile, which traces the layer on a CPU."""
    return {"compiled": {"model": str(models.ep2), "enforce_eager": False}}


def opted_in(models: Models) -> Routes:
    """An ordinary checkpoint under CHORD_VLLM=1."""
    source = str(models.source)
    return {
        "opt-in, nothing said": {"model": source},
        "opt-in, as humming": {"model": source, "quantization": "humming"},
        "opt-in, moe_backend humming": {"model": source, "kernel_config": {"moe_backend": "humming"}},
    }


def two_ranks(models: Models) -> Routes:
    """Two processes share the experts, by expert or by slice."""
    two = {"tensor_parallel_size": 2}
    ep = {**two, "enable_expert_parallel": True}
    # vLLM deals experts out in turn only to models with groups of experts; two groups, both allowed, change nothing.
    groups = {"expert_placement_strategy": "round_robin", "hf_overrides": {"n_group": 2, "topk_group": 2}}
    return {
        "ep2 round robin, own loader": {"model": str(models.round_robin), "load_format": "chord", **groups, **ep},
        "ep2, vLLM's loader and filter": {"model": str(models.ep2), "enable_ep_weight_filter": True, **ep},
        "tp2, own loader": {"model": str(models.tp2), "load_format": "chord", **two},
        "tp2, vLLM's loader": {"model": str(models.tp2), **two},
    }


GROUPS: dict[Callable[[Models], Routes], dict[str, str]] = {
    alone: {},
    compiled: {"TORCHDYNAMO_DISABLE": "0", "VLLM_DISABLE_COMPILE_CACHE": "1"},
    opted_in: {"CHORD_VLLM": "1"},
    two_ranks: {},
}
NAMES = [(group, name) for group in GROUPS for name in group(Models(*[Path()] * 7))]


@pytest.fixture(scope="module")
def run(models: Models, tmp_path_factory: pytest.TempPathFactory) -> Callable[[Any], tuple[Path, str]]:
    """Runs a group once; returns the folder of its answers and its log."""
    done: dict[Any, tuple[Path, str]] = {}

    def once(group: Callable[[Models], Routes]) -> tuple[Path, str]:
        if group not in done:
            out = tmp_path_factory.mktemp(group.__name__)
            command = [sys.executable, "-m", "tests.vllm.routes", str(out), json.dumps(group(models))]
            ran = subprocess.run(command, env=environment(**GROUPS[group]), cwd=ROOT, capture_output=True, text=True)
            log = ran.stdout + ran.stderr
            assert ran.returncode == 0, log[-6000:]
            done[group] = (out, log)
        return done[group]

    return once


@pytest.mark.parametrize(("group", "name"), NAMES, ids=[name for _, name in NAMES])
def test_log_probabilities(group: Any, name: str, run: Any, models: Models) -> None:
    answers = torch.load(run(group)[0] / f"{name}.pt")
    expected = model.reference(models.source, answers)
    for prompt, answer in answers.items():
        assert model.distance(answer["logprobs"], expected[prompt]) < TOLERANCE, prompt
        steps = expected[prompt][-model.TOKENS :]
        assert answer["tokens"].tolist() == steps.argmax(-1).tolist(), prompt


def test_own_loader_reads_only_its_ranks(run: Any, models: Models) -> None:
    """Of the experts files each rank opens its own, and reads every byte of them once."""
    log = run(two_ranks)[1]
    reads = re.findall(r"read this rank's experts: (\d+) bytes in .* from (\d+) of (\d+) experts files, 2 layers", log)
    shape = Manifest.read(models.ep2).packing.shape
    expert = sum(packed_bytes(*shape.packed(projection)) for projection in Projection)
    assert reads == [(str(2 * 8 * expert // 2), "2", "4")] * 4


def test_opt_in_says_that_it_takes_the_experts(run: Any) -> None:
    assert "Chord takes the INT4 experts of this checkpoint" in run(opted_in)[1]
    assert "Chord takes" not in run(alone)[1]
