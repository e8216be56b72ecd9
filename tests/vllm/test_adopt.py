"""Which layers of an ordinary checkpoint Chord takes, and that the others go where they would without Chord."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

from chord_runtime.errors import ChordError
from tests.checkpoints import quantization_block

pytestmark = pytest.mark.vllm

PREFIX = "model.layers.1.mlp.experts"


def block(change: Callable[[dict[str, Any], dict[str, Any]], Any] | None = None) -> dict[str, Any]:
    """Moonshot's quantization_config, with one change to it or to its ``weights``."""
    config = copy.deepcopy(quantization_block())
    if change is not None:
        change(config, config["config_groups"]["group_0"]["weights"])
    return config


EIGHT_BITS = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
OTHERS: dict[str, tuple[Callable[[dict[str, Any], dict[str, Any]], Any], str]] = {
    "group size": (lambda config, weights: weights.update(group_size=128), "int4, group size 128, symmetric"),
    "bits": (lambda config, weights: weights.update(num_bits=8), "int8, group size 32"),
    "zero points": (lambda config, weights: weights.update(symmetric=False), "asymmetric"),
    "channel": (lambda config, weights: weights.update(strategy="channel", group_size=None), "group size None"),
    "ignored": (lambda config, weights: config["ignore"].append("re:.*mlp.experts.*"), "not quantized"),
    "activations": (
        lambda config, weights: config["config_groups"]["group_0"].update(input_activations=EIGHT_BITS),
        "with quantized activations",
    ),
}


@pytest.mark.parametrize("other", OTHERS)
def test_others_are_left_alone(layer: Any, other: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import CompressedTensorsConfig
    from vllm.model_executor.layers.quantization.humming import HummingConfig

    from chord_runtime.integrations.vllm import adopt

    change, said = OTHERS[other]
    for mine, theirs in (
        (adopt.OptInCompressedTensorsConfig, CompressedTensorsConfig),
        (adopt.OptInHummingConfig, HummingConfig),
    ):
        asked = []
        monkeypatch.setattr(theirs, "get_quant_method", lambda self, *args, asked=asked: asked.append(args))
        assert mine.from_config(block(change)).get_quant_method(layer, PREFIX) is None
        assert asked == [(layer, PREFIX)]
    named = adopt.NamedCompressedTensorsConfig.from_config(block(change))
    with pytest.raises(ChordError, match="--quantization chord: the experts model") as error:
        named.get_quant_method(layer, PREFIX)
    assert said in str(error.value)


@pytest.mark.parametrize(
    "change", [None, lambda config, weights: [weights.pop(key) for key in ("actorder", "observer_kwargs", "dynamic")]]
)
def test_int4_experts_are_taken(layer: Any, change: Any) -> None:
    """Newer compressed-tensors drop keys that are null or default: missing means the same."""
    from chord_runtime.integrations.vllm import adopt
    from chord_runtime.integrations.vllm.method import LoadTimeExpertsMethod

    for cls in (adopt.OptInCompressedTensorsConfig, adopt.OptInHummingConfig, adopt.NamedCompressedTensorsConfig):
        assert isinstance(cls.from_config(block(change)).get_quant_method(layer, PREFIX), LoadTimeExpertsMethod)


def test_names() -> None:
    """Which config vLLM takes for (method in config.json, --quantization)."""
    from chord_runtime.integrations.vllm.config import ChordConfig

    def override(method: str, asked: str | None) -> str | None:
        return ChordConfig.override_quantization_method({"quant_method": method}, asked)

    assert override("compressed-tensors", "chord") == override("chord", "humming") == "chord"
    assert override("compressed-tensors", None) is override("compressed-tensors", "humming") is None
    assert override("fp8", "chord") is override("chord", "fp8") is None


def test_another_backend_is_respected(layer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import CompressedTensorsConfig

    from chord_runtime.integrations.vllm.adopt import OptInCompressedTensorsConfig

    layer.moe_config.moe_backend = "marlin"
    monkeypatch.setattr(CompressedTensorsConfig, "get_quant_method", lambda self, *args: "Marlin")
    assert OptInCompressedTensorsConfig.from_config(block()).get_quant_method(layer, PREFIX) == "Marlin"


def test_deployments_that_chord_does_not_serve_are_left_alone(layer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import CompressedTensorsConfig

    from chord_runtime.integrations.vllm.adopt import OptInCompressedTensorsConfig

    layer.moe_config.in_dtype = torch.float16
    monkeypatch.setattr(CompressedTensorsConfig, "get_quant_method", lambda self, *args: "vLLM's")
    assert OptInCompressedTensorsConfig.from_config(block()).get_quant_method(layer, PREFIX) == "vLLM's"


def test_linear_layers_stay_with_vllm() -> None:
    """Attention and shared experts of a checkpoint taken by name are what they are without Chord."""
    from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod

    from chord_runtime.integrations.vllm import adopt

    linear = LinearBase.__new__(LinearBase)
    torch.nn.Module.__init__(linear)
    for cls in (adopt.OptInCompressedTensorsConfig, adopt.OptInHummingConfig, adopt.NamedCompressedTensorsConfig):
        method = cls.from_config(block()).get_quant_method(linear, "model.layers.1.mlp.shared_experts.down_proj")
        assert type(method) is UnquantizedLinearMethod


def test_packing_at_load_is_the_converters_packing(layer: Any) -> None:
    """The same bytes as in a packed directory, and the source tensors are gone afterwards."""
    from chord_runtime.format.layout import Projection
    from chord_runtime.format.packing import pack, pack_gate_up
    from chord_runtime.integrations.vllm.method import LoadTimeExpertsMethod, _pack_experts
    from tests.checkpoints import quantize

    generator = torch.Generator().manual_seed(0)
    parts = {
        name: [quantize(torch.randn(shape, generator=generator)) for _ in range(2)]
        for name, shape in (("gate", (128, 256)), ("up", (128, 256)), ("down", (256, 128)))
    }

    def stacked(name: str, key: str) -> torch.Tensor:
        return torch.stack([part[key] for part in parts[name]])

    words, scale = (
        torch.cat((stacked("gate", key), stacked("up", key)), 1) for key in ("weight_packed", "weight_scale")
    )
    w13 = _pack_experts("layer", Projection.W13, words, scale)
    w2 = _pack_experts("layer", Projection.W2, stacked("down", "weight_packed"), stacked("down", "weight_scale"))
    for expert in range(2):
        gate, up, down = (parts[name][expert] for name in ("gate", "up", "down"))
        both = (gate["weight_packed"], gate["weight_scale"], up["weight_packed"], up["weight_scale"])
        assert torch.equal(w13[expert], pack_gate_up(*both))
        assert torch.equal(w2[expert], pack(down["weight_packed"], down["weight_scale"]))
    assert LoadTimeExpertsMethod(layer).shapes == {Projection.W13: (256, 256), Projection.W2: (256, 128)}
