"""The model of these tests, and what Transformers in FP32 says it should answer."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file

from tests.checkpoints import SERVED, VOCABULARY, dequantize, write_checkpoint

SENTENCE = "The quick brown fox jumps over the lazy dog. "
PROMPTS = {"short": list(SENTENCE.encode()), "long": list((SENTENCE * 6).encode())}
"""Token ids: 11 and 67 rows for each of 8 experts at top-2, and a few after that."""

TOKENS = 4
"""Tokens generated after each prompt."""

Answer = dict[str, torch.Tensor]
"""``tokens`` [TOKENS] and ``logprobs`` [prompt + TOKENS − 1, vocabulary]: of every token but the first."""


VISION = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "num_hidden_layers": 1}
IMAGES = {
    "fixed_output_tokens": None, "image_mean": [0.5] * 3, "image_std": [0.5] * 3, "in_patch_limit": 64,
    "in_patch_limit_each_frame": 64, "in_patch_limit_video": 64, "merge_kernel_size": 2, "patch_limit_on_one_side": 16,
    "patch_size": 14, "temporal_merge_kernel_size": 4,
}  # fmt: skip


def write(path: Path, nested: bool = False) -> Path:
    """A Kimi checkpoint small enough for a CPU, with experts for two ranks of any kind.

    ``nested`` is K2.5's wrapper around the same language model, with the least that vLLM wants to know of its images.
    """
    write_checkpoint(path, attention=SERVED, intermediate=128, experts=8, top_k=2, nested=nested)
    if nested:
        config = json.loads((path / "config.json").read_text())
        config |= {"vision_config": VISION, "projection_hidden_size": 32, "image_token_id": VOCABULARY - 1}
        (path / "config.json").write_text(json.dumps(config))
        (path / "preprocessor_config.json").write_text(json.dumps({"media_proc_cfg": IMAGES}))
    return path


def reference(checkpoint: Path, answers: dict[str, Answer]) -> dict[str, torch.Tensor]:
    """Log-probabilities of prompts and the generated tokens, by Transformers in FP32.

    The experts are the checkpoint's as compressed-tensors dequantises them, rounded to BF16 as every implementation
    rounds them; all else is exact.
    """
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    config = json.loads((checkpoint / "config.json").read_text())
    scaling = config.pop("rope_scaling")
    scaling = {"rope_type": scaling.pop("type"), "rope_theta": config.pop("rope_theta"), **scaling}
    for key in ("quantization_config", "auto_map", "architectures", "model_type"):
        del config[key]
    state = {name: tensor.float() for name, tensor in _dense(checkpoint).items()}
    model = DeepseekV3ForCausalLM.from_pretrained(
        None, config=DeepseekV3Config(**config, rope_parameters=scaling), state_dict=state, dtype=torch.float32
    )
    result = {}
    for name, prompt in PROMPTS.items():
        ids = torch.tensor([prompt + answers[name]["tokens"].tolist()])
        with torch.no_grad():
            result[name] = model(ids).logits[0, :-1].log_softmax(-1)
    return result


def _dense(checkpoint: Path) -> dict[str, torch.Tensor]:
    state: dict[str, torch.Tensor] = {}
    for file in checkpoint.glob("*.safetensors"):
        state |= load_file(file)
    for name in [name for name in state if name.endswith(".weight_packed")]:
        module = name.removesuffix(".weight_packed")
        parts = ("weight_packed", "weight_scale", "weight_shape")
        state[f"{module}.weight"] = dequantize({part: state.pop(f"{module}.{part}") for part in parts})
    return state


def distance(answer: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest difference of log-probabilities."""
    assert answer.shape == expected.shape == (expected.shape[0], VOCABULARY)
    return float((answer - expected).abs().max())
