"""Humming's whole layer, as vLLM runs it: indexed gate_up, Humming's activation kernel, indexed down, weighted sum.

Sorting the choices and the weighted sum are vLLM's kernels where vLLM is installed, else torch: sort and cumulative
sums, and a sum that ``torch.compile`` fuses. Weights are Humming's own, random, of the same shape.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from chord_runtime.bench.layer import LayerProblem, LayerScenario

_SWIGLU = {"activation_type": "binary_split", "activation_impl": "(a / (1.f + expf(-a))) * b"}

Buffers = tuple[Tensor, Tensor, Tensor]
"""sorted_ids, expert_ids (local), num_tokens_padded."""


class HummingTorch:
    """Humming's kernels between torch's sort and sum."""

    name = "humming + torch"

    def __init__(self) -> None:
        self._scenario: LayerScenario | None = None
        self._w13: Any = None
        self._w2: Any = None
        self._sum = torch.compile(_weighted_sum, dynamic=True)

    def prepare(self, scenario: LayerScenario) -> None:
        if scenario == self._scenario:
            return
        self._scenario, self._w13, self._w2 = None, None, None
        self._w13 = _projection(scenario.experts, 2 * scenario.intermediate, scenario.hidden)
        self._w2 = _projection(scenario.experts, scenario.hidden, scenario.intermediate)
        self._scenario = scenario

    def call(self, problem: LayerProblem) -> Callable[[], object]:
        from humming.ops import process_input

        scenario, ids = problem.case.scenario, problem.topk_ids
        # What the host can know, as vLLM estimates it.
        rows = -(-ids.numel() * scenario.experts // scenario.total)
        gate_up, down = _Plan(self._w13, rows), _Plan(self._w2, rows)
        expert_map, out = problem.expert_map, torch.empty_like(problem.x)
        skip = expert_map is not None and ids.numel() > 2 * _multiprocessors()

        def run() -> object:
            buffers, own_rows = self.align(ids, gate_up.block, scenario, expert_map, skip)
            both = gate_up(problem.x, buffers, ids.shape[1])
            hidden = both.new_empty((ids.numel(), scenario.intermediate))
            scatter = {"layout": "scatter", "scatter_idx": own_rows} if skip else {}
            process_input(both, outputs=hidden, use_pdl=True, **_SWIGLU, **scatter)
            if down.block != gate_up.block:
                buffers, _ = self.align(ids, down.block, scenario, expert_map, False)
            results = down(hidden, buffers, 1).view(*ids.shape, -1)
            return self.combine(results, problem.topk_weights, ids, expert_map, out)

        return run

    def align(
        self, ids: Tensor, block: int, scenario: LayerScenario, expert_map: Tensor | None, skip: bool
    ) -> tuple[Buffers, Tensor | None]:
        """The choices in blocks of one expert; with ``skip`` also int32 [choices, 1], −1 for other ranks' choices."""
        flat, experts = ids.view(-1), scenario.experts
        local = flat if expert_map is None else expert_map[flat]
        slot = torch.where(local >= 0, local, experts).long()
        order = slot.argsort(stable=True)
        counts = torch.zeros(experts + 1, dtype=torch.int64, device=ids.device)
        counts.scatter_add_(0, slot, torch.ones_like(slot))
        padded = (counts[:experts] + block - 1) // block * block
        ends = padded.cumsum(0)
        capacity = -(-(flat.numel() + min(flat.numel(), experts) * (block - 1)) // block) * block
        # Choices of other ranks go behind what is returned.
        first = torch.nn.functional.pad(ends - padded, (0, 1), value=capacity)
        place = torch.arange(flat.numel(), device=ids.device) + (first - counts.cumsum(0) + counts)[slot[order]]
        sorted_ids = torch.full((capacity + flat.numel(),), flat.numel(), dtype=torch.int32, device=ids.device)
        sorted_ids[place] = order.int()
        expert_ids = torch.searchsorted(ends, torch.arange(0, capacity, block, device=ids.device), right=True).int()
        buffers = sorted_ids[:capacity], torch.where(expert_ids < experts, expert_ids, -1), ends[-1:].int()
        if not skip:
            return buffers, None
        index = torch.arange(flat.numel(), dtype=torch.int32, device=ids.device)
        return buffers, torch.where(local >= 0, index, -1).unsqueeze(1)

    def combine(self, results: Tensor, weights: Tensor, ids: Tensor, expert_map: Tensor | None, out: Tensor) -> object:
        """Weighted sum over top-k, other ranks' choices left out."""
        return self._sum(results, weights, ids, expert_map)


class HummingVllm(HummingTorch):
    """Humming's kernels between vLLM's."""

    name = "humming + vLLM"

    @staticmethod
    def available() -> bool:
        """Whether vLLM's kernels can be imported."""
        try:
            from vllm.model_executor.layers.fused_moe.moe_align_block_size import moe_align_block_size  # noqa: F401
            from vllm.model_executor.layers.fused_moe.moe_fused_mul_sum import moe_fused_mul_sum  # noqa: F401
        except Exception:  # an installation for another torch fails in its own ways
            return False
        return True

    def align(
        self, ids: Tensor, block: int, scenario: LayerScenario, expert_map: Tensor | None, skip: bool
    ) -> tuple[Buffers, Tensor | None]:
        """See the base class."""
        from vllm.model_executor.layers.fused_moe.moe_align_block_size import moe_align_block_size

        sorted_ids, expert_ids, used, *own_rows = moe_align_block_size(
            topk_ids=ids,
            block_size=block,
            num_experts=scenario.total,
            expert_map=expert_map,
            ignore_invalid_experts=True,
            return_scatter_idx=skip,
        )
        return (sorted_ids, expert_ids, used), own_rows[0] if skip else None

    def combine(self, results: Tensor, weights: Tensor, ids: Tensor, expert_map: Tensor | None, out: Tensor) -> object:
        """See the base class."""
        from vllm.model_executor.layers.fused_moe.moe_fused_mul_sum import moe_fused_mul_sum

        return moe_fused_mul_sum(inputs=results, topk_weights=weights, topk_ids=ids, expert_map=expert_map, outputs=out)


class _Plan:
    """One projection with the tuning that Humming's heuristics choose for the rows expected."""

    def __init__(self, layer: Any, rows: int) -> None:
        from humming.config import GemmType
        from humming.tune import get_heuristics_config

        tuning = get_heuristics_config(layer_config=layer.humming_config, gemm_type=GemmType("indexed"))
        [self.block] = [config["block_shape"][0] for low, high, config in tuning if low < rows <= high]
        self._layer, self._rows = layer, rows
        self._tuning = json.dumps(tuning)
        self._compute = json.dumps({"gemm_type": "indexed"})

    def __call__(self, inputs: Tensor, buffers: Buffers, top_k: int) -> Tensor:
        sorted_ids, expert_ids, used = buffers
        result: Tensor = self._layer(
            inputs=inputs,
            sorted_ids=sorted_ids,
            expert_ids=expert_ids,
            num_tokens_padded=used,
            top_k=top_k,
            valid_shape_m=self._rows,
            compute_config=self._compute,
            tuning_config=self._tuning,
        )
        return result


def _projection(experts: int, n: int, k: int) -> Any:
    from humming.layer import HummingLayer
    from humming.testing import random_fill_tensor

    layer = HummingLayer(
        shape_n=n,
        shape_k=k,
        num_experts=experts,
        weight_config={"dtype": "uint4", "group_size": 32, "scale_dtype": "bfloat16"},
        input_config={"dtype": "bfloat16"},
        torch_dtype=torch.bfloat16,
    ).to("cuda")
    for parameter in layer.parameters():
        random_fill_tensor(parameter)
    layer.transform()
    return layer


def _multiprocessors() -> int:
    return torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count


def _weighted_sum(results: Tensor, weights: Tensor, ids: Tensor, expert_map: Tensor | None) -> Tensor:
    mine = ids >= 0 if expert_map is None else expert_map[ids] >= 0
    return (torch.where(mine.unsqueeze(-1), results, 0).float() * weights.unsqueeze(-1)).sum(1).bfloat16()
