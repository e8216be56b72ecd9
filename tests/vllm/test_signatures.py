"""The hooks that the plugin uses have the signatures it relies on, in the installed vLLM and in the newest wheel.

The wheel is only read: it needs no GPU here, and a changed hook is found before a user finds it.
"""

from __future__ import annotations

import ast
import inspect
import os
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.vllm

MOE = "vllm.model_executor.layers.fused_moe"
QUANTIZATION = "vllm.model_executor.layers.quantization"
COMPRESSED = f"{QUANTIZATION}.compressed_tensors.compressed_tensors:CompressedTensorsConfig"

CALLED = {
    f"{MOE}.all2all_utils:maybe_make_prepare_finalize": "moe quant_config routing_tables allow_new_interface",
    f"{MOE}.modular_kernel:FusedMoEKernel.__init__": "self prepare_finalize fused_experts",
    f"{MOE}.modular_kernel:FusedMoEKernel.apply": (
        "self hidden_states w1 w2 topk_weights topk_ids activation global_num_experts expert_map "
        "apply_router_weight_on_input shared_experts shared_experts_input"
    ),
    f"{MOE}.modular_kernel:FusedMoEExperts.__init__": "self moe_config quant_config max_num_tokens num_dispatchers",
    f"{MOE}.modular_kernel:FusedMoEPrepareAndFinalize.activation_format": "self",
    f"{MOE}.modular_kernel:FusedMoEPrepareAndFinalize.max_num_tokens_per_rank": "self",
    f"{MOE}.modular_kernel:FusedMoEPrepareAndFinalize.num_dispatchers": "self",
    f"{MOE}.routed_experts:RoutedExperts._expert_routing_tables": "self",
    f"{MOE}.routed_experts:RoutedExperts.expert_map": "self",
    f"{QUANTIZATION}.__init__:register_quantization_config": "quantization",
    f"{COMPRESSED}.get_scheme_dict": "self layer layer_name",
    f"{COMPRESSED}.apply_vllm_mapper": ("self hf_to_vllm_mapper"),
    f"{COMPRESSED}._add_fused_moe_to_target_scheme_map": ("self"),
    "vllm.model_executor.model_loader.__init__:register_model_loader": "load_format",
    "vllm.model_executor.utils:set_weight_attrs": "weight weight_attrs",
    "vllm.config:get_current_vllm_config": "",
    "vllm.plugins.__init__:load_general_plugins": "",
}
"""Function → its parameters, or the first of them, in order."""

ATTRIBUTES = {
    f"{MOE}.routed_experts:RoutedExperts": (
        "layer_name moe_config activation global_num_experts local_num_experts apply_router_weight_on_input "
        "swiglu_limit swiglu_alpha swiglu_beta ckpt_gate_proj_name ckpt_up_proj_name ckpt_down_proj_name"
    ),
    f"{MOE}.config:FusedMoEConfig": (
        "num_experts hidden_dim intermediate_size intermediate_size_per_partition activation in_dtype has_bias "
        "is_lora_enabled moe_backend moe_parallel_config tp_size tp_rank ep_size max_num_tokens num_local_experts"
    ),
    f"{MOE}.config:FusedMoEParallelConfig": "enable_eplb all2all_backend use_batched_activation_format",
    f"{MOE}.modular_kernel:ExpertTokensMetadata": "expert_num_tokens",
    f"{MOE}.modular_kernel:FusedMoEActivationFormat": "Standard BatchedExperts",
    f"{MOE}.activation:MoEActivation": "SILU",
    f"{COMPRESSED}": "ignore target_scheme_map",
    f"{QUANTIZATION}.humming:HummingConfig": "full_config hf_to_vllm_mapper packed_modules_mapping",
}

TEXTS = {
    "vllm.plugins.__init__": ['"vllm.general_plugins"'],
    "vllm.config.model": ['overrides = ["humming"] + overrides', "override_quantization_method("],
    "vllm.model_executor.model_loader.ep_weight_filter": ['".weight_packed"'],
    f"{MOE}.topk_weight_and_reduce": ["class TopKWeightAndReduceNoOP", "class TopKWeightAndReduceDelegate"],
    f"{MOE}.config": ["FUSED_MOE_UNQUANTIZED_CONFIG: FusedMoEQuantConfig"],
}

LOADER_KEYWORDS = {"shard_id", "expert_id", "return_success"}
"""What a parameter's own weight_loader is called with by the model classes."""


def _sources() -> dict[str, Path]:
    import vllm

    found = {"installed": Path(vllm.__file__).parents[1]}
    if os.environ.get("VLLM_SOURCES"):
        found["newest"] = Path(os.environ["VLLM_SOURCES"])
    return found


@pytest.fixture(params=["installed", "newest"])
def root(request: pytest.FixtureRequest) -> Path:
    sources = _sources()
    if request.param not in sources:
        pytest.skip("VLLM_SOURCES names no unpacked wheel; .ci/vllm.sh sets it")
    return sources[request.param]


@cache
def tree(root: Path, module: str) -> ast.Module:
    path = root / Path(*module.split(".")).with_suffix(".py")
    if not path.exists():
        path = root.joinpath(*module.split("."), "__init__.py")
    return ast.parse(path.read_text())


def find(root: Path, place: str) -> Any:
    """The definition at ``module:Class.function``, following one re-export."""
    module, _, name = place.partition(":")
    body = tree(root, module).body
    node: Any = None
    for part in name.split("."):
        nodes = [n for n in body if getattr(n, "name", None) == part]
        if not nodes and node is None:
            for statement in body:
                if isinstance(statement, ast.ImportFrom) and any(alias.name == part for alias in statement.names):
                    assert statement.module is not None
                    return find(root, f"{statement.module}:{name}")
        assert nodes, f"{place} is gone"
        node = nodes[-1]
        body = getattr(node, "body", [])
    return node


def parameters(node: Any) -> list[str]:
    return [a.arg for a in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]


def own_classes() -> Iterator[type]:
    from chord_runtime.integrations.vllm import adopt, config, experts, loader, method

    for module in (adopt, config, experts, loader, method):
        for value in vars(module).values():
            if inspect.isclass(value) and value.__module__ == module.__name__:
                yield value


def overrides() -> list[tuple[str, list[str], bool, str]]:
    """(ours, its parameters, whether *args follow, place of the vLLM method that it overrides)."""
    found = []
    for cls in own_classes():
        for name, value in vars(cls).items():
            function = inspect.unwrap(getattr(value, "__func__", getattr(value, "fget", value)))
            if not inspect.isfunction(function) or name == "__init__":
                continue
            for base in cls.__mro__[1:]:
                if base.__module__.startswith("vllm.") and name in vars(base):
                    kinds = inspect.signature(function).parameters.values()
                    names = [p.name for p in kinds if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
                    variable = any(p.kind is p.VAR_POSITIONAL for p in kinds)
                    found.append((cls.__name__, names, variable, f"{base.__module__}:{base.__name__}.{name}"))
                    break
    return found


def test_overrides_match(root: Path) -> None:
    found = overrides()
    assert len(found) > 25
    for ours, names, variable, place in found:
        theirs = parameters(find(root, place))
        if theirs and theirs[0] in ("self", "cls") and names[:1] != theirs[:1]:
            theirs = theirs[1:] if names[:1] not in (["self"], ["cls"]) else names[:1] + theirs[1:]
        expected = theirs[: len(names)] if variable else theirs
        assert names == expected, f"{ours} overrides {place} with other parameters"


@pytest.mark.parametrize("place", CALLED)
def test_called_functions(root: Path, place: str) -> None:
    found, wanted = find(root, place), CALLED[place].split()
    assert parameters(found)[: len(wanted)] == wanted
    defaults = len(found.args.defaults)
    required = parameters(found)[: len(found.args.args) - defaults]
    assert set(required) <= set(wanted), "a required parameter was added"


@pytest.mark.parametrize("place", ATTRIBUTES)
def test_attributes(root: Path, place: str) -> None:
    node = find(root, place)
    has = {getattr(n, "name", None) for n in node.body}
    for statement in ast.walk(node):
        targets = getattr(statement, "targets", [getattr(statement, "target", None)])
        for target in targets:
            has.add(getattr(target, "attr", None) or getattr(target, "id", None))
    assert set(ATTRIBUTES[place].split()) <= has


@pytest.mark.parametrize("module", TEXTS)
def test_texts(root: Path, module: str) -> None:
    text = ast.unparse(tree(root, module)).replace("'", '"')
    for wanted in TEXTS[module]:
        assert wanted in text


def test_weight_loader_is_called_as_ours_expects(root: Path) -> None:
    for module in (f"{MOE}.routed_experts", "vllm.model_executor.models.deepseek_v2"):
        calls = [
            {keyword.arg for keyword in node.keywords} | set(map(str, range(len(node.args))))
            for node in ast.walk(tree(root, module))
            if isinstance(node, ast.Call)
            and getattr(node.func, "attr", getattr(node.func, "id", "")) == "weight_loader"
        ]
        known = LOADER_KEYWORDS | {"param", "loaded_weight", "weight_name", "0", "1", "2"}
        experts = [call for call in calls if call >= LOADER_KEYWORDS]
        assert experts
        assert all(call <= known for call in experts)
