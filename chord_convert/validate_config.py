"""Rules about config.json: the quantization block, key by key, and the model's own numbers."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from jsonschema import Draft202012Validator

from chord_convert.report import Problem, show
from chord_convert.validate_facts import PLACES, Facts, Rule, without_nulls
from chord_convert.validate_kind import OR_ORIGINAL, ORIGINAL
from chord_runtime.format.block import BLOCK_K, GROUP_SIZE, STRIP_ROWS
from chord_runtime.resources import schema

CONFIG = "config.json"

# key: (accepted values, what is supported in words, next step). Missing and null are the same.
_WEIGHTS: dict[str, tuple[tuple[Any, ...], str, str]] = {
    "num_bits": ((4,), "4 bits", ORIGINAL),
    "type": (("int",), '"int"', ORIGINAL),
    "strategy": (("group",), '"group": one scale for 32 elements of a row', ORIGINAL),
    "group_size": ((GROUP_SIZE,), "groups of 32", f"Re-quantize with group_size 32, or {OR_ORIGINAL}"),
    "symmetric": ((True,), "true: no zero points", "Re-quantize with symmetric: true."),
    "dynamic": ((False, None), "false: scales stored with the weights", "Set it to false if the scales are stored."),
    "actorder": (
        (None, False, "weight", "static"),
        'null, or an activation ordering that leaves the columns in place ("weight", "static")',
        'Re-quantize without actorder, or with actorder "static".',
    ),
    "block_structure": ((None,), "null", "Re-quantize by groups along the input."),
}


def _group(facts: Facts) -> tuple[str, Mapping[str, Any]] | None:
    """The one config group: its key and content."""
    groups = (facts.block or {}).get("config_groups")
    if isinstance(groups, dict) and len(groups) == 1:
        ((name, group),) = groups.items()
        if isinstance(group, dict):
            return f"{facts.block_key}.config_groups.{name}", group
    return None


def blocks_agree(facts: Facts) -> Iterator[Problem]:
    """One quantization block, or equal ones where loaders look for it; none for other parts of the model."""
    known = [path for path in PLACES if path in facts.blocks]
    for path in known[1:]:
        if without_nulls(facts.blocks[path]) != without_nulls(facts.block):
            found = f"another block than in {facts.block_key}: {_first_difference(facts.block, facts.blocks[path])}"
            yield Problem(
                "blocks-disagree", CONFIG, ".".join(path), found, "one block, or equal ones",
                "Compare config.json with the repository that the weights came from, and remove the stale block.",
            )  # fmt: skip
    for path in facts.blocks:
        if path not in known:
            yield Problem(
                "extra-block", CONFIG, ".".join(path), "a quantization block for another part of the model",
                "one for the routed experts, at the top or in text_config",
                f"Remove it if it is stale; otherwise {OR_ORIGINAL}",
            )  # fmt: skip


def _first_difference(first: Any, second: Any, path: str = "") -> str:
    first, second = without_nulls(first), without_nulls(second)
    if isinstance(first, dict) and isinstance(second, dict):
        for key in sorted({*first, *second}, key=str):
            if first.get(key) != second.get(key):
                return _first_difference(first.get(key), second.get(key), f"{path}.{key}" if path else str(key))
    return f"{path or 'value'} is {show(second)} against {show(first)}"


def block_format(facts: Facts) -> Iterator[Problem]:
    """``format`` of the block."""
    found = (facts.block or {}).get("format")
    if found != "pack-quantized":
        yield Problem("format", CONFIG, f"{facts.block_key}.format", show(found), '"pack-quantized"', ORIGINAL)


def group_format(facts: Facts) -> Iterator[Problem]:
    """``format`` of the group, which newer compressed-tensors write too."""
    group = _group(facts)
    if group is not None and group[1].get("format") not in (None, "pack-quantized"):
        found = show(group[1].get("format"))
        yield Problem("group-format", CONFIG, f"{group[0]}.format", found, '"pack-quantized" or null', ORIGINAL)


def one_group(facts: Facts) -> Iterator[Problem]:
    """Exactly one config group, written out."""
    groups = (facts.block or {}).get("config_groups")
    key = f"{facts.block_key}.config_groups"
    if not isinstance(groups, dict) or not groups:
        yield Problem("config-groups", CONFIG, key, show(groups), "one group", ORIGINAL)
    elif len(groups) > 1:
        found = f"{len(groups)} groups ({', '.join(map(show, list(groups)[:4]))})"
        yield Problem(
            "config-groups", CONFIG, key, found, "one group: all experts quantized alike",
            f"Mixed schemes cannot be packed: {OR_ORIGINAL}",
        )  # fmt: skip
    elif _group(facts) is None:
        ((name, group),) = groups.items()
        yield Problem(
            "config-groups", CONFIG, f"{key}.{name}", show(group), "a group written out, with targets and weights",
            "Save the model again with a recent compressed-tensors, which writes presets out.",
        )  # fmt: skip


def weights(facts: Facts) -> Iterator[Problem]:
    """The group's ``weights``: how the numbers are quantized."""
    group = _group(facts)
    if group is None:
        return
    scheme = group[1].get("weights")
    if not isinstance(scheme, dict):
        yield Problem("weights", CONFIG, f"{group[0]}.weights", show(scheme), "a scheme for the weights", ORIGINAL)
        return
    for key, (accepted, supported, step) in _WEIGHTS.items():
        found = scheme.get(key)
        if not any(found == value and type(found) is type(value) for value in accepted):
            yield Problem(key.replace("_", "-"), CONFIG, f"{group[0]}.weights.{key}", show(found), supported, step)


def activations(facts: Facts) -> Iterator[Problem]:
    """Quantized inputs or outputs."""
    group = _group(facts)
    for key in ("input_activations", "output_activations"):
        if group is not None and group[1].get(key) is not None:
            found = show(group[1][key])
            yield Problem("activations", CONFIG, f"{group[0]}.{key}", found, "null: BF16 activations", ORIGINAL)


def targets(facts: Facts) -> Iterator[Problem]:
    """``targets`` of the group."""
    group = _group(facts)
    if group is None or group[1].get("targets") == ["Linear"]:
        return
    found = group[1].get("targets")
    step = 'Restore "targets": ["Linear"] from the original config.json.'
    if found == ["MoE"]:
        step = f'["MoE"] is an edit that one NPU backend asks for. {step}'
    yield Problem("targets", CONFIG, f"{group[0]}.targets", show(found), '["Linear"]', step)


def kv_cache(facts: Facts) -> Iterator[Problem]:
    """A quantized KV cache, whose scales would be lost."""
    found = (facts.block or {}).get("kv_cache_scheme")
    if found is not None:
        key = f"{facts.block_key}.kv_cache_scheme"
        yield Problem("kv-cache", CONFIG, key, show(found), "null", "Choose the KV cache's dtype when serving instead.")


def transforms(facts: Facts) -> Iterator[Problem]:
    """Rotations or sparsity that would have to be undone at run time."""
    for key in ("transform_config", "sparsity_config", "moe_sparsity_config"):
        found = (facts.block or {}).get(key)
        if found not in (None, {}):
            yield Problem(
                key.replace("_config", "").replace("_", "-"), CONFIG, f"{facts.block_key}.{key}", show(found), "null",
                f"Transformed or sparse weights need other kernels: {OR_ORIGINAL}",
            )  # fmt: skip


def status(facts: Facts) -> Iterator[Problem]:
    """``quantization_status``: weights that are not compressed yet are not packed."""
    found = (facts.block or {}).get("quantization_status")
    if found != "compressed":
        key = f"{facts.block_key}.quantization_status"
        yield Problem("status", CONFIG, key, show(found), '"compressed"', "Save the model compressed, then convert it.")


def ignore_list(facts: Facts) -> Iterator[Problem]:
    """``ignore`` is a list of names and ``re:`` patterns."""
    found = (facts.block or {}).get("ignore")
    key = f"{facts.block_key}.ignore"
    if found is not None and not (isinstance(found, list) and all(isinstance(entry, str) for entry in found)):
        yield Problem("ignore", CONFIG, key, show(found), "a list of names and re: patterns", ORIGINAL)
        return
    for entry in found or []:
        if entry.startswith("re:"):
            try:
                re.compile(entry[3:])
            except re.error as error:
                yield Problem(
                    "ignore", CONFIG, key, f"{show(entry)}, not a regular expression ({error})",
                    "patterns that Python's re accepts", "Correct the pattern.",
                )  # fmt: skip


def block_schema(facts: Facts) -> Iterator[Problem]:
    """Whatever else the JSON Schema of the block refuses: unknown keys that are set, wrong types."""
    if facts.block is None:
        return
    validator = Draft202012Validator(schema("source-quantization"))
    for error in validator.iter_errors(without_nulls(facts.block)):
        path = ".".join([facts.block_key, *(str(part) for part in error.absolute_path)])
        if error.validator == "additionalProperties":
            known = error.schema.get("properties", {})
            for key in sorted(set(error.instance) - set(known)):
                yield Problem(
                    "unknown-key", CONFIG, f"{path}.{key}", show(error.instance[key]), "the keys of "
                    "schemas/source-quantization.schema.json", "Remove the key if it does not change the weights; "
                    "otherwise this format is not one that Chord reads.",
                )  # fmt: skip
        else:
            yield Problem("schema", CONFIG, path, show(error.instance), _expected(error), ORIGINAL)


def _expected(error: Any) -> str:
    return f"{error.validator} {show(error.validator_value)} (schemas/source-quantization.schema.json)"


def architecture(facts: Facts) -> Iterator[Problem]:
    """The experts' activation: the kernels fuse SwiGLU."""
    for key, accepted in (("hidden_act", ("silu", "swish", None)), ("swiglu_limit", (None,))):
        found = facts.text.get(key)
        if found not in accepted:
            yield Problem(
                "activation", CONFIG, f"{facts.text_key}{key}", show(found),
                '"silu": SwiGLU without clamping' if key == "hidden_act" else "null: SwiGLU without clamping",
                "This model's experts compute something else; it cannot be served with Chord.",
            )  # fmt: skip


def model_numbers(facts: Facts) -> Iterator[Problem]:
    """Sizes that the converter and the kernels need."""
    keys = ("hidden_size", "moe_intermediate_size", "n_routed_experts", "num_experts_per_tok", "num_hidden_layers")
    for key in keys:
        if facts.number(key) is None:
            found = show(facts.text.get(key)) if key in facts.text else "no such key"
            yield Problem(
                "model-number", CONFIG, f"{facts.text_key}{key}", found, "a positive whole number",
                "Restore config.json from the repository that the weights came from.",
            )  # fmt: skip
        elif facts.text is not facts.config and facts.config.get(key) not in (None, facts.text[key]):
            found = f"{show(facts.config[key])} where text_config has {facts.text[key]}"
            yield Problem(
                "model-number", CONFIG, key, found, "numbers that agree",
                "Restore config.json from the repository that the weights came from.",
            )  # fmt: skip
    if facts.moe_layers is None and facts.number("num_hidden_layers") is not None:
        found = ", ".join(f"{key} {show(facts.text.get(key))}" for key in ("first_k_dense_replace", "moe_layer_freq"))
        yield Problem(
            "model-number", CONFIG, f"{facts.text_key}first_k_dense_replace", found, "whole numbers that say which "
            "layers have experts", "Restore config.json from the repository that the weights came from.",
        )  # fmt: skip


def experts_per_token(facts: Facts) -> Iterator[Problem]:
    """top-k cannot exceed the experts."""
    experts, top_k = facts.number("n_routed_experts"), facts.number("num_experts_per_tok")
    if experts is not None and top_k is not None and top_k > experts:
        yield Problem(
            "top-k", CONFIG, f"{facts.text_key}num_experts_per_tok", f"{top_k} of {experts} experts",
            "at most as many as there are experts", "Correct config.json.",
        )  # fmt: skip


def block_geometry(facts: Facts) -> Iterator[Problem]:
    """Widths must fill whole packed blocks, in both projections."""
    for key, multiple in (("hidden_size", STRIP_ROWS), ("moe_intermediate_size", BLOCK_K)):
        size = facts.number(key)
        if size is not None and size % multiple:
            yield Problem(
                "block-geometry", CONFIG, f"{facts.text_key}{key}", str(size), f"a multiple of {multiple}, so that "
                "gate, up and down fill whole packed blocks", "This model's shape cannot be packed.",
            )  # fmt: skip


CONFIG_RULES: list[Rule] = [
    blocks_agree, block_format, one_group, group_format, weights, activations, targets, kv_cache, transforms, status,
    ignore_list, architecture, model_numbers, experts_per_token, block_geometry,
]  # fmt: skip
