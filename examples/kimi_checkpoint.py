"""Write a small checkpoint in the format of Kimi K2-Thinking, its experts quantized by the compressed-tensors library.

    python examples/kimi_checkpoint.py DIRECTORY

Real names, dtypes and layout, small sizes, random weights; nothing here knows Chord.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from compressed_tensors.compressors.pack_quantized import PackedQuantizationCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from safetensors.torch import save_file
from torch import Tensor

LAYERS, EXPERTS, TOP_K = 3, 16, 4  # layer 0 is dense, as in Kimi K2
HIDDEN, INTERMEDIATE, VOCABULARY = 512, 256, 512
SCHEME = QuantizationScheme(
    targets=["Linear"],
    weights=QuantizationArgs(num_bits=4, type="int", symmetric=True, strategy="group", group_size=32),
)
CONFIG: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "kimi_k2",
    "hidden_act": "silu",
    "hidden_size": HIDDEN,
    "intermediate_size": 1024,
    "moe_intermediate_size": INTERMEDIATE,
    "num_hidden_layers": LAYERS,
    "first_k_dense_replace": 1,
    "n_routed_experts": EXPERTS,
    "n_shared_experts": 1,
    "num_experts_per_tok": TOP_K,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.827,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "n_group": 1,
    "topk_group": 1,
    "vocab_size": VOCABULARY,
    "torch_dtype": "bfloat16",
    "quantization_config": {
        "config_groups": {
            "group_0": {
                "input_activations": None,
                "output_activations": None,
                "targets": ["Linear"],
                "weights": {
                    "actorder": None,
                    "block_structure": None,
                    "dynamic": False,
                    "group_size": 32,
                    "num_bits": 4,
                    "observer": "minmax",
                    "observer_kwargs": {},
                    "strategy": "group",
                    "symmetric": True,
                    "type": "int",
                },
            }
        },
        "format": "pack-quantized",
        "ignore": ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*", "re:.*mlp\\.(gate|up|gate_up|down)_proj.*"],
        "kv_cache_scheme": None,
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
    },
}


def write(directory: Path) -> None:
    """Write config, one safetensors file a layer, one for the rest, and the index."""
    directory.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    parts = [_layer(number) for number in range(LAYERS)]
    parts.append(_linears("", {"model.embed_tokens": (VOCABULARY, HIDDEN), "lm_head": (VOCABULARY, HIDDEN)}))
    parts[-1]["model.norm.weight"] = torch.ones(HIDDEN, dtype=torch.bfloat16)
    weight_map = {}
    for number, tensors in enumerate(parts, 1):
        name = f"model-{number:05d}-of-{len(parts):06d}.safetensors"
        save_file(tensors, directory / name)
        weight_map |= dict.fromkeys(tensors, name)
    total = sum(tensor.nbytes for tensors in parts for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))
    (directory / "config.json").write_text(json.dumps(CONFIG, indent=2))


def decompress(tensors: dict[str, Tensor]) -> Tensor:
    """compressed-tensors' own view of ``weight_packed``, ``weight_scale`` and ``weight_shape``: bfloat16 [N, K]."""
    weight: Tensor = PackedQuantizationCompressor.decompress(dict(tensors), SCHEME)["weight"]
    return weight


def _layer(number: int) -> dict[str, Tensor]:
    name = f"model.layers.{number}."
    tensors = {
        f"{name}{norm}_layernorm.weight": torch.ones(HIDDEN, dtype=torch.bfloat16)
        for norm in ("input", "post_attention")
    }
    tensors |= _linears(f"{name}self_attn.", {"q_a_proj": (64, HIDDEN), "o_proj": (HIDDEN, 64)})
    if number == 0:
        return tensors | _mlp(f"{name}mlp.", CONFIG["intermediate_size"])
    tensors |= _linears(f"{name}mlp.", {"gate": (EXPERTS, HIDDEN)})
    tensors[f"{name}mlp.gate.e_score_correction_bias"] = torch.randn(EXPERTS) * 0.02
    tensors |= _mlp(f"{name}mlp.shared_experts.", INTERMEDIATE)
    for expert in range(EXPERTS):
        for linear, weight in _mlp(f"{name}mlp.experts.{expert}.", INTERMEDIATE).items():
            quantized = _quantize(weight.float())
            tensors |= {linear.removesuffix("weight") + key: value for key, value in quantized.items()}
    return tensors


def _mlp(name: str, width: int) -> dict[str, Tensor]:
    return _linears(name, {"gate_proj": (width, HIDDEN), "up_proj": (width, HIDDEN), "down_proj": (HIDDEN, width)})


def _linears(name: str, shapes: dict[str, tuple[int, int]]) -> dict[str, Tensor]:
    return {
        f"{name}{linear}.weight": (torch.randn(rows, columns) * columns**-0.5).bfloat16()
        for linear, (rows, columns) in shapes.items()
    }


def _quantize(weight: Tensor) -> dict[str, Tensor]:
    """INT4, symmetric, −7..7, one BF16 scale for each 32 columns: as Moonshot publishes them."""
    scale = (weight.unflatten(1, (-1, 32)).abs().amax(2) / 7).bfloat16()
    state: dict[str, Tensor] = PackedQuantizationCompressor.compress({"weight": weight, "weight_scale": scale}, SCHEME)
    state["weight_shape"] = state["weight_shape"].int()
    return state


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    directory = parser.parse_args().directory
    if directory.exists() and not directory.is_dir():
        parser.error(f"{directory} is not a directory; supported: one that exists, or a new name")
    write(directory)
