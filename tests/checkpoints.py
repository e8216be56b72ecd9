"""Writes small but genuine Kimi-format checkpoints: experts quantized and packed by the compressed-tensors library."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from compressed_tensors.compressors.pack_quantized import PackedQuantizationCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from safetensors.torch import save_file

VOCABULARY = 320
HEADS = 4
SPECIAL = {"[BOS]": 256, "[EOS]": 257, "[PAD]": 258}
PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
SCHEME = QuantizationScheme(
    targets=["Linear"],
    weights=QuantizationArgs(num_bits=4, type="int", symmetric=True, strategy="group", group_size=32),
)
IGNORE = ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*", "re:.*mlp\\.(gate|up|gate_up|down)_proj.*"]
SIDE_FILES = {
    "generation_config.json": json.dumps({"bos_token_id": 256, "eos_token_id": 257, "max_length": 512}),
    "chat_template.jinja": "{% for message in messages %}{{ message['content'] }}[EOS]{% endfor %}\n",
    "configuration_deepseek.py": '"""Remote code of the model: its configuration class."""\n',
    "modeling_deepseek.py": '"""Remote code of the model: its layers."""\n',
    "tokenization_kimi.py": '"""Remote code of the model: its tokenizer."""\n',
    "LICENSE": "Modified MIT License\n",
    "THIRD_PARTY_NOTICES.md": "Notices of third parties.\n",
    "README.md": "# A small checkpoint in the format of Kimi K2\n",
    "figures/banner.svg": "<svg xmlns='http://www.w3.org/2000/svg'/>\n",
}


@dataclass(frozen=True)
class Attention:
    """Sizes of multi-head latent attention, as config.json names them."""

    q_lora_rank: int = 32
    kv_lora_rank: int = 32
    qk_nope_head_dim: int = 16
    qk_rope_head_dim: int = 8
    v_head_dim: int = 16
    yarn: bool = False


SERVED = Attention(128, 512, 128, 64, 128, yarn=True)
"""The least that vLLM's attention on a CPU takes; YaRN as Kimi K2 has it."""


def quantization_block(ignore: list[str] | None = None) -> dict[str, Any]:
    """The quantization_config of Moonshot's files, null keys included."""
    weights = {
        "actorder": None, "block_structure": None, "dynamic": False, "group_size": 32, "num_bits": 4,
        "observer": "minmax", "observer_kwargs": {}, "strategy": "group", "symmetric": True, "type": "int",
    }  # fmt: skip
    group = {"input_activations": None, "output_activations": None, "targets": ["Linear"], "weights": weights}
    return {
        "config_groups": {"group_0": group},
        "format": "pack-quantized",
        "ignore": IGNORE if ignore is None else ignore,
        "kv_cache_scheme": None,
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
    }


def quantize(weight: torch.Tensor, full_range: bool = False) -> dict[str, torch.Tensor]:
    """Quantize [out, in] with compressed-tensors: ``weight_packed`` I32, ``weight_scale`` BF16, ``weight_shape`` I64.

    Like Moonshot's files the values stay in -7..7; ``full_range`` uses -8 too, as a re-quantized model does.
    """
    groups = weight.float().unflatten(-1, (-1, 32)).abs().amax(-1)
    scale = (groups / (7.5 if full_range else 7)).clamp(min=1e-6).bfloat16()
    return PackedQuantizationCompressor.compress({"weight": weight.float(), "weight_scale": scale}, SCHEME)


def dequantize(state: dict[str, torch.Tensor]) -> torch.Tensor:
    """What compressed-tensors makes of ``weight_packed``, ``weight_scale``, ``weight_shape``: [out, in] in BF16."""
    return PackedQuantizationCompressor.decompress(dict(state), SCHEME)["weight"]


def write_checkpoint(
    path: str | Path,
    *,
    layers: int = 3,
    experts: int = 8,
    hidden: int = 256,
    intermediate: int = 128,
    top_k: int = 2,
    nested: bool = False,
    prefix: str | None = None,
    shards: int | None = None,
    shape_dtype: torch.dtype = torch.int32,
    full_range: bool = False,
    attention: Attention | None = None,
    seed: int = 0,
) -> Path:
    """Write a checkpoint directory and return its path.

    Layer 0 is dense, the others are MoE layers. ``nested`` is the form of K2.5 and later (``text_config``, prefix
    ``language_model.model.layers.``, vision tower and projector), otherwise that of K2-Thinking. ``shards=None``
    makes one file per layer and one for the rest, as Moonshot does; a number splits all tensors into so many files,
    wherever the cuts fall. ``shape_dtype`` int64 is how llm-compressor writes ``weight_shape``. ``attention=SERVED``
    makes a model that vLLM runs on a CPU.
    """
    if hidden % 128 or intermediate % 64:
        raise ValueError("hidden must be a multiple of 128 and intermediate of 64")
    path = Path(path)
    path.mkdir(parents=True, exist_ok=True)
    prefix = prefix or ("language_model.model.layers." if nested else "model.layers.")
    generator = torch.Generator().manual_seed(seed)
    attention = attention or Attention()
    writer = _Writer(prefix, layers, experts, hidden, intermediate, shape_dtype, full_range, attention, generator)
    groups = [list(writer.layer(number)) for number in range(layers)] + [list(writer.rest())]
    if nested:
        groups += [list(writer.projector()), list(writer.vision())]
    if shards is not None:
        flat = [item for group in groups for item in group]
        groups = [flat[len(flat) * i // shards : len(flat) * (i + 1) // shards] for i in range(shards)]
    _save(path, groups)
    text = _text_config(layers, experts, hidden, intermediate, top_k, attention)
    if nested:
        text["quantization_config"] = quantization_block([*IGNORE, "re:vision_tower.*", "re:mm_projector.*"])
        config = {
            "architectures": ["KimiK25ForConditionalGeneration"],
            "model_type": "kimi_k25",
            "text_config": text,
            "vision_config": {"hidden_size": 32, "model_type": "kimi_k25_vision"},
        }
    else:
        config = {**text, "quantization_config": quantization_block()}
    (path / "config.json").write_text(json.dumps(config, indent=2))
    side_files(path)
    return path


class _Writer:
    def __init__(
        self, prefix: str, layers: int, experts: int, hidden: int, intermediate: int, shape_dtype: torch.dtype,
        full_range: bool, attention: Attention, generator: torch.Generator,
    ) -> None:  # fmt: skip
        self.prefix, self.layers, self.experts = prefix, layers, experts
        self.hidden, self.intermediate = hidden, intermediate
        self.shape_dtype, self.full_range, self.attention = shape_dtype, full_range, attention
        self.generator = generator

    def _linear(self, name: str, rows: int, columns: int) -> tuple[str, torch.Tensor]:
        values = torch.randn(rows, columns, generator=self.generator) * columns**-0.5
        return f"{name}.weight", values.bfloat16()

    def _norm(self, name: str, size: int) -> tuple[str, torch.Tensor]:
        return f"{name}.weight", (1 + 0.1 * torch.randn(size, generator=self.generator)).bfloat16()

    def _mlp(self, name: str, width: int) -> Iterator[tuple[str, torch.Tensor]]:
        for projection in PROJECTIONS:
            rows, columns = self._shape(projection, width)
            yield self._linear(f"{name}.{projection}", rows, columns)

    def _shape(self, projection: str, width: int) -> tuple[int, int]:
        return (self.hidden, width) if projection == "down_proj" else (width, self.hidden)

    def layer(self, number: int) -> Iterator[tuple[str, torch.Tensor]]:
        name, hidden = f"{self.prefix}{number}", self.hidden
        yield self._norm(f"{name}.input_layernorm", hidden)
        yield self._norm(f"{name}.post_attention_layernorm", hidden)
        a = self.attention
        yield self._linear(f"{name}.self_attn.q_a_proj", a.q_lora_rank, hidden)
        yield self._norm(f"{name}.self_attn.q_a_layernorm", a.q_lora_rank)
        yield self._linear(
            f"{name}.self_attn.q_b_proj", HEADS * (a.qk_nope_head_dim + a.qk_rope_head_dim), a.q_lora_rank
        )
        yield self._linear(f"{name}.self_attn.kv_a_proj_with_mqa", a.kv_lora_rank + a.qk_rope_head_dim, hidden)
        yield self._norm(f"{name}.self_attn.kv_a_layernorm", a.kv_lora_rank)
        yield self._linear(f"{name}.self_attn.kv_b_proj", HEADS * (a.qk_nope_head_dim + a.v_head_dim), a.kv_lora_rank)
        yield self._linear(f"{name}.self_attn.o_proj", hidden, HEADS * a.v_head_dim)
        if number == 0:
            yield from self._mlp(f"{name}.mlp", 4 * self.intermediate)
            return
        yield self._linear(f"{name}.mlp.gate", self.experts, hidden)
        bias = torch.randn(self.experts, generator=self.generator) * 0.01
        yield f"{name}.mlp.gate.e_score_correction_bias", bias
        yield from self._mlp(f"{name}.mlp.shared_experts", self.intermediate)
        for expert in range(self.experts):
            for projection in PROJECTIONS:
                yield from self._expert(f"{name}.mlp.experts.{expert}.{projection}", projection)

    def _expert(self, name: str, projection: str) -> Iterator[tuple[str, torch.Tensor]]:
        rows, columns = self._shape(projection, self.intermediate)
        weight = torch.randn(rows, columns, generator=self.generator) * columns**-0.5
        state = quantize(weight, self.full_range)
        state["weight_shape"] = state["weight_shape"].to(self.shape_dtype)
        for kind in ("weight_packed", "weight_scale", "weight_shape"):
            yield f"{name}.{kind}", state[kind]

    def rest(self) -> Iterator[tuple[str, torch.Tensor]]:
        root = self.prefix.removesuffix("layers.")
        yield self._linear(f"{root.removesuffix('model.')}lm_head", VOCABULARY, self.hidden)
        yield self._linear(f"{root}embed_tokens", VOCABULARY, self.hidden)
        yield self._norm(f"{root}norm", self.hidden)

    def projector(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield self._linear("mm_projector.linear_1", 64, 32)
        yield self._linear("mm_projector.linear_2", self.hidden, 64)

    def vision(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield self._linear("vision_tower.patch_embed.proj", 32, 48)
        yield self._norm("vision_tower.encoder.final_layernorm", 32)


def _save(path: Path, groups: list[list[tuple[str, torch.Tensor]]]) -> None:
    weight_map, total = {}, 0
    for number, group in enumerate(groups, 1):
        file = f"model-{number:05d}-of-{len(groups):06d}.safetensors"
        save_file(dict(group), path / file)
        for name, tensor in group:
            weight_map[name] = file
            total += tensor.nbytes
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (path / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))


def _text_config(
    layers: int, experts: int, hidden: int, intermediate: int, top_k: int, attention: Attention
) -> dict[str, Any]:
    config = asdict(attention)
    if config.pop("yarn"):
        config["rope_scaling"] = {
            "type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512, "beta_fast": 1.0, "beta_slow": 1.0,
            "mscale": 1.0, "mscale_all_dim": 1.0,
        }  # fmt: skip
        config["max_position_embeddings"] = 2048
    return {
        "architectures": ["DeepseekV3ForCausalLM"], "model_type": "kimi_k2", "attention_bias": False,
        "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"}, "attention_dropout": 0.0,
        "bos_token_id": 256, "eos_token_id": 257, "pad_token_id": 258, "first_k_dense_replace": 1,
        "hidden_act": "silu", "hidden_size": hidden, "initializer_range": 0.02, "intermediate_size": 4 * intermediate,
        "max_position_embeddings": 512, "moe_intermediate_size": intermediate, "moe_layer_freq": 1,
        "n_group": 1, "n_routed_experts": experts, "n_shared_experts": 1, "norm_topk_prob": True,
        "num_attention_heads": HEADS, "num_experts_per_tok": top_k, "num_hidden_layers": layers,
        "num_key_value_heads": HEADS, "num_nextn_predict_layers": 0, "rms_norm_eps": 1e-5, "rope_theta": 50000.0,
        "routed_scaling_factor": 2.5,
        "scoring_func": "sigmoid", "tie_word_embeddings": False, "topk_group": 1, "topk_method": "noaux_tc",
        "torch_dtype": "bfloat16", "use_cache": True, "vocab_size": VOCABULARY, **config,
    }  # fmt: skip


def side_files(path: Path) -> None:
    for file, text in SIDE_FILES.items():
        (path / file).parent.mkdir(exist_ok=True)
        (path / file).write_text(text)
    specials = [
        {"id": number, "content": text, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False,
         "special": True}
        for text, number in SPECIAL.items()
    ]  # fmt: skip
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    tokenizer = {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": specials, "normalizer": None,
        "pre_tokenizer": byte_level, "post_processor": None, "decoder": byte_level,
        "model": {"type": "BPE", "vocab": _byte_alphabet(), "merges": []},
    }  # fmt: skip
    (path / "tokenizer.json").write_text(json.dumps(tokenizer, indent=1))
    names = {"bos_token": "[BOS]", "eos_token": "[EOS]", "pad_token": "[PAD]"}
    (path / "tokenizer_config.json").write_text(
        json.dumps({**names, "tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 512}, indent=1)
    )


def _byte_alphabet() -> dict[str, int]:
    """The printable stand-ins of byte-level BPE: bytes that print stand for themselves, the rest move up past 255."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    alphabet, moved = {}, 0
    for byte in range(256):
        alphabet[chr(byte if byte in printable else 256 + moved)] = byte
        moved += byte not in printable
    return {**alphabet, **SPECIAL}
