"""Chord's experts in vLLM's modular MoE kernel: the Standard format (every token with its top-k) and BatchedExperts."""

from __future__ import annotations

from typing import Any

import torch
import vllm.model_executor.layers.fused_moe.modular_kernel as mk
from torch import Tensor
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.topk_weight_and_reduce import (
    TopKWeightAndReduceDelegate,
    TopKWeightAndReduceNoOP,
)
from vllm.platforms import current_platform

from chord_runtime.layer import PackedLayer, moe_layer
from chord_runtime.ops.api import masked


class ChordExperts(mk.FusedMoEExpertsModular):
    """What both formats share."""

    layer: PackedLayer
    """This rank's weights, set once they are loaded; those that vLLM passes to ``apply`` are the same memory."""

    @staticmethod
    def _supports_current_device() -> bool:
        return bool(current_platform.is_cpu() or current_platform.has_device_capability(90))

    @staticmethod
    def _supports_no_act_and_mul() -> bool:
        return False

    @staticmethod
    def _supports_quant_scheme(weight_key: Any, activation_key: Any) -> bool:
        return activation_key is None

    @staticmethod
    def _supports_activation(activation: MoEActivation) -> bool:
        return activation is MoEActivation.SILU

    @staticmethod
    def _supports_parallel_config(moe_parallel_config: Any) -> bool:
        return True

    @staticmethod
    def _supports_batch_invariance() -> bool:
        return True

    def moe_problem_size(self, a1: Tensor, w1: Tensor, w2: Tensor, topk_ids: Tensor) -> tuple[int, int, int, int, int]:
        """(experts, rows, N of gate_up, hidden, top_k); packed bytes do not show N and K in their shape."""
        rows = a1.size(0) if a1.dim() == 2 else a1.size(1)
        return self.layer.w13.num_experts, rows, self.layer.w13.n, a1.size(-1), topk_ids.size(1)


class StandardExperts(ChordExperts):
    """[tokens, hidden] with global ``topk_ids``; the result is weighted and summed over top-k here."""

    @staticmethod
    def activation_format() -> mk.FusedMoEActivationFormat:
        """See the class."""
        return mk.FusedMoEActivationFormat.Standard

    def finalize_weight_and_reduce_impl(self) -> mk.TopKWeightAndReduce:
        """Nothing is left to do."""
        return TopKWeightAndReduceNoOP()

    def workspace_shapes(
        self,
        M: int,
        N: int,
        K: int,
        topk: int,
        global_num_experts: int,
        local_num_experts: int,
        expert_tokens_meta: Any,
        activation: MoEActivation,
    ) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        """Only the output: the layer's own tensors live between its kernels, in torch's allocator."""
        return (0,), (0,), (M, K)

    def apply(
        self,
        output: Tensor,
        hidden_states: Tensor,
        w1: Tensor,
        w2: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        activation: MoEActivation,
        global_num_experts: int,
        expert_map: Tensor | None,
        a1q_scale: Tensor | None,
        a2_scale: Tensor | None,
        workspace13: Tensor,
        workspace2: Tensor,
        expert_tokens_meta: Any,
        apply_router_weight_on_input: bool,
    ) -> None:
        """Fill ``output`` [tokens, hidden]."""
        moe_layer(hidden_states, self.layer, topk_ids, topk_weights.float(), out=output)


class BatchedExperts(ChordExperts):
    """[experts, rows, hidden] from DeepEP's low-latency or NIXL's kernels, which also weight and reduce."""

    @staticmethod
    def activation_format() -> mk.FusedMoEActivationFormat:
        """See the class."""
        return mk.FusedMoEActivationFormat.BatchedExperts

    def finalize_weight_and_reduce_impl(self) -> mk.TopKWeightAndReduce:
        """The combine of the all2all backend."""
        return TopKWeightAndReduceDelegate()

    def workspace_shapes(
        self,
        M: int,
        N: int,
        K: int,
        topk: int,
        global_num_experts: int,
        local_num_experts: int,
        expert_tokens_meta: Any,
        activation: MoEActivation,
    ) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        """None, the SwiGLU's rows, the output."""
        return (0,), (local_num_experts * M, N // 2), (local_num_experts, M, K)

    def apply(
        self,
        output: Tensor,
        hidden_states: Tensor,
        w1: Tensor,
        w2: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        activation: MoEActivation,
        global_num_experts: int,
        expert_map: Tensor | None,
        a1q_scale: Tensor | None,
        a2_scale: Tensor | None,
        workspace13: Tensor,
        workspace2: Tensor,
        expert_tokens_meta: Any,
        apply_router_weight_on_input: bool,
    ) -> None:
        """Fill the valid rows of ``output`` [experts, rows, hidden]."""
        experts, rows, hidden = hidden_states.shape
        masked_m = expert_tokens_meta.expert_num_tokens[:experts].to(torch.int32)
        expected_m = self._expected_rows(topk_ids, global_num_experts)
        middle = masked(hidden_states, self.layer.w13, masked_m, expected_m, activation="swiglu", out=workspace2)
        masked(middle, self.layer.w2, masked_m, expected_m, out=output.view(experts * rows, hidden))

    def _expected_rows(self, topk_ids: Tensor, global_num_experts: int) -> int:
        """Rows of an expert if all ranks dispatch as many tokens as this one and routing is even."""
        dispatchers: int = self.num_dispatchers
        return max(1, -(-topk_ids.numel() * dispatchers // global_num_experts))
