"""Ordinary INT4 checkpoints: their experts are packed at load, every other layer stays with the class that had it."""

from __future__ import annotations

import copy
from typing import Any

import torch
from compressed_tensors.quantization import QuantizationArgs
from vllm.logger import init_logger
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import CompressedTensorsConfig
from vllm.model_executor.layers.quantization.humming import HummingConfig

from chord_runtime.errors import ChordError
from chord_runtime.format.block import GROUP_SIZE
from chord_runtime.integrations.vllm.limits import activation_dtypes, refusal
from chord_runtime.integrations.vllm.method import LoadTimeExpertsMethod

logger = init_logger("vllm.chord")


def experts_scheme(config: CompressedTensorsConfig, layer: RoutedExperts, prefix: str) -> str | None:
    """None if the experts of ``layer`` are INT4 as Chord packs them, else what they are instead.

    Ignore lists and targets are vLLM's to read: each projection of expert 0 is looked up as vLLM does it.
    """
    config._add_fused_moe_to_target_scheme_map()
    names = (layer.ckpt_gate_proj_name, layer.ckpt_up_proj_name, layer.ckpt_down_proj_name)
    schemes = [config.get_scheme_dict(layer, f"{prefix}.0.{name}") for name in names]
    scheme = schemes[0]
    if any(other != scheme for other in schemes):
        return "quantized differently in gate, up and down"
    if scheme is None:
        return "not quantized"
    weights = scheme["weights"]
    if scheme["format"] != "pack-quantized" or scheme["input_activations"] is not None:
        return (
            f"in format {scheme['format']} with {'quantized' if scheme['input_activations'] else 'plain'} activations"
        )
    assert isinstance(weights, QuantizationArgs)
    found = (str(getattr(weights.type, "value", weights.type)), weights.num_bits, weights.group_size, weights.symmetric)
    if found != ("int", 4, GROUP_SIZE, True) or weights.actorder not in (None, "static", "weight") or weights.dynamic:
        kind, bits, group, symmetric = found
        return f"{kind}{bits}, group size {group}, {'symmetric' if symmetric else 'asymmetric'}"
    return None


class NamedCompressedTensorsConfig(CompressedTensorsConfig):
    """``--quantization chord``: the experts must be Chord's to take; linear layers are vLLM's as ever."""

    @classmethod
    def get_min_capability(cls) -> int:
        """Hopper."""
        return 90

    def get_name(self) -> str:
        """As named on the command line."""
        return "chord"

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        """See ``activation_dtypes``."""
        return activation_dtypes()

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> QuantizeMethodBase | None:
        """Chord's method for experts; raises ChordError if they are not INT4 group 32 symmetric."""
        if not isinstance(layer, RoutedExperts):
            return super().get_quant_method(layer, prefix)
        other = experts_scheme(self, layer, prefix)
        if other is not None:
            raise ChordError(
                f"--quantization chord: the experts {prefix} are {other}; Chord packs int4, group size {GROUP_SIZE}, "
                "symmetric, weight-only: start without --quantization to let vLLM choose"
            )
        return LoadTimeExpertsMethod(layer)


class OptInCompressedTensorsConfig(CompressedTensorsConfig):
    """With CHORD_VLLM=1 and no other backend asked for: INT4 experts go to Chord, all else where vLLM sends it."""

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> QuantizeMethodBase | None:
        """Chord's method for experts that it can take under this deployment, else vLLM's choice."""
        if isinstance(layer, RoutedExperts) and _takes(self, layer, prefix):
            return LoadTimeExpertsMethod(layer)
        return super().get_quant_method(layer, prefix)


class OptInHummingConfig(HummingConfig):
    """With CHORD_VLLM=1, ``--quantization humming``: INT4 experts go to Chord, all else to Humming."""

    @classmethod
    def get_supported_act_dtypes(cls) -> list[torch.dtype]:
        """Humming's, and on the CPU what Chord's reference takes."""
        return [*super().get_supported_act_dtypes(), *activation_dtypes()]

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> QuantizeMethodBase | None:
        """Chord's method for experts that it can take under this deployment, else Humming's."""
        if isinstance(layer, RoutedExperts) and self.full_config.get("quant_method") == "compressed-tensors":
            schemes = CompressedTensorsConfig.from_config(copy.deepcopy(self.full_config))
            mapper = getattr(self, "hf_to_vllm_mapper", None)
            if mapper is not None:
                schemes.apply_vllm_mapper(mapper)
            schemes.packed_modules_mapping = self.packed_modules_mapping
            if _takes(schemes, layer, prefix):
                return LoadTimeExpertsMethod(layer)
        if not isinstance(layer, (RoutedExperts, LinearBase)):
            # Humming has no method for these, but reads their schema before it says so, and for that it imports its
            # kernels, which a model without any layer for Humming does not need.
            return None
        return super().get_quant_method(layer, prefix)


def _takes(config: CompressedTensorsConfig, layer: RoutedExperts, prefix: str) -> bool:
    """Whether Chord takes the experts of ``layer``; if not, the log says why, once for each reason."""
    backend = layer.moe_config.moe_backend
    reason: Any = f"moe_backend={backend} was asked for" if backend not in ("auto", "humming") else None
    reason = reason or experts_scheme(config, layer, prefix) or refusal(layer)
    if reason is None:
        logger.info_once("Chord takes the INT4 experts of this checkpoint and packs them while loading")
    else:
        logger.info_once("Chord leaves the experts to vLLM's choice: %s", reason)
    return reason is None
