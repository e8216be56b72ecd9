"""One case for every refusal: what somebody did to a checkpoint, and what must be said about it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from tests.validate.editing import EXPERT, INDEX, Editor

CONFIG = "config.json"
BLOCK = "quantization_config"
GROUP = f"{BLOCK}.config_groups.group_0"
SHARD1, SHARD2, SHARD3 = (f"model-0000{number}-of-000004.safetensors" for number in (1, 2, 3))


@dataclass
class Case:
    """``edit`` breaks a good checkpoint; then ``rule`` speaks, at ``file`` and ``key``, saying ``found``.

    No rule speaks but ``rule`` and those in ``also``, because one damage should give one message.
    """

    name: str
    edit: Callable[[Editor], object]
    rule: str
    file: str
    key: str
    found: str
    step: str = ""
    also: set[str] = field(default_factory=set)
    form: str = "flat"


def method(name: str, found: str) -> Case:
    edit = lambda e: e.block(quant_method=name)  # noqa: E731
    return Case(f"method {name}", edit, "quant-method", CONFIG, f"{BLOCK}.quant_method", found, "Moonshot's INT4")


def weights(found: str, step: str = "", **change: Any) -> Case:
    (key,) = change
    rule = key.replace("_", "-")
    return Case(f"{key} {found}", lambda e: e.weights(**change), rule, CONFIG, f"{GROUP}.weights.{key}", found, step)


def block(rule: str, found: str, step: str = "", **change: Any) -> Case:
    (key,) = change
    return Case(f"{key} {found}", lambda e: e.block(**change), rule, CONFIG, f"{BLOCK}.{key}", found, step)


def model(rule: str, found: str, also: set[str] | None = None, **change: Any) -> Case:
    (key,) = change
    return Case(f"{key} {found}", lambda e: e.config(**change), rule, CONFIG, key, found, "", also or set())


def without(*names: str) -> Callable[[Editor], None]:
    return lambda e: e.tensors(lambda tensors: [tensors.pop(name) for name in names])


def with_tensor(name: str, tensor: torch.Tensor) -> Callable[[Editor], None]:
    return lambda e: e.tensors(lambda tensors: tensors.update({name: tensor}))


def changed(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Editor], None]:
    return lambda e: e.tensors(lambda tensors: tensors.update({name: change(tensors[name])}))


def experts_as(**kinds: torch.Tensor) -> Callable[[Editor], None]:
    return lambda e: e.convert_experts(lambda module: dict(kinds))


def u8(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.uint8)


def f8(*shape: int) -> torch.Tensor:
    return torch.zeros(shape).to(torch.float8_e4m3fn)


def bf16(*shape: int) -> torch.Tensor:
    return torch.ones(shape, dtype=torch.bfloat16)


def i32(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.int32)


NVFP4 = {"weight": u8(64, 64), "weight_scale": f8(64, 8), "weight_scale_2": torch.ones(1)}


def nvfp4_of_k25(e: Editor) -> None:
    """As published: NVFP4 tensors, hf_quant_config.json, and the INT4 block still in text_config."""
    experts_as(**NVFP4)(e)
    text = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "NVFP4", "group_size": 16}}
    (e.path / "hf_quant_config.json").write_text(json.dumps(text))


def only_files(*names: str) -> Callable[[Editor], None]:
    def work(e: Editor) -> None:
        for path in e.path.glob("*.safetensors*"):
            path.unlink()
        for name in names:
            (e.path / name).write_bytes(b"data")

    return work


def k3_tensors(e: Editor) -> None:
    e.rename(lambda name: name.replace(".mlp.experts.", ".block_sparse_moe.experts."))
    e.config(n_routed_experts=896)


def missing_layer(e: Editor) -> None:
    e.tensors(lambda tensors: [tensors.pop(name) for name in list(tensors) if name.startswith("model.layers.2.mlp.ex")])


def dense_layer_with_experts(e: Editor) -> None:
    def work(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if name.startswith("model.layers.1.mlp.")]:
            tensors[name.replace("layers.1", "layers.0")] = tensors[name].clone()

    e.tensors(work)


def expert_to(number: int) -> Callable[[Editor], None]:
    return lambda e: e.rename(lambda name: name.replace(".1.mlp.experts.3.", f".1.mlp.experts.{number}."))


def group_128(e: Editor) -> None:
    def work(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if name.endswith(".weight_scale") and "down_proj" not in name]:
            tensors[name] = tensors[name][:, :1].contiguous()

    e.tensors(work)


def truncated(e: Editor) -> None:
    with (e.path / SHARD2).open("r+b") as file:
        file.truncate((e.path / SHARD2).stat().st_size - 100)


def duplicated(e: Editor) -> None:
    (e.path / "extra.safetensors").write_bytes((e.path / SHARD2).read_bytes())


def moved_in_index(e: Editor) -> None:
    e.json(INDEX, lambda index: index["weight_map"].update({f"{EXPERT}.weight_scale": SHARD1}))


def named_in_index(e: Editor) -> None:
    e.json(INDEX, lambda index: index["weight_map"].update({"model.layers.1.new": SHARD2}))


def not_in_index(e: Editor) -> None:
    e.json(INDEX, lambda index: index["weight_map"].pop(f"{EXPERT}.weight_scale"))


def file_in_index(name: str) -> Callable[[Editor], None]:
    return lambda e: e.json(INDEX, lambda index: index["weight_map"].update({"model.more.weight": name}))


def remove(file: str) -> Callable[[Editor], None]:
    return lambda e: (e.path / file).unlink()


def write(file: str, content: str | bytes) -> Callable[[Editor], None]:
    return lambda e: (e.path / file).write_bytes(content if isinstance(content, bytes) else content.encode())


def top_level_block(e: Editor) -> None:
    """A second block at the top, for another group size."""

    def work(config: dict[str, Any]) -> None:
        config[BLOCK] = json.loads(json.dumps(config["text_config"][BLOCK]))
        config[BLOCK]["config_groups"]["group_0"]["weights"]["group_size"] = 128

    e.json(CONFIG, work)


KIND_CASES = [
    Case("chord output", lambda e: e.block(quant_method="chord"), "already-packed", CONFIG, BLOCK, "packed already",
         "Load it as it is"),
    Case("chord manifest", write("chord-manifest.json", "{}"), "already-packed", CONFIG, BLOCK, "packed already"),
    Case("chord unfinished", write("chord-progress.json", "{}"), "already-packed", "chord-progress.json", "",
         "an unfinished output", "Run chord-convert again"),
    Case("GGUF", only_files("Q4_K_M.gguf", "b.gguf"), "gguf", "Q4_K_M.gguf", "", "GGUF files (2) and no safetensors"),
    Case("MLX", lambda e: e.config(quantization={"bits": 4, "group_size": 64}), "mlx", CONFIG, "quantization",
         "an MLX conversion (4 bits, group 64)"),
    Case("MLX alone", lambda e: e.config(quantization_config={"bits": 4, "group_size": 32}), "mlx", CONFIG, BLOCK,
         "an MLX conversion (4 bits, group 32)"),
    Case("K3 model type", lambda e: e.config(model_type="kimi_k3", n_routed_experts=896), "kimi-k3", CONFIG,
         "model_type", "the model type of Kimi K3, 896 experts", "K3 is MXFP4"),
    Case("K3 tensors", k3_tensors, "kimi-k3", SHARD2, "block_sparse_moe.experts.0",
         "experts named as in Kimi K3", "K3 is MXFP4"),
    Case("pickle", only_files("pytorch_model-00001.bin"), "no-safetensors", "pytorch_model-00001.bin", "",
         "files of another kind (1)"),
    Case("nothing", only_files(), "no-safetensors", "", "", "no .safetensors file", "download is complete"),
    method("awq", "AWQ"), method("gptq", "GPTQ"), method("auto-round", "AutoRound"),
    method("intel/auto-round", "AutoRound"), method("quark", "Quark"), method("modelopt", "ModelOpt"),
    method("fp8", "FP8"), method("w4afp8", "W4AFP8"), method("humming", "Humming"),
    method("bitsandbytes", "bitsandbytes"), method("mxfp4", "MXFP4"), method("gguf", "GGUF"),
    method("newest", '"newest"'),
    Case("no method", lambda e: e.block(quant_method=...), "quant-method", CONFIG, f"{BLOCK}.quant_method",
         "no quant_method"),
    Case("block no object", lambda e: e.config(quantization_config="int4"), "quant-method", CONFIG, BLOCK, '"int4"'),
    Case("BF16 dump", lambda e: (e.config(quantization_config=...), experts_as(weight=bf16(64, 128))(e)),
         "no-quantization", CONFIG, BLOCK, "no quantization_config and experts in BF16", "unquantized model"),
    Case("lost block", lambda e: e.config(quantization_config=...), "no-quantization", CONFIG, BLOCK,
         "no quantization_config, though the experts are packed INT4", "Restore config.json"),
    Case("null block", lambda e: e.config(quantization_config=None), "no-quantization", CONFIG, BLOCK, "no quant"),
]  # fmt: skip

PACKED = f"{EXPERT}.weight_packed"
WEIGHT = "model.layers.1.mlp.experts.0.down_proj"
FORMAT_CASES = [
    Case("NVFP4 of K2.5", nvfp4_of_k25, "tensor-format", "model-00002-of-000006.safetensors",
         "down_proj.weight", "NVFP4 experts, though config.json (text_config.quantization_config) says INT4",
         also={"hf-quant-config"}, form="nested"),
    Case("hf_quant_config", write("hf_quant_config.json", '{"quantization": {"quant_algo": "NVFP4"}}'),
         "hf-quant-config", "hf_quant_config.json", "quantization.quant_algo", '"NVFP4", though config.json',
         "Delete it if it was left behind by mistake"),
    Case("hf_quant_config broken", write("hf_quant_config.json", "{"), "json", "hf_quant_config.json", "", "not JSON"),
    Case("NVFP4 compressed-tensors", experts_as(weight_packed=u8(64, 64), weight_scale=f8(64, 8)), "tensor-format",
         SHARD2, f"{WEIGHT}.weight_packed", "NVFP4 experts"),
    Case("MXFP4", experts_as(weight_packed=u8(64, 64), weight_scale=u8(64, 4)), "tensor-format", SHARD2, WEIGHT,
         "MXFP4 experts, though config.json"),
    Case("MXFP4 modelopt", experts_as(weight=u8(64, 64), weight_scale=u8(64, 4)), "tensor-format", SHARD2, WEIGHT,
         "MXFP4 experts"),
    Case("U8", experts_as(weight_packed=u8(64, 64)), "tensor-format", SHARD2, WEIGHT, "U8 experts"),
    Case("FP8", experts_as(weight=f8(64, 128), weight_scale_inv=torch.ones(1, 1)), "tensor-format", SHARD2, WEIGHT,
         "FP8 experts"),
    Case("W4AFP8", experts_as(weight=torch.zeros(64, 64, dtype=torch.int8), weight_scale_inv=bf16(64, 1)),
         "tensor-format", SHARD2, WEIGHT, "INT8 or W4AFP8 experts"),
    Case("GPTQ", experts_as(qweight=i32(16, 64), qzeros=i32(4, 8), scales=bf16(4, 64), g_idx=i32(128)),
         "tensor-format", SHARD2, f"{WEIGHT}.qweight", "GPTQ experts"),
    Case("AWQ", experts_as(qweight=i32(128, 8), qzeros=i32(4, 8), scales=bf16(4, 64)), "tensor-format", SHARD2,
         f"{WEIGHT}.qweight", "AWQ or GPTQ experts"),
    Case("MLX tensors", experts_as(weight=i32(64, 16), scales=bf16(64, 4), biases=bf16(64, 4)), "tensor-format",
         SHARD2, f"{WEIGHT}.weight", "MLX experts"),
    Case("BF16 under an INT4 block", experts_as(weight=bf16(64, 128)), "tensor-format", SHARD2, WEIGHT,
         "unquantized BF16 experts, though config.json (quantization_config) says INT4"),
    Case("fused", lambda e: e.tensors(lambda t: (
        [t.pop(name) for name in list(t) if ".mlp.experts." in name],
        t.update({"model.layers.1.mlp.experts.gate_up_proj": bf16(4, 128, 128)}))),
        "tensor-format", SHARD2, "experts.gate_up_proj", "fused experts"),
]  # fmt: skip

CONFIG_CASES = [
    Case("no config", remove(CONFIG), "no-config", CONFIG, "", "no such file"),
    Case("broken config", write(CONFIG, "{"), "json", CONFIG, "", "text that is not JSON"),
    Case("twice", write(CONFIG, '{"hidden_size": 1, "hidden_size": 2}'), "json", CONFIG, "", '"hidden_size" twice'),
    Case("a list", write(CONFIG, "[]"), "json", CONFIG, "", "a JSON list"),
    block("format", '"nvfp4-pack-quantized"', format="nvfp4-pack-quantized"),
    block("format", '"mxfp4-pack-quantized"', format="mxfp4-pack-quantized"),
    block("format", '"float-quantized"', format="float-quantized"),
    block("format", '"int-quantized"', format="int-quantized"),
    block("format", '"mixed-precision"', format="mixed-precision"),
    block("format", '"marlin-24"', format="marlin-24"),
    block("format", "null", format=...),
    block("config-groups", "2 groups", config_groups={"group_0": {}, "group_1": {}}),
    block("config-groups", "{}", config_groups={}),
    block("config-groups", "null", config_groups=None),
    Case("preset", lambda e: e.block(config_groups={"W4A16": ["Linear"]}), "config-groups", CONFIG,
         f"{BLOCK}.config_groups.W4A16", '["Linear"]', "writes presets out"),
    Case("group format", lambda e: e.group(format="int-quantized"), "group-format", CONFIG, f"{GROUP}.format",
         '"int-quantized"'),
    Case("no weights", lambda e: e.group(weights=None), "weights", CONFIG, f"{GROUP}.weights", "null"),
    weights("8", num_bits=8), weights("4.0", num_bits=4.0), weights("null", num_bits=None),
    weights('"float"', type="float"), weights('"channel"', strategy="channel"),
    weights('"tensor_group"', strategy="tensor_group"),
    weights("128", "Re-quantize with group_size 32", group_size=128), weights("16", group_size=16),
    weights("-1", group_size=-1), weights("false", "symmetric: true", symmetric=False),
    weights("true", dynamic=True), weights('"local"', dynamic="local"),
    weights('"group"', "without actorder", actorder="group"), weights('"dynamic"', actorder="dynamic"),
    weights("true", actorder=True), weights("[128, 128]", block_structure=[128, 128]),
    Case("input activations", lambda e: e.group(input_activations={"num_bits": 8}), "activations", CONFIG,
         f"{GROUP}.input_activations", '{"num_bits": 8}'),
    Case("output activations", lambda e: e.group(output_activations={"num_bits": 8}), "activations", CONFIG,
         f"{GROUP}.output_activations", '{"num_bits": 8}'),
    Case("targets MoE", lambda e: e.group(targets=["MoE"]), "targets", CONFIG, f"{GROUP}.targets", '["MoE"]',
         'one NPU backend asks for. Restore "targets": ["Linear"]'),
    Case("targets re", lambda e: e.group(targets=["re:.*experts.*"]), "targets", CONFIG, f"{GROUP}.targets", "experts"),
    Case("no targets", lambda e: e.group(targets=...), "targets", CONFIG, f"{GROUP}.targets", "null"),
    block("kv-cache", '{"num_bits": 8', kv_cache_scheme={"num_bits": 8, "type": "float"}),
    block("transform", "R1", transform_config={"config_groups": {"R1": {}}}),
    block("sparsity", "sparse-24", sparsity_config={"format": "sparse-24-bitmask"}),
    block("moe-sparsity", "{", moe_sparsity_config={"layers": [1]}),
    block("status", '"frozen"', "Save the model compressed", quantization_status="frozen"),
    block("status", "null", quantization_status=None),
    block("ignore", '"lm_head"', ignore="lm_head"),
    block("ignore", '"re:(", not a regular expression', ignore=["re:("]),
    block("unknown-key", '"fast"', "Remove the key if", rotation="fast"),
    Case("unknown weights key", lambda e: e.weights(codebook=[1]), "unknown-key", CONFIG, f"{GROUP}.weights.codebook",
         "[1]"),
    block("schema", "5", version=5),
    Case("blocks disagree", top_level_block, "blocks-disagree", CONFIG, "quantization_config",
         "config_groups.group_0.weights.group_size is ", "remove the stale block", form="nested"),
    Case("vision block", lambda e: e.json(CONFIG, lambda c: c["vision_config"].update({BLOCK: {
        "quant_method": "compressed-tensors"}})), "extra-block", CONFIG, "vision_config.quantization_config",
        "another part of the model", form="nested"),
    Case("two names", lambda e: e.config(compression_config={"quant_method": "compressed-tensors"}),
         "blocks-disagree", CONFIG, "compression_config", "another block than in quantization_config: config_groups"),
    model("activation", '"gelu"', hidden_act="gelu"), model("activation", "7.0", swiglu_limit=7.0),
    model("model-number", "no such key", hidden_size=...), model("model-number", '"128"', hidden_size="128"),
    model("model-number", "128.0", moe_intermediate_size=128.0), model("model-number", "0", n_routed_experts=0),
    model("model-number", "true", num_experts_per_tok=True), model("model-number", "-3", num_hidden_layers=-3),
    model("model-number", "first_k_dense_replace 1.5", first_k_dense_replace=1.5),
    Case("numbers disagree", lambda e: e.config(hidden_size=999), "model-number", CONFIG, "hidden_size",
         "999 where text_config has 128", form="nested"),
    model("top-k", "5 of 4 experts", num_experts_per_tok=5),
    model("block-geometry", "96", {"shape"}, moe_intermediate_size=96),
    model("block-geometry", "192", {"shape", "router"}, hidden_size=192),
]  # fmt: skip

FILE_CASES = [
    Case("no index", remove(INDEX), "no-index", INDEX, "", "4 safetensors files and no index"),
    Case("broken index", write(INDEX, "{"), "json", INDEX, "", "text that is not JSON"),
    Case("index without map", write(INDEX, '{"weight_map": ["a"]}'), "json", INDEX, "weight_map", '["a"]'),
    Case("missing shard", remove(SHARD3), "missing-file", INDEX, SHARD3, "tensors in this file, which is missing",
         "Finish the download"),
    Case("pickle in index", lambda e: (write("model.bin", "x")(e), file_in_index("model.bin")(e)), "missing-file",
         INDEX, "model.bin", "not a safetensors file"),
    Case("outside", file_in_index("../../secret.safetensors"), "missing-file", INDEX, "../../secret.safetensors",
         "which is missing"),
    Case("truncated", truncated, "header", SHARD2, "", "the file ends too early: truncated or still downloading"),
    Case("LFS pointer", write(SHARD2, "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"), "header",
         SHARD2, "", "a Git LFS pointer"),
    Case("empty shard", write(SHARD2, ""), "header", SHARD2, "", "a file of 0 bytes"),
    Case("index tensor elsewhere", moved_in_index, "index-tensor", SHARD1, f"{EXPERT}.weight_scale",
         f"it in {SHARD2}"),
    Case("index tensor nowhere", named_in_index, "index-tensor", SHARD2, "model.layers.1.new", "it in no file"),
    Case("tensor not in index", not_in_index, "unindexed-tensor", SHARD2, f"{EXPERT}.weight_scale",
         "a tensor that the index does not name"),
    Case("surplus shard", duplicated, "duplicate-tensor", "extra.safetensors", "e_score_correction_bias",
         f"the tensor here and in {SHARD2}"),
]  # fmt: skip

TENSOR_CASES = [
    Case("no experts", lambda e: e.tensors(lambda t: [t.pop(n) for n in list(t) if ".mlp.experts." in n]),
         "no-experts", "", "", "no tensor named"),
    Case("two prefixes",
         lambda e: e.rename(lambda n: n.replace("model.layers.2.mlp.experts.0", "m.layers.2.mlp.experts.0")),
         "prefix", SHARD3, "m.layers.2.mlp.experts.0.down_proj.weight_packed", 'another prefix than "model.layers."',
         also={"missing-expert"}),
    Case("strange expert name", with_tensor("model.layers.1.mlp.experts.x.up_proj.weight", bf16(2)), "expert-name",
         SHARD2, "experts.x.up_proj.weight", "an expert tensor with an unknown name"),
    Case("missing layer", missing_layer, "missing-expert", INDEX, "model.layers.2", "a MoE layer without experts"),
    Case("experts in a dense layer", dense_layer_with_experts, "surplus-layer", INDEX, "model.layers.0",
         "experts in a layer that has none"),
    Case("fewer layers in the config", lambda e: e.config(num_hidden_layers=2), "surplus-layer", INDEX,
         "model.layers.2", "experts in a layer that has none"),
    Case("missing expert", without(*(f"model.layers.1.mlp.experts.1.{p}_proj.weight_{k}"
         for p in ("gate", "up", "down") for k in ("packed", "scale", "shape"))), "missing-expert", INDEX,
         "model.layers.1.mlp.experts.1", "no such expert"),
    Case("missing projection", without(*(f"{EXPERT}.weight_{k}" for k in ("packed", "scale", "shape"))),
         "missing-expert", INDEX, EXPERT, "no such projection"),
    *(Case(f"missing {kind}", without(f"{EXPERT}.weight_{kind}"), "missing-expert", INDEX, f"{EXPERT}.weight_{kind}",
           f"no weight_{kind} beside the other tensors") for kind in ("packed", "scale", "shape")),
    Case("more experts in the config", lambda e: e.config(n_routed_experts=8), "missing-expert", CONFIG,
         "n_routed_experts", "8 experts", "Correct config.json", also={"router"}),
    Case("fewer experts in the config", lambda e: e.config(n_routed_experts=3), "surplus-expert", SHARD2,
         "model.layers.1.mlp.experts.3", "an expert beyond the last", also={"router"}),
    Case("expert 7 of 4", expert_to(7), "surplus-expert", SHARD2, "model.layers.1.mlp.experts.7",
         "an expert beyond the last", also={"missing-expert"}),
    Case("other projection", with_tensor("model.layers.1.mlp.experts.0.side_proj.weight_packed", i32(2, 2)),
         "projection", SHARD2, "side_proj", 'a projection named "side_proj"'),
    Case("weight and weight_packed", with_tensor(f"{EXPERT}.weight", bf16(64, 128)), "expert-weight", SHARD2,
         f"{EXPERT}.weight", "both .weight and .weight_packed", "may not agree"),
    Case("one BF16 expert", lambda e: e.tensors(lambda t: (
        [t.pop(f"{EXPERT}.weight_{k}") for k in ("packed", "scale", "shape")],
        t.update({f"{EXPERT}.weight": bf16(64, 128)}))), "expert-weight", SHARD2, f"{EXPERT}.weight",
        "an expert that is not quantized (BF16 .weight)"),
    *(Case(kind, with_tensor(f"{EXPERT}.{kind}", torch.ones(1)), "companion", SHARD2, f"{EXPERT}.{kind}", found)
      for kind, found in (("weight_g_idx", "an activation order"), ("weight_zero_point", "zero points"),
                          ("weight_scale_2", "a second scale"), ("weight_global_scale", "a global scale"),
                          ("input_scale", "quantized activations"), ("bias", "a bias"),
                          ("weight_new", 'a tensor of unknown kind "weight_new"'))),
    Case("scale cast to FP16", changed(f"{EXPERT}.weight_scale", lambda t: t.half()), "dtype", SHARD2,
         f"{EXPERT}.weight_scale", "dtype F16", "a cast changes them"),
    Case("scale cast to FP32", changed(f"{EXPERT}.weight_scale", lambda t: t.float()), "dtype", SHARD2,
         f"{EXPERT}.weight_scale", "dtype F32"),
    Case("words cast to I64", changed(PACKED, lambda t: t.long()), "dtype", SHARD2, PACKED, "dtype I64"),
    Case("shape as floats", changed(f"{EXPERT}.weight_shape", lambda t: t.float()), "dtype", SHARD2,
         f"{EXPERT}.weight_shape", "dtype F32"),
    Case("words cut", changed(PACKED, lambda t: t[:32]), "shape", SHARD2, PACKED, "shape [32, 16]"),
    Case("words transposed", changed(PACKED, lambda t: t.T.contiguous()), "shape", SHARD2, PACKED, "shape [16, 64]"),
    Case("shape of three", changed(f"{EXPERT}.weight_shape", lambda t: torch.cat([t, t[:1]])), "shape", SHARD2,
         f"{EXPERT}.weight_shape", "shape [3]"),
    Case("group 128 in the tensors", group_128, "shape", SHARD2, "weight_scale", "which are groups of 128",
         "Re-quantize with group_size 32"),
    Case("other hidden size", lambda e: e.config(hidden_size=256), "shape", SHARD2, "down_proj", "shape [128, 8]",
         also={"router"}),
    Case("no router", without("model.layers.1.mlp.gate.weight"), "router", INDEX, "model.layers.1.mlp.gate.weight",
         "no router"),
    Case("router of another size", changed("model.layers.1.mlp.gate.weight", lambda t: t[:3]), "router", SHARD2,
         "model.layers.1.mlp.gate.weight", "shape [3, 128]"),
    Case("bias of another size", changed("model.layers.1.mlp.gate.e_score_correction_bias", lambda t: t[:3]),
         "router", SHARD2, "e_score_correction_bias", "shape [3]"),
    Case("quantized attention", with_tensor("model.layers.1.self_attn.x_proj.weight_packed", i32(2, 2)),
         "packed-module", SHARD2, "self_attn.x_proj.weight_packed", "a quantized module outside the routed experts",
         also={"ignore-disagrees"}),
    Case("experts in ignore", lambda e: e.json(CONFIG, lambda c: c[BLOCK]["ignore"].append("re:.*experts.*")),
         "ignore-disagrees", CONFIG, f"{BLOCK}.ignore", "model.layers.N.mlp.experts.N.down_proj in the list"),
    Case("attention not in ignore", lambda e: e.json(CONFIG, lambda c: c[BLOCK]["ignore"].remove("re:.*self_attn.*")),
         "ignore-disagrees", CONFIG, f"{BLOCK}.ignore", "no entry for model.layers.N.self_attn.o_proj"),
]  # fmt: skip

CASES = [*KIND_CASES, *FORMAT_CASES, *CONFIG_CASES, *FILE_CASES, *TENSOR_CASES]
