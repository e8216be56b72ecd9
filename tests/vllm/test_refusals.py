"""What cannot be served is refused at start, in one sentence that says what to do."""

from __future__ import annotations

import dataclasses
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from chord_runtime.errors import ChordError, FormatError, ModeError, UsageError
from chord_runtime.format.layout import ExpertShape, Mode, ParallelLayout
from chord_runtime.format.metadata import Packing, quantization_config
from tests.vllm.conftest import ROOT, Models, convert, environment

pytestmark = pytest.mark.vllm

SHAPE = ExpertShape(num_experts=8, hidden=256, intermediate=128)


def packing(*modes: Mode, tp_size: int = 1) -> Packing:
    return Packing(modes or tuple(Mode), ParallelLayout(1, tp_size), SHAPE, (1, 2), "model.layers.")


def parallel(layer: Any, **fields: Any) -> None:
    moe = layer.moe_config
    moe.moe_parallel_config = dataclasses.replace(moe.moe_parallel_config, **fields)


def _gelu(layer: Any) -> None:
    layer.moe_config.activation = type(layer.moe_config.activation).GELU


OPTIONS: dict[str, tuple[Callable[[Any], None], str]] = {
    "activation": (_gelu, "activation gelu"),
    "clamp": (lambda layer: setattr(layer, "swiglu_limit", 7.0), "a clamped or scaled SwiGLU"),
    "bias": (lambda layer: setattr(layer.moe_config, "has_bias", True), "experts with bias"),
    "lora": (lambda layer: setattr(layer.moe_config, "is_lora_enabled", True), "without --enable-lora"),
    "weights on input": (lambda layer: setattr(layer, "apply_router_weight_on_input", True), "applied to the input"),
    "eplb": (lambda layer: parallel(layer, enable_eplb=True), "without --enable-eplb"),
    "passthrough": (lambda layer: parallel(layer, all2all_backend="passthrough"), "passthrough"),
    "float16": (lambda layer: setattr(layer.moe_config, "in_dtype", torch.float16), "--dtype bfloat16"),
    "narrow slice": (lambda layer: setattr(layer.moe_config, "intermediate_size_per_partition", 32), "N=64"),
    "other backend": (lambda layer: setattr(layer.moe_config, "moe_backend", "marlin"), "moe_backend=marlin"),
}


@pytest.mark.parametrize("option", OPTIONS)
def test_options(layer: Any, option: str) -> None:
    from chord_runtime.integrations.vllm.method import LoadTimeExpertsMethod

    LoadTimeExpertsMethod(layer)
    change, said = OPTIONS[option]
    change(layer)
    with pytest.raises(ChordError, match=r"does not serve the experts model\.layers\.1\.mlp\.experts") as error:
        LoadTimeExpertsMethod(layer)
    assert said in str(error.value)


def test_f16_accumulation(layer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from chord_runtime.integrations.vllm.limits import refusal

    monkeypatch.setenv("VLLM_HUMMING_USE_F16_ACCUM", "0")
    assert refusal(layer) is None
    monkeypatch.setenv("VLLM_HUMMING_USE_F16_ACCUM", "1")
    assert "f16 accumulation" in str(refusal(layer))


def test_batch_invariance_is_accepted(layer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from chord_runtime.integrations.vllm.experts import BatchedExperts, StandardExperts
    from chord_runtime.integrations.vllm.limits import refusal

    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    assert refusal(layer) is None
    assert StandardExperts._supports_batch_invariance() and BatchedExperts._supports_batch_invariance()


def test_modes(layer: Any) -> None:
    """The format that the all2all backend hands over decides which recorded mode is needed."""
    from chord_runtime.integrations.vllm.method import PackedExpertsMethod

    for mode in (Mode.CONTIGUOUS, Mode.INDEXED):
        PackedExpertsMethod(layer, packing(mode), "DIR")
    with pytest.raises(ModeError, match=r"packed for masked.*chord-convert MODEL --mode all --ep 1 --tp 1 -o"):
        PackedExpertsMethod(layer, packing(Mode.MASKED), "DIR")
    parallel(layer, use_ep=True, dp_size=2, ep_size=2, all2all_backend="deepep_low_latency")
    PackedExpertsMethod(layer, packing(Mode.MASKED), "DIR")
    wanted = r"deepep_low_latency.*calls masked: run chord-convert MODEL --mode masked --mode indexed --ep 1 --tp 1"
    with pytest.raises(ModeError, match=wanted):
        PackedExpertsMethod(layer, packing(Mode.INDEXED), "DIR")


def test_tensor_parallel_size(layer: Any) -> None:
    from chord_runtime.integrations.vllm.method import PackedExpertsMethod

    with pytest.raises(UsageError, match=r"size 2, this deployment cuts experts in 1: run chord-convert .* --tp 1"):
        PackedExpertsMethod(layer, packing(tp_size=2), "DIR")
    parallel(layer, tp_size=2)
    PackedExpertsMethod(layer, packing(tp_size=2), "DIR")
    with pytest.raises(UsageError, match=r"--tp 2 -o DIR, or start with --enable-expert-parallel"):
        PackedExpertsMethod(layer, packing(), "DIR")


def test_configuration_of_another_version() -> None:
    from chord_runtime.integrations.vllm.config import ChordConfig

    config = quantization_config(packing())
    assert ChordConfig.from_config(config).packing == packing()
    with pytest.raises(FormatError, match="packed format version 2"):
        ChordConfig.from_config({**config, "format_version": 2})
    with pytest.raises(FormatError, match=r"quantization_config in config\.json: .*hidden_size"):
        ChordConfig.from_config({key: config[key] for key in config if key != "hidden_size"})


def test_starts_that_fail(models: Models, tmp_path: Path) -> None:
    """A real engine stops before it serves, and says the command that fixes it."""
    masked = convert(models.source, tmp_path / "masked", "--mode", "masked", "--ep", "1")
    one = convert(models.source, tmp_path / "one", "--mode", "all", "--ep", "2", "--ranks", "1")
    only = convert(models.source, tmp_path / "only", "--mode", "all", "--ep", "1", "--experts-only")
    cut = tmp_path / "cut"
    shutil.copytree(models.ep2, cut)
    with next(cut.glob("experts-layer002-ep001*")).open("r+b") as file:
        file.truncate(file.seek(0, 2) - 1)
    routes = {
        "mode": {"model": str(masked)},
        "tp": {"model": str(models.tp2)},
        "rank": {"model": str(one)},
        "rank, own loader": {"model": str(one), "load_format": "chord"},
        "cut, own loader": {"model": str(cut), "load_format": "chord"},
        "experts only": {"model": str(only)},
        "not packed": {"model": str(models.source), "quantization": "chord", "load_format": "chord"},
    }
    command = [sys.executable, "-m", "tests.vllm.routes", str(tmp_path)]
    asked = json.dumps({name: {**options, "refused": True} for name, options in routes.items()})
    ran = subprocess.run([*command, asked], env=environment(), cwd=ROOT, capture_output=True, text=True)
    assert ran.returncode == 0, (ran.stdout + ran.stderr)[-6000:]
    said = {name: (tmp_path / f"{name}.txt").read_text() for name in routes}
    again = "run chord-convert source"
    assert f"{again} --mode all --ep 1 --tp 1 -o DIR" in said["mode"]
    assert f"{again} --mode all --ep 1 --tp 1 -o DIR" in said["tp"]
    assert "8 packed tensors of this rank were not in the files read" in said["rank"]
    assert "model.layers.1.mlp.experts.0.gate_proj.weight_packed: it holds other ranks only" in said["rank, own loader"]
    assert "experts-layer002-ep001of002-tp00of01-00.safetensors: found" in said["cut, own loader"]
    assert "made with --experts-only" in said["experts only"]
    assert "is not one: convert it with chord-convert" in said["not packed"]
