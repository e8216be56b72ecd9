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
from tests.vllm.routes import free_port, rank_variables

pytestmark = pytest.mark.vllm

TOLERANCE = 1e-3
LIMIT_S = 400
"""For the routes of a process."""
TEXT = {"language_model_only": True}

# vLLM deals experts out in turn only to models with groups of experts; two groups, both allowed, change nothing.
ROUND_ROBIN = {"expert_placement_strategy": "round_robin", "hf_overrides": {"n_group": 2, "topk_group": 2}}

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
    return {
        "ep2 round robin, own loader": {"model": str(models.round_robin), "load_format": "chord", **ROUND_ROBIN, **ep},
        "ep2, vLLM's loader and filter": {"model": str(models.ep2), "enable_ep_weight_filter": True, **ep},
        "tp2, own loader": {"model": str(models.tp2), "load_format": "chord", **two},
        "tp2, vLLM's loader": {"model": str(models.tp2), **two},
    }


def data_parallel(models: Models) -> Routes:
    """Two engines with their own requests share the experts, by expert or by slice, and gather each other's tokens.

    The gathering is the test's: see ``routes.add_gathers``.
    """
    inside = {"distributed_executor_backend": "uni"}
    return {
        "dp2 ep2": {"model": str(models.ep2), "load_format": "chord", "enable_expert_parallel": True, **inside},
        "dp2 ep2 round robin": {
            "model": str(models.round_robin), "enable_expert_parallel": True, **ROUND_ROBIN, **inside,
        },
        "dp2 cut in two": {"model": str(models.tp2), "load_format": "chord", **inside},
    }  # fmt: skip


GROUPS: dict[Callable[[Models], Routes], dict[str, str]] = {
    alone: {},
    compiled: {"TORCHDYNAMO_DISABLE": "0", "VLLM_DISABLE_COMPILE_CACHE": "1"},
    opted_in: {"CHORD_VLLM": "1"},
    two_ranks: {},
    data_parallel: {},
}
RANKS = ("", ", rank 0", ", rank 1")
NAMES = [
    (group, name + rank)
    for group in GROUPS
    for name in group(Models(*[Path()] * 7))
    for rank in (RANKS[1:] if group is data_parallel else RANKS[:1])
]


def start(command: list[str], log: Path, **variables: str) -> subprocess.Popen[bytes]:
    """A process of vLLM's with its output in a file."""
    with log.open("wb") as file:
        return subprocess.Popen(command, env=environment(**variables), cwd=ROOT, stdout=file, stderr=file)


@pytest.fixture(scope="module")
def run(models: Models, tmp_path_factory: pytest.TempPathFactory) -> Callable[[Any], tuple[Path, str]]:
    """Runs a group once; returns the folder of its answers and its log."""
    done: dict[Any, tuple[Path, str]] = {}

    def once(group: Callable[[Models], Routes]) -> tuple[Path, str]:
        if group not in done:
            out = tmp_path_factory.mktemp(group.__name__)
            port, suffixes = free_port(), RANKS[1:] if group is data_parallel else RANKS[:1]
            processes = []
            for rank, suffix in enumerate(suffixes):
                routes = json.dumps({name + suffix: options for name, options in group(models).items()})
                command = [sys.executable, "-m", "tests.vllm.routes", str(out), routes]
                variables = GROUPS[group] | (rank_variables(rank, port) if suffix else {})
                processes.append(start(command, out / f"{rank}.log", **variables))
            try:
                codes = [process.wait(LIMIT_S) for process in processes]
            finally:
                for process in processes:
                    process.kill()  # a rank waits for ever for one that failed
            log = "".join(path.read_text(errors="replace") for path in sorted(out.glob("*.log")))
            assert not any(codes), log[-6000:]
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
