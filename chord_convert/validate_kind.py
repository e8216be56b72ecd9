"""Rules that recognize another kind of checkpoint altogether, and say which. One hit makes further rules pointless."""

from __future__ import annotations

from collections.abc import Iterator

from chord_convert.report import Problem, show
from chord_convert.validate_facts import Facts, Rule
from chord_runtime.format.layout import MANIFEST, PROGRESS

OR_ORIGINAL = "use Moonshot's INT4 checkpoint, or one quantized like it."
ORIGINAL = f"U{OR_ORIGINAL[1:]}"
SUPPORTED = 'quant_method "compressed-tensors" with format "pack-quantized" (INT4, group 32)'

METHODS = {
    "auto-round": "AutoRound, whose words are laid out as GPTQ's or AWQ's",
    "auto_round": "AutoRound, whose words are laid out as GPTQ's or AWQ's",
    "awq": "AWQ, which interleaves columns and has zero points",
    "bitsandbytes": "bitsandbytes (NF4 or LLM.int8), which is not INT4 with group scales",
    "fp8": "FP8 weights",
    "gptq": "GPTQ, which packs along the output and has zero points",
    "gguf": "GGUF",
    "humming": "Humming's own repacked weights",
    "intel/auto-round": "AutoRound, whose words are laid out as GPTQ's or AWQ's",
    "mlx": "MLX weights",
    "modelopt": "NVIDIA ModelOpt (NVFP4 or FP8)",
    "modelopt_fp4": "NVIDIA ModelOpt NVFP4",
    "mxfp4": "MXFP4 weights",
    "quark": "AMD Quark",
    "w4afp8": "W4AFP8: INT4 weights meant for FP8 activations, in another layout",
}


def already_packed(facts: Facts) -> Iterator[Problem]:
    """The output of chord-convert given as its input."""
    block = facts.block or {}
    if block.get("quant_method") == "chord" or MANIFEST in facts.files:
        yield Problem(
            "already-packed", "config.json", facts.block_key, "a checkpoint that Chord has packed already", SUPPORTED,
            "Load it as it is (`chord inspect`, `chord verify`), or validate the checkpoint it was made from.",
        )  # fmt: skip
    elif PROGRESS in facts.files:
        yield Problem(
            "already-packed", PROGRESS, "", "an unfinished output of chord-convert", SUPPORTED,
            "Run chord-convert again to finish it, or validate the checkpoint it is made from.",
        )  # fmt: skip


def gguf(facts: Facts) -> Iterator[Problem]:
    """GGUF files only."""
    found = facts.has_suffix(".gguf", ".ggml")
    if found and not facts.shards:
        yield Problem("gguf", found[0], "", f"GGUF files ({len(found)}) and no safetensors", SUPPORTED, ORIGINAL)


def mlx(facts: Facts) -> Iterator[Problem]:
    """MLX writes ``quantization`` beside ``quantization_config``, with ``bits`` and no ``quant_method``."""
    for key in ("quantization", "quantization_config"):
        block = facts.config.get(key)
        if isinstance(block, dict) and "bits" in block and "group_size" in block and "quant_method" not in block:
            found = f"an MLX conversion ({show(block['bits'])} bits, group {show(block['group_size'])})"
            yield Problem("mlx", "config.json", key, found, SUPPORTED, ORIGINAL)
            return


def kimi_k3(facts: Facts) -> Iterator[Problem]:
    """K3: MXFP4 tensors under other names."""
    model = " ".join(str(part.get("model_type")) for part in (facts.config, facts.text)).lower()
    named = next((name for name in facts.tensors if ".block_sparse_moe.experts." in name), None)
    if named is None and not any(mark in model for mark in ("kimi_k3", "kimi-k3", "kimik3")):
        return
    key = named or f"{facts.text_key}model_type"
    where = facts.tensors[named].file if named else "config.json"
    experts = facts.text.get("n_routed_experts") or facts.text.get("num_experts")
    found = "experts named as in Kimi K3 (block_sparse_moe, w1/w2/w3)" if named else "the model type of Kimi K3"
    yield Problem(
        "kimi-k3", where, key, found + (f", {show(experts)} experts" if experts else ""), "Kimi K2.x in INT4",
        "K3 is MXFP4: serve it with an engine that has MXFP4 kernels.",
    )  # fmt: skip


def pickled(facts: Facts) -> Iterator[Problem]:
    """Weights in pickle files, or no weights at all."""
    if facts.shards:
        return
    found = facts.has_suffix(".bin", ".pt", ".pth", ".npz")
    if found:
        yield Problem(
            "no-safetensors", found[0], "", f"files of another kind ({len(found)}) and no safetensors",
            "safetensors files", "Convert them to safetensors, or take the original checkpoint.",
        )  # fmt: skip
    else:
        yield Problem(
            "no-safetensors", "", "", "no .safetensors file", "a directory or repository with safetensors files",
            "Check the path, and that the download is complete.",
        )  # fmt: skip


def quant_method(facts: Facts) -> Iterator[Problem]:
    """Another quantization method, told apart by name."""
    for path, block in facts.blocks.items():
        key = ".".join(path)
        if not isinstance(block, dict):
            yield Problem("quant-method", "config.json", key, show(block), "an object", ORIGINAL)
            continue
        method = block.get("quant_method")
        if method in ("compressed-tensors", "chord"):
            continue
        known = METHODS.get(str(method).lower())
        found = f"{show(method)}" + (f": {known}" if known else "")
        if method is None:
            found = "no quant_method"
        yield Problem("quant-method", "config.json", f"{key}.quant_method", found, SUPPORTED, ORIGINAL)


def no_block(facts: Facts) -> Iterator[Problem]:
    """No quantization block: a BF16 dump, or a config that lost its block."""
    if facts.blocks:
        return
    dtypes = facts.expert_dtypes
    if dtypes.get("weight_packed") == {"I32"}:
        found = "no quantization_config, though the experts are packed INT4"
        step = "Restore config.json from the repository that the weights came from."
    else:
        kinds = sorted(dtypes.get("weight", set()))
        found = "no quantization_config" + (f" and experts in {', '.join(kinds)}" if kinds else "")
        step = f"This is an unquantized model: {OR_ORIGINAL}"
    yield Problem("no-quantization", "config.json", "quantization_config", found, SUPPORTED, step)


def tensor_format(facts: Facts) -> Iterator[Problem]:
    """Experts in another format than INT4, whatever the config says: NVFP4, MXFP4, FP8, GPTQ, AWQ, MLX, fused, BF16."""
    found = _format_of(facts)
    if found is None:
        return
    format_, example = found
    block = facts.block
    claim = ""
    if block is not None and block.get("format") == "pack-quantized":
        claim = f", though config.json ({facts.block_key}) says INT4 pack-quantized"
    yield Problem(
        "tensor-format", facts.tensors[example].file, example, f"{format_} experts{claim}",
        "I32 weight_packed with BF16 weight_scale for every expert", ORIGINAL,
    )  # fmt: skip


def _format_of(facts: Facts) -> tuple[str, str] | None:
    """Name of the experts' format and an example tensor, or None when INT4 experts exist (or none at all)."""
    dtypes = facts.expert_dtypes
    if "I32" in dtypes.get("weight_packed", ()):
        return None

    def example(kind: str) -> str:
        return next(name for name, expert in facts.experts.items() if expert.kind == kind)

    scales = dtypes.get("weight_scale", set())
    for kind in ("weight_packed", "weight"):
        if "U8" in dtypes.get(kind, ()):
            return ("NVFP4" if "F8_E4M3" in scales else "MXFP4" if scales & {"U8", "F8_E8M0"} else "U8"), example(kind)
    if "qweight" in dtypes:
        return ("GPTQ" if "g_idx" in dtypes else "AWQ or GPTQ"), example("qweight")
    if "scales" in dtypes and "weight" in dtypes:
        return "MLX", example("weight")
    weights = dtypes.get("weight", set())
    if any(dtype.startswith("F8") for dtype in weights):
        return "FP8", example("weight")
    if "I8" in weights:
        return "INT8 or W4AFP8", example("weight")
    if weights:
        return f"unquantized {'/'.join(sorted(weights))}", example("weight")
    fused = next((name for name in facts.tensors if ".mlp.experts." in name), None)
    if fused is not None and not dtypes:
        return "fused", fused
    return None


def hf_quant_config(facts: Facts) -> Iterator[Problem]:
    """hf_quant_config.json is ModelOpt's: with it a re-quantized model was published with the INT4 block left in."""
    if facts.hf_quant is None:
        return
    quantization = facts.hf_quant.get("quantization")
    algorithm = quantization.get("quant_algo") if isinstance(quantization, dict) else facts.hf_quant.get("quant_algo")
    claim = f", though config.json ({facts.block_key}) describes another" if facts.blocks else ""
    yield Problem(
        "hf-quant-config", "hf_quant_config.json", "quantization.quant_algo", f"{show(algorithm)}{claim}",
        "no hf_quant_config.json: ModelOpt writes it for formats that Chord does not read",
        f"Delete it if it was left behind by mistake; otherwise {OR_ORIGINAL}",
    )  # fmt: skip


FOREIGN_RULES: list[Rule] = [already_packed, gguf, mlx, kimi_k3, pickled, quant_method, no_block]
FORMAT_RULES: list[Rule] = [hf_quant_config, tensor_format]
