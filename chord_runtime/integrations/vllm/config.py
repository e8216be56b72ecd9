"""``quant_method: "chord"``: a packed directory tells vLLM that its experts are Chord's; nothing else is quantized."""

from __future__ import annotations

import re
from typing import Any

import torch
from vllm.config import get_current_vllm_config
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig, QuantizeMethodBase

from chord_runtime.errors import ChordError
from chord_runtime.format.metadata import Packing
from chord_runtime.integrations.vllm.limits import activation_dtypes

_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")


def layer_number(prefix: str) -> int:
    """The layer in a module name such as ``language_model.model.layers.3.mlp.experts``."""
    match = _LAYER.search(prefix)
    if match is None:
        raise ChordError(f"{prefix!r} names no layer: Chord serves models whose experts are in layers.N.mlp.experts")
    return int(match[1])


class ChordConfig(QuantizationConfig):
    """The quantization config of a packed directory; ``from_config`` also builds the one of an ordinary checkpoint."""

    def __init__(self, packing: Packing) -> None:
        super().__init__()
        self.packing = packing

    @classmethod
    def get_name(cls) -> str:
        """The name in config.json and of ``--quantization``."""
        return "chord"

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        """See ``activation_dtypes``."""
        return activation_dtypes()

    @classmethod
    def get_min_capability(cls) -> int:
        """Hopper."""
        return 90

    @staticmethod
    def get_config_filenames() -> list[str]:
        """None: all is in config.json."""
        return []

    @classmethod
    def override_quantization_method(
        cls, hf_quant_cfg: dict[str, Any], user_quant: str | None, hf_config: Any = None
    ) -> str | None:
        """``--quantization chord`` on a compressed-tensors checkpoint means: pack its experts while loading.

        And packed experts are Chord's under a command line written for Humming too.
        """
        method = hf_quant_cfg.get("quant_method")
        named = user_quant == "chord" and method == "compressed-tensors"
        packed = user_quant == "humming" and method == "chord"
        return "chord" if named or packed else None

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> QuantizationConfig:
        """From the ``quantization_config`` of config.json; raises FormatError for one that Chord did not write."""
        if config.get("quant_method") == "compressed-tensors":
            from chord_runtime.integrations.vllm.adopt import NamedCompressedTensorsConfig

            return NamedCompressedTensorsConfig.from_config(config)
        return cls(Packing.from_config(config))

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> QuantizeMethodBase | None:
        """Packed experts for the layers that were converted; everything else is as the source left it."""
        from vllm.model_executor.layers.fused_moe import RoutedExperts
        from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod

        from chord_runtime.integrations.vllm.method import PackedExpertsMethod

        if isinstance(layer, RoutedExperts) and layer_number(prefix) in self.packing.layers:
            model = get_current_vllm_config().model_config.model
            return PackedExpertsMethod(layer, self.packing, model)
        return UnquantizedLinearMethod() if isinstance(layer, LinearBase) else None
