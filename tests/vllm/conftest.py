from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.vllm import model

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Models:
    """Directories: ordinary checkpoints, plain and wrapped as K2.5 is, and what ``chord-convert`` made of them."""

    source: Path
    ep2: Path
    round_robin: Path
    tp2: Path
    nested_source: Path
    nested: Path
    contiguous: Path


def environment(**extra: str) -> dict[str, str]:
    """Variables for a process that runs vLLM on this machine's CPU, without the network."""
    fixed = {
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
        "TORCHDYNAMO_DISABLE": "1",  # on the CPU, compiling the sampler takes longer than all answers
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    }
    return {**os.environ, **fixed, **extra}


def convert(source: Path, out: Path, *options: str) -> Path:
    """Run chord-convert as a user does."""
    command = [str(Path(sys.executable).with_name("chord-convert")), str(source), "-o", str(out), *options]
    done = subprocess.run(command, capture_output=True, text=True, env=environment(), cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return out


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    root = tmp_path_factory.mktemp("models")
    source = model.write(root / "source")
    nested = model.write(root / "nested source", nested=True)
    return Models(
        source,
        ep2=convert(source, root / "ep2", "--mode", "all", "--ep", "2"),
        round_robin=convert(source, root / "round robin", "--mode", "all", "--ep", "2", "--placement", "round_robin"),
        tp2=convert(source, root / "tp2", "--mode", "all", "--tp", "2"),
        nested_source=nested,
        nested=convert(nested, root / "nested", "--mode", "all", "--ep", "2"),
        contiguous=convert(source, root / "contiguous", "--mode", "contiguous", "--ep", "1"),
    )


@pytest.fixture
def layer() -> Iterator[Any]:
    """The part of vLLM's RoutedExperts that is looked at before anything is loaded."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.fused_moe import RoutedExperts
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation
    from vllm.model_executor.layers.fused_moe.config import (
        FusedMoEConfig,
        FusedMoEParallelConfig,
        RoutingMethodType,
    )

    with set_current_vllm_config(VllmConfig()):
        moe = FusedMoEConfig(
            num_experts=8,
            experts_per_token=2,
            hidden_dim=256,
            intermediate_size=128,
            num_local_experts=8,
            num_logical_experts=8,
            activation=MoEActivation.SILU,
            device="cpu",
            routing_method=RoutingMethodType.DeepSeekV3,
            moe_parallel_config=FusedMoEParallelConfig.make_no_parallel(),
            in_dtype=torch.bfloat16,
        )
        experts = RoutedExperts.__new__(RoutedExperts)
        torch.nn.Module.__init__(experts)
        experts.layer_name, experts.moe_config = "model.layers.1.mlp.experts", moe
        experts.ckpt_gate_proj_name, experts.ckpt_up_proj_name = "gate_proj", "up_proj"
        experts.ckpt_down_proj_name = "down_proj"
        experts.apply_router_weight_on_input = False
        experts.swiglu_limit = experts.swiglu_alpha = experts.swiglu_beta = None
        yield experts
