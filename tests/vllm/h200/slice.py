"""A slice of Kimi K2 with real dimensions, random weights written from the GPU, and its conversion.

python -m tests.vllm.h200.slice FOLDER [moe layers=16] [experts=48]      makes FOLDER/source and FOLDER/packed
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from safetensors.torch import save_file

from tests.checkpoints import IGNORE, PROJECTIONS, quantization_block, side_files

HIDDEN, INTERMEDIATE, DENSE, VOCABULARY, HEADS = 7168, 2048, 18432, 32768, 64
Q_LORA, KV_LORA, NOPE, ROPE, VALUE = 1536, 512, 128, 64, 128
DEVICE = "cuda"
THREADS = 6
"""Files written at a time."""


def convert(source: Path, out: Path, *options: str) -> Path:
    """Run chord-convert for one rank."""
    call = "from chord_convert.cli import main; main()"
    command = [sys.executable, "-c", call, str(source), "-o", str(out), "--ep", "1", *options]
    subprocess.run(command, check=True)
    return out


def prepare(folder: Path, moe_layers: int = 16, experts: int = 48) -> tuple[Path, Path]:
    """``source`` and ``packed`` in ``folder``, as they are if they were finished before."""
    source, packed = folder / "source", folder / "packed"
    if not (packed / "chord-manifest.json").exists():
        convert(write(source, moe_layers, experts), packed, "--workers", "8")
    return source, packed


def write(out: Path, moe_layers: int, experts: int) -> Path:
    """One dense layer and ``moe_layers`` with ``experts`` experts each (48: the share of a rank of eight)."""
    began = time.perf_counter()
    out.mkdir(parents=True, exist_ok=True)
    index: dict[str, str] = {}

    def save(number: int) -> None:
        generator = torch.Generator(DEVICE).manual_seed(number)
        group = _layer(generator, number - 1, experts) if number else _rest(generator)
        tensors = {name: tensor.cpu() for name, tensor in group}
        file = f"model-{number + 1:05d}-of-{moe_layers + 2:06d}.safetensors"
        save_file(tensors, out / file)
        index.update(dict.fromkeys(tensors, file))

    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(save, range(moe_layers + 2)))
    (out / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    (out / "config.json").write_text(json.dumps(_config(moe_layers, experts), indent=1))
    side_files(out)
    print(f"slice of {moe_layers} layers with {experts} experts written in {time.perf_counter() - began:.1f} s")
    return out


def _dense(generator: torch.Generator, name: str, rows: int, columns: int) -> tuple[str, torch.Tensor]:
    normal = torch.randn(rows, columns, device=DEVICE, dtype=torch.bfloat16, generator=generator)
    return f"{name}.weight", normal * columns**-0.5


def _ones(name: str, size: int) -> tuple[str, torch.Tensor]:
    return f"{name}.weight", torch.ones(size, dtype=torch.bfloat16)


def _rest(generator: torch.Generator) -> Iterator[tuple[str, torch.Tensor]]:
    yield _dense(generator, "lm_head", VOCABULARY, HIDDEN)
    embedding = torch.randn(VOCABULARY, HIDDEN, device=DEVICE, dtype=torch.bfloat16, generator=generator)
    yield "model.embed_tokens.weight", embedding
    yield _ones("model.norm", HIDDEN)


def _layer(generator: torch.Generator, number: int, experts: int) -> Iterator[tuple[str, torch.Tensor]]:
    name = f"model.layers.{number}"
    yield _ones(f"{name}.input_layernorm", HIDDEN)
    yield _ones(f"{name}.post_attention_layernorm", HIDDEN)
    yield _dense(generator, f"{name}.self_attn.q_a_proj", Q_LORA, HIDDEN)
    yield _ones(f"{name}.self_attn.q_a_layernorm", Q_LORA)
    yield _dense(generator, f"{name}.self_attn.q_b_proj", HEADS * (NOPE + ROPE), Q_LORA)
    yield _dense(generator, f"{name}.self_attn.kv_a_proj_with_mqa", KV_LORA + ROPE, HIDDEN)
    yield _ones(f"{name}.self_attn.kv_a_layernorm", KV_LORA)
    yield _dense(generator, f"{name}.self_attn.kv_b_proj", HEADS * (NOPE + VALUE), KV_LORA)
    yield _dense(generator, f"{name}.self_attn.o_proj", HIDDEN, HEADS * VALUE)
    if number == 0:
        yield from (_dense(generator, f"{name}.mlp.{p}", *_shape(p, DENSE)) for p in PROJECTIONS)
        return
    yield _dense(generator, f"{name}.mlp.gate", experts, HIDDEN)
    yield f"{name}.mlp.gate.e_score_correction_bias", torch.zeros(experts)
    yield from (_dense(generator, f"{name}.mlp.shared_experts.{p}", *_shape(p, INTERMEDIATE)) for p in PROJECTIONS)
    for expert in range(experts):
        for projection in PROJECTIONS:
            rows, columns = _shape(projection, INTERMEDIATE)
            module = f"{name}.mlp.experts.{expert}.{projection}"
            words = torch.randint(
                -(2**31), 2**31, (rows, columns // 8), device=DEVICE, dtype=torch.int32, generator=generator
            )
            # Codes are uniform in -8..7, so that scales of 0.217 / sqrt(K) give weights of variance 1 / K.
            spread = 0.5 + torch.rand(rows, columns // 32, device=DEVICE, generator=generator)
            scale = spread * 0.217 * columns**-0.5
            yield f"{module}.weight_packed", words
            yield f"{module}.weight_scale", scale.bfloat16()
            yield f"{module}.weight_shape", torch.tensor([rows, columns], dtype=torch.int32)


def _shape(projection: str, width: int) -> tuple[int, int]:
    return (HIDDEN, width) if projection == "down_proj" else (width, HIDDEN)


def _config(moe_layers: int, experts: int) -> dict[str, object]:
    scaling = {
        "type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096, "beta_fast": 1.0, "beta_slow": 1.0,
        "mscale": 1.0, "mscale_all_dim": 1.0,
    }  # fmt: skip
    return {
        "architectures": ["DeepseekV3ForCausalLM"], "model_type": "kimi_k2", "attention_bias": False,
        "attention_dropout": 0.0, "bos_token_id": 256, "eos_token_id": 257, "pad_token_id": 258,
        "first_k_dense_replace": 1, "hidden_act": "silu", "hidden_size": HIDDEN, "initializer_range": 0.02,
        "intermediate_size": DENSE, "kv_lora_rank": KV_LORA, "max_position_embeddings": 131072,
        "moe_intermediate_size": INTERMEDIATE, "moe_layer_freq": 1, "n_group": 1, "n_routed_experts": experts,
        "n_shared_experts": 1, "norm_topk_prob": True, "num_attention_heads": HEADS, "num_experts_per_tok": 8,
        "num_hidden_layers": moe_layers + 1, "num_key_value_heads": HEADS, "num_nextn_predict_layers": 0,
        "q_lora_rank": Q_LORA, "qk_nope_head_dim": NOPE, "qk_rope_head_dim": ROPE, "rms_norm_eps": 1e-5,
        "rope_scaling": scaling, "rope_theta": 50000.0, "routed_scaling_factor": 2.827, "scoring_func": "sigmoid",
        "tie_word_embeddings": False, "topk_group": 1, "topk_method": "noaux_tc", "torch_dtype": "bfloat16",
        "use_cache": True, "v_head_dim": VALUE, "vocab_size": VOCABULARY,
        "quantization_config": quantization_block(IGNORE),
    }  # fmt: skip


if __name__ == "__main__":
    prepare(Path(sys.argv[1]), *(int(value) for value in sys.argv[2:]))
