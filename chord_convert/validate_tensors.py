"""Rules about the tensors: all experts there, whole, of the right dtype and shape, and as the config describes them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice

from chord_convert.checkpoint import KINDS, PROJECTIONS
from chord_convert.report import Problem, name, show
from chord_convert.source.headers import TensorInfo
from chord_convert.validate_facts import Facts, Rule
from chord_convert.validate_kind import OR_ORIGINAL, ORIGINAL
from chord_runtime.format.block import GROUP_SIZE
from chord_runtime.format.layout import INDEX

DTYPES = {"weight_packed": ("I32",), "weight_scale": ("BF16",), "weight_shape": ("I32", "I64")}
_INCOMPLETE = "Download the checkpoint again, or take one that was saved whole."
_SHOWN = 3  # so many missing experts of a layer are named, the last one with the count of the rest
_WORD = 8  # 4-bit values in an int32 word

# Tensors beside the three kinds, and what they mean.
_COMPANIONS = {
    "weight_g_idx": "an activation order (act-order): columns are permuted",
    "weight_zero_point": "zero points: the quantization is asymmetric",
    "weight_scale_2": "a second scale, as NVFP4 has",
    "weight_global_scale": "a global scale, as NVFP4 has",
    "weight_scale_inv": "an FP8 scale",
    "input_scale": "a scale for quantized activations",
    "input_global_scale": "a scale for quantized activations",
    "bias": "a bias, which the kernels do not add",
}


def experts_present(facts: Facts) -> Iterator[Problem]:
    """There are routed experts, under one prefix, named as Kimi names them."""
    if facts.prefix is None:
        yield Problem(
            "no-experts", "", "", "no tensor named {prefix}layers.N.mlp.experts.N.gate_proj.weight_packed",
            "the routed experts of Kimi K2.x", ORIGINAL,
        )  # fmt: skip
    for key, expert in facts.experts.items():
        if expert.prefix != facts.prefix:
            yield Problem(
                "prefix", facts.tensors[key].file, name(key), f"another prefix than {show(facts.prefix)}",
                "one prefix for all layers", "Rename the tensors, or remove those that do not belong here.",
            )  # fmt: skip
    for key, tensor in facts.tensors.items():
        if ".mlp.experts." in key and key not in facts.experts:
            yield Problem(
                "expert-name", tensor.file, name(key), "an expert tensor with an unknown name",
                f"{{prefix}}layers.N.mlp.experts.N.{{{','.join(PROJECTIONS)}}}.{{{','.join(KINDS)}}}", ORIGINAL,
            )  # fmt: skip


def layers(facts: Facts) -> Iterator[Problem]:
    """Experts stand in the layers that the config says, and in no others."""
    expected = facts.moe_layers
    if expected is None:
        return
    for layer in sorted(facts.experts_of_layer.keys() - set(expected)):
        yield Problem(
            "surplus-layer", _place(facts), f"{facts.prefix}{layer}", "experts in a layer that has none",
            f"experts in {len(expected)} layers (num_hidden_layers, first_k_dense_replace, moe_layer_freq)",
            "Correct config.json, or remove the layer.",
        )  # fmt: skip
    for layer in expected:
        if facts.prefix is not None and layer not in facts.experts_of_layer:
            yield _missing(facts, f"{facts.prefix}{layer}", "a MoE layer without experts", "experts in each MoE layer")


def experts_complete(facts: Facts) -> Iterator[Problem]:
    """Every expert of every layer has three projections of three tensors each."""
    count = facts.number("n_routed_experts")
    if count is None or not facts.experts_of_layer:
        return
    # Experts that no layer has are a config that claims too many, told once.
    highest = min(count, 1 + max(max(experts) for experts in facts.experts_of_layer.values()))
    supported = f"experts 0 to {count - 1} in every MoE layer"
    if highest < count:
        yield Problem(
            "missing-expert", "config.json", f"{facts.text_key}n_routed_experts", f"{count} experts",
            f"the number of experts in the tensors, {highest}", "Correct config.json, or download the missing experts.",
        )  # fmt: skip
    for layer, present in sorted(facts.experts_of_layer.items()):
        stem = f"{facts.prefix}{layer}.mlp.experts."
        absent = highest - sum(expert < highest for expert in present)
        first = list(islice((expert for expert in range(highest) if expert not in present), _SHOWN))
        for expert in first:
            more = absent - len(first) if expert == first[-1] else 0
            yield replace(_missing(facts, f"{stem}{expert}", "no such expert", supported), more=more)
        for expert in sorted(present):
            if expert < highest:
                yield from _incomplete(facts, f"{stem}{expert}")


def _incomplete(facts: Facts, stem: str) -> Iterator[Problem]:
    for projection in PROJECTIONS:
        missing = [kind for kind in KINDS if f"{stem}.{projection}.{kind}" not in facts.names]
        if len(missing) < len(KINDS):
            for kind in missing:
                found = f"no {kind} beside the other tensors"
                yield _missing(facts, f"{stem}.{projection}.{kind}", found, f"all of {', '.join(KINDS)}")
        elif f"{stem}.{projection}.weight" not in facts.names:
            yield _missing(facts, f"{stem}.{projection}", "no such projection", f"all of {', '.join(PROJECTIONS)}")


def _missing(facts: Facts, key: str, found: str, supported: str) -> Problem:
    return Problem("missing-expert", _place(facts), name(key), found, supported, _INCOMPLETE)


def _place(facts: Facts) -> str:
    """The file that messages about absent tensors name."""
    return INDEX if facts.weight_map is not None else "*.safetensors"


def surplus_experts(facts: Facts) -> Iterator[Problem]:
    """No expert beyond the config's number, no projection of another name."""
    count = facts.number("n_routed_experts")
    seen = set()
    for key, expert in facts.experts.items():
        if expert.projection not in PROJECTIONS:
            yield Problem(
                "projection", facts.tensors[key].file, name(key), f"a projection named {show(expert.projection)}",
                "gate_proj, up_proj and down_proj", ORIGINAL,
            )  # fmt: skip
        elif count is not None and expert.expert >= count and (expert.layer, expert.expert) not in seen:
            seen.add((expert.layer, expert.expert))
            yield Problem(
                "surplus-expert", facts.tensors[key].file, name(key), "an expert beyond the last",
                f"experts 0 to {count - 1}, as config.json ({facts.text_key}n_routed_experts) says",
                "Correct config.json, or remove the surplus experts.",
            )  # fmt: skip


def one_weight_each(facts: Facts) -> Iterator[Problem]:
    """An expert is packed, and only packed."""
    for key, expert in facts.experts.items():
        if expert.kind != "weight":
            continue
        tensor = facts.tensors[key]
        if f"{key}_packed" in facts.names:
            found, step = "both .weight and .weight_packed", "Remove one of the two; they may not agree."
        else:
            found, step = f"an expert that is not quantized ({tensor.dtype} .weight)", ORIGINAL
        yield Problem("expert-weight", tensor.file, name(key), found, "weight_packed for every expert", step)


def companions(facts: Facts) -> Iterator[Problem]:
    """No tensors beside the three kinds."""
    for key, expert in facts.experts.items():
        if expert.kind not in KINDS and expert.kind != "weight":
            found = _COMPANIONS.get(expert.kind, f"a tensor of unknown kind {show(expert.kind)}")
            supported = "weight_packed, weight_scale and weight_shape only"
            yield Problem("companion", facts.tensors[key].file, name(key), found, supported, ORIGINAL)


def dtypes(facts: Facts) -> Iterator[Problem]:
    """Dtype of every expert tensor."""
    for key, expert in facts.experts.items():
        tensor, accepted = facts.tensors[key], DTYPES.get(expert.kind)
        if accepted is not None and tensor.dtype not in accepted:
            step = "Use the original BF16 scales: a cast changes them." if expert.kind == "weight_scale" else ORIGINAL
            supported = f"{' or '.join(accepted)} for {expert.kind}"
            yield Problem("dtype", tensor.file, name(key), f"dtype {tensor.dtype}", supported, step)


def shapes(facts: Facts) -> Iterator[Problem]:
    """Shape of every expert tensor, from the config's sizes."""
    hidden, intermediate = facts.number("hidden_size"), facts.number("moe_intermediate_size")
    if hidden is None or intermediate is None:
        return
    for key, expert in facts.experts.items():
        if expert.projection not in PROJECTIONS or expert.kind not in KINDS:
            continue
        n, k = (hidden, intermediate) if expert.projection == "down_proj" else (intermediate, hidden)
        expected = {"weight_packed": (n, k // _WORD), "weight_scale": (n, k // GROUP_SIZE), "weight_shape": (2,)}
        tensor = facts.tensors[key]
        if tensor.shape != expected[expert.kind]:
            yield _shape_problem(key, tensor, expected[expert.kind], expert.kind, k)


def _shape_problem(key: str, tensor: TensorInfo, expected: tuple[int, ...], kind: str, k: int) -> Problem:
    found, step = f"shape {list(tensor.shape)}", "Correct the sizes in config.json, or download the file again."
    columns = tensor.shape[-1] if tensor.shape else 0
    if kind == "weight_scale" and tensor.shape[:-1] == expected[:-1] and columns and k % columns == 0:
        found += f", which are groups of {k // columns}"
        step = f"Re-quantize with group_size {GROUP_SIZE}, or {OR_ORIGINAL}"
    return Problem("shape", tensor.file, name(key), found, f"{list(expected)} for this config.json", step)


def router(facts: Facts) -> Iterator[Problem]:
    """Every MoE layer has a router with one row, and one bias, for each expert."""
    count, hidden = facts.number("n_routed_experts"), facts.number("hidden_size")
    if count is None or hidden is None:
        return
    for layer in sorted(facts.experts_of_layer):
        for suffix, shape in (("weight", (count, hidden)), ("e_score_correction_bias", (count,))):
            key = f"{facts.prefix}{layer}.mlp.gate.{suffix}"
            tensor = facts.tensors.get(key)
            if tensor is not None and tensor.shape != shape:
                yield Problem(
                    "router", tensor.file, name(key), f"shape {list(tensor.shape)}",
                    f"{list(shape)}: a row for each expert of config.json",
                    "Correct n_routed_experts, or take a checkpoint whose router was cut with its experts.",
                )  # fmt: skip
            elif tensor is None and key not in facts.names and suffix == "weight":
                yield Problem("router", _place(facts), name(key), "no router", "one in every MoE layer", _INCOMPLETE)


def only_experts_packed(facts: Facts) -> Iterator[Problem]:
    """Nothing but routed experts is quantized: Chord passes everything else through."""
    for key, tensor in facts.tensors.items():
        if key.endswith((".weight_packed", ".qweight")) and key not in facts.experts and ".mlp.experts." not in key:
            yield Problem(
                "packed-module", tensor.file, name(key), "a quantized module outside the routed experts",
                "quantized routed experts, all else in BF16", f"Quantize the routed experts only, or {OR_ORIGINAL}",
            )  # fmt: skip


def config_agrees(facts: Facts) -> Iterator[Problem]:
    """What ``ignore`` leaves out is not quantized, and what it does not leave out is.

    ``re:`` entries match from the beginning (re.match), others by equality. Neither of Moonshot's lists names the
    router or the vision tower's modules, so only projections of the decoder layers are held against the list.
    """
    ignore = (facts.block or {}).get("ignore") or []
    plain = {entry for entry in ignore if not entry.startswith("re:")}
    patterns = [re.compile(entry[3:]) for entry in ignore if entry.startswith("re:")]
    key = f"{facts.block_key}.ignore"

    def ignored(module: str) -> bool:
        return module in plain or any(pattern.match(module) for pattern in patterns)

    for tensor in facts.tensors:
        module, _, kind = tensor.rpartition(".")
        if kind == "weight_packed" and ignored(module):
            yield Problem(
                "ignore-disagrees", "config.json", key, f"{_numbered(module)} in the list, though it is quantized",
                "a list that leaves the routed experts in", "Restore the list from the original config.json.",
            )  # fmt: skip
        elif kind == "weight" and facts.prefix and _is_projection(module, facts.prefix) and not ignored(module):
            yield Problem(
                "ignore-disagrees", "config.json", key, f"no entry for {_numbered(module)}, though it is not quantized",
                "a list that names every projection outside the routed experts",
                "Restore the list from the original config.json.",
            )  # fmt: skip


def _is_projection(module: str, prefix: str) -> bool:
    return module.startswith(prefix) and ".mlp.experts." not in module and "_proj" in module.rpartition(".")[2]


def _numbered(module: str) -> str:
    """The module of any layer and expert, so that one problem stands for all of them."""
    return name(re.sub(r"\.\d+\.", ".N.", module))


def embeddings(facts: Facts) -> Iterator[Problem]:
    """Embedding, final norm and head. A warning: they pass through, and a part of a model may lack them on purpose."""
    if facts.prefix is None:
        return
    root = facts.prefix.removesuffix("layers.")
    wanted = [f"{root}embed_tokens.weight", f"{root}norm.weight"]
    if not facts.text.get("tie_word_embeddings"):
        wanted.append(f"{root.removesuffix('model.')}lm_head.weight")
    for key in wanted:
        if key not in facts.names:
            yield Problem(
                "incomplete-model", _place(facts), name(key), "no such tensor", "a whole model",
                "Download the rest, unless a part of the model is meant.",
            )  # fmt: skip


TENSOR_RULES: list[Rule] = [
    experts_present, layers, experts_complete, surplus_experts, one_weight_each, companions, dtypes, shapes, router,
    only_experts_packed, config_agrees,
]  # fmt: skip
TENSOR_WARNINGS: list[Rule] = [embeddings]
