"""A tiny Kimi checkpoint, its packed directory, and Transformers on its dequantised weights in float32."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file

from chord_convert.cli import cli
from tests.checkpoints import SERVED, dequantize, write_checkpoint


@pytest.fixture(scope="session")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("transformers") / "source", attention=SERVED, full_range=True)


@pytest.fixture(scope="session")
def pack(source: Path) -> Callable[..., Path]:
    def run(*options: str, of: Path = source) -> Path:
        name = "packed" + "".join(options).replace("-", "_")
        target = of.parent / f"{of.name}_{name}"
        if not target.exists():
            result = CliRunner().invoke(cli, [str(of), *options, "-o", str(target)])
            assert result.exit_code == 0, result.output
        return target

    return run


@pytest.fixture(scope="session")
def reference(source: Path) -> torch.nn.Module:
    """Built by hand from the source's tensors: nothing of Chord, nothing of from_pretrained."""
    import transformers

    settings = json.loads((source / "config.json").read_text())
    for name in ("quantization_config", "architectures", "model_type", "auto_map", "torch_dtype"):
        del settings[name]
    config = transformers.DeepseekV3Config(**settings)
    model = transformers.DeepseekV3ForCausalLM(config).eval()
    tensors = {k: v for file in sorted(source.glob("*.safetensors")) for k, v in load_file(file).items()}

    def expert(layer: int, number: int, projection: str) -> torch.Tensor:
        name = f"model.layers.{layer}.mlp.experts.{number}.{projection}."
        kinds = ("weight_packed", "weight_scale", "weight_shape")
        return dequantize({kind: tensors.pop(name + kind) for kind in kinds}).float()

    state = {}
    for layer in range(1, config.num_hidden_layers):
        stacks = {
            projection: torch.stack([expert(layer, e, projection) for e in range(config.n_routed_experts)])
            for projection in ("gate_proj", "up_proj", "down_proj")
        }
        name = f"model.layers.{layer}.mlp.experts."
        state[f"{name}gate_up_proj"] = torch.cat((stacks["gate_proj"], stacks["up_proj"]), 1)
        state[f"{name}down_proj"] = stacks["down_proj"]
    model.load_state_dict({**tensors, **state})
    return model.float()
