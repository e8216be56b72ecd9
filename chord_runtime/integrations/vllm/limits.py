"""What Chord's experts do not do, found before anything is loaded."""

from __future__ import annotations

import os

import torch
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.platforms import current_platform

from chord_runtime.errors import UsageError
from chord_runtime.format.block import check_shape


def activation_dtypes() -> list[torch.dtype]:
    """bfloat16; on the CPU, where the reference runs, float32 too."""
    return [torch.bfloat16, torch.float32] if current_platform.is_cpu() else [torch.bfloat16]


def refusal(layer: RoutedExperts) -> str | None:
    """One sentence that names the first thing this deployment asks for and Chord does not do; None if there is none.

    Batch invariance is not among them: a row's result depends on no other row, whatever the batch.
    """
    moe = layer.moe_config
    parallel = moe.moe_parallel_config
    for asked, sentence in (
        (
            moe.activation is not MoEActivation.SILU,
            f"activation {moe.activation.value}: the kernels fuse SwiGLU (silu)",
        ),
        (any(_given(layer, name) for name in _SWIGLU), "a clamped or scaled SwiGLU: the kernels fuse the plain one"),
        (moe.has_bias, "experts with bias: the packed format has none"),
        (moe.is_lora_enabled, "LoRA on routed experts: start without --enable-lora"),
        (layer.apply_router_weight_on_input, "router weights applied to the input: they are applied after down"),
        (parallel.enable_eplb, "EPLB: start without --enable-eplb"),
        (parallel.all2all_backend == "passthrough", "the passthrough all2all backend"),
        (_flag("VLLM_HUMMING_USE_F16_ACCUM"), "f16 accumulation: unset VLLM_HUMMING_USE_F16_ACCUM, sums are FP32"),
        (_flag("VLLM_HUMMING_INPUT_QUANT_CONFIG"), "quantized activations: unset VLLM_HUMMING_INPUT_QUANT_CONFIG"),
        (moe.in_dtype not in activation_dtypes(), f"activations in {moe.in_dtype}: start with --dtype bfloat16"),
        (not _device_serves(), "this device: the kernels need CUDA compute capability 9.0 or higher"),
    ):
        if asked:
            return sentence
    intermediate = moe.intermediate_size_per_partition
    try:
        check_shape(2 * intermediate, moe.hidden_dim)
        check_shape(moe.hidden_dim, intermediate)
    except UsageError as error:
        return f"{error} (tensor-parallel size {moe.tp_size}; --enable-expert-parallel keeps experts whole)"
    return None


_SWIGLU = ("swiglu_limit", "swiglu_alpha", "swiglu_beta")


def _given(layer: RoutedExperts, name: str) -> bool:
    return getattr(layer, name, None) is not None


def _flag(name: str) -> bool:
    return os.environ.get(name, "0").lower() not in ("", "0", "false")


def _device_serves() -> bool:
    return bool(
        current_platform.is_cpu() or (current_platform.is_cuda() and current_platform.has_device_capability(90))
    )
