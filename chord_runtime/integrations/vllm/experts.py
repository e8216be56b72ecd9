"""Chord's experts in vLLM's modular MoE kernel: the Standard format (every token with its top-k) and BatchedExperts."""

from __future__ import annotations

from abc import abstractmethod
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

TOKENS_AT_A_TIME = 32768
"""Larger batches, which data parallelism gathers, run in parts: a token's bits are the same, what lives between the
kernels stays below 5 GB at Kimi's sizes, and so do the activations that ``indexed`` gathers from (4 GiB at most)."""


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
        """Only the output: what lives between the kernels comes from torch's allocator."""
        return (0,), (0,), self.output_shape(local_num_experts, M, K)

    @abstractmethod
    def output_shape(self, experts: int, rows: int, hidden: int) -> tuple[int, ...]:
        """Shape of ``output``."""

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
        """Fill ``output``. Activation, expert map and weights are those that the method was made for."""
        self.run(output, hidden_states, topk_weights, topk_ids, expert_tokens_meta)

    @abstractmethod
    def run(self, output: Tensor, rows: Tensor, topk_weights: Tensor, topk_ids: Tensor, meta: Any) -> None:
        """Fill ``output`` from ``rows``."""


class StandardExperts(ChordExperts):
    """[tokens, hidden] with global ``topk_ids``; the result is weighted and summed over top-k here."""

    @staticmethod
    def activation_format() -> mk.FusedMoEActivationFormat:
        """See the class."""
        return mk.FusedMoEActivationFormat.Standard

    def finalize_weight_and_reduce_impl(self) -> mk.TopKWeightAndReduce:
        """Nothing is left to do."""
        return TopKWeightAndReduceNoOP()

    def output_shape(self, experts: int, rows: int, hidden: int) -> tuple[int, ...]:
        """[tokens, hidden]."""
        return rows, hidden

    def run(self, output: Tensor, rows: Tensor, topk_weights: Tensor, topk_ids: Tensor, meta: Any) -> None:
        """The whole layer, in the mode that :func:`chord_runtime.routing.convention` takes."""
        weights, tokens = topk_weights.float(), rows.shape[0]
        if tokens <= TOKENS_AT_A_TIME:
            moe_layer(rows, self.layer, topk_ids, weights, out=output)
            return
        for start in range(0, tokens, TOKENS_AT_A_TIME):
            part = slice(start, start + TOKENS_AT_A_TIME)
            moe_layer(rows[part], self.layer, topk_ids[part], weights[part], out=output[part])


class BatchedExperts(ChordExperts):
    """[experts, rows, hidden] from DeepEP's low-latency or NIXL's kernels, which also weight and reduce."""

    @staticmethod
    def activation_format() -> mk.FusedMoEActivationFormat:
        """See the class."""
        return mk.FusedMoEActivationFormat.BatchedExperts

    def finalize_weight_and_reduce_impl(self) -> mk.TopKWeightAndReduce:
        """The combine of the all2all backend."""
        return TopKWeightAndReduceDelegate()

    def output_shape(self, experts: int, rows: int, hidden: int) -> tuple[int, ...]:
        """[experts, rows, hidden]."""
        return experts, rows, hidden

    def run(self, output: Tensor, rows: Tensor, topk_weights: Tensor, topk_ids: Tensor, meta: Any) -> None:
        """gate_up and down for the rows that arrived; how many an expert got is on the device and stays there."""
        experts = self.layer.w13.num_experts
        masked_m = meta.expert_num_tokens[:experts].to(torch.int32)
        # What an expert gets if all ranks dispatch as many tokens as this one and routing is even.
        expected_m = max(1, -(-topk_ids.numel() * self.num_dispatchers // self.layer.num_experts))
        middle = masked(rows, self.layer.w13, masked_m, expected_m, activation="swiglu")
        masked(middle, self.layer.w2, masked_m, expected_m, out=output.view(-1, output.shape[-1]))
