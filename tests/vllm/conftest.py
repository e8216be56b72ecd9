from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.vllm import model

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Models:
    """Directories: an ordinary checkpoint, and what ``chord-convert`` made of it for two kinds of ranks."""

    source: Path
    ep2: Path
    tp2: Path


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
    return Models(
        source,
        ep2=convert(source, root / "ep2", "--mode", "all", "--ep", "2"),
        tp2=convert(source, root / "tp2", "--mode", "all", "--tp", "2"),
    )
