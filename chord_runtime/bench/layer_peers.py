"""Humming's whole layer: its indexed gate_up, its activation kernel, its indexed down, and a weighted sum.

Sorting the choices and the weighted sum are vLLM's kernels where vLLM is installed. Elsewhere the choices are sorted by
Chord's own kernel, whose buffers are those of vLLM's, and the sum is one kernel that ``torch.compile`` makes: what
differs from Chord's layer is then the two GEMMs and what they fuse. Weights are Humming's own, random, of the same
shape.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from chord_runtime import routing
from chord_runtime.bench import humming
from chord_runtime.bench.layer import LayerCase, LayerContender, LayerProblem, LayerScenario
from chord_runtime.format.layout import Mode

_SWIGLU = {"activation_type": "binary_split", "activation_impl": "(a / (1.f + expf(-a))) * b"}


class Humming(LayerContender):
    """Humming's kernels between Chord's sort and a compiled sum."""

    name = "humming"

    def __init__(self) -> None:
        self._layers: dict[LayerScenario, tuple[Any, Any]] = {}
        self._sum = torch.compile(weighted_sum, dynamic=True)

    def compile_ahead(self, cases: Sequence[LayerCase]) -> None:
        humming.compile_ahead([plan for case in cases for plan in self._plans(case)])

    def call(self, problem: LayerProblem) -> Callable[[], object]:
        from humming.ops import process_input

        scenario, ids = problem.case.scenario, problem.topk_ids
        gate_up, down = self._plans(problem.case)
        expert_map, out = problem.expert_map, torch.empty_like(problem.x)
        # As vLLM does: with many choices the activation skips the rows of other ranks' experts.
        skip = expert_map is not None and ids.numel() > 2 * _multiprocessors()

        def run() -> object:
            buffers, own_rows = self.align(ids, gate_up.block, scenario, expert_map, skip)
            both = gate_up(problem.x, **buffers, top_k=ids.shape[1])
            hidden = both.new_empty((ids.numel(), scenario.intermediate))
            scatter = {"layout": "scatter", "scatter_idx": own_rows} if skip else {}
            process_input(both, outputs=hidden, use_pdl=True, **_SWIGLU, **scatter)
            if down.block != gate_up.block:
                buffers, _ = self.align(ids, down.block, scenario, expert_map, False)
            results = down(hidden, **buffers, top_k=1).view(*ids.shape, -1)
            return self.combine(results, problem.topk_weights, ids, expert_map, out)

        return run

    def align(
        self, ids: Tensor, block: int, scenario: LayerScenario, expert_map: Tensor | None, skip: bool
    ) -> tuple[dict[str, Tensor], Tensor | None]:
        """The choices in blocks of one expert; with ``skip`` also int32 [choices, 1], −1 for other ranks' choices."""
        route = routing.indexed(ids, scenario.experts, block, expert_map)
        return _buffers(route.sorted_ids, route.expert_ids, route.num_tokens_padded), route.rows.view(-1, 1)

    def combine(self, results: Tensor, weights: Tensor, ids: Tensor, expert_map: Tensor | None, out: Tensor) -> object:
        """Weighted sum over top-k, other ranks' choices left out."""
        return self._sum(results, weights, ids, expert_map)

    def _plans(self, case: LayerCase) -> tuple[humming.Plan, humming.Plan]:
        """gate_up and down for the rows that the host can know, as vLLM estimates them."""
        scenario = case.scenario
        if scenario not in self._layers:
            experts, hidden, intermediate = scenario.experts, scenario.hidden, scenario.intermediate
            self._layers[scenario] = (
                humming.make_layer(experts, 2 * intermediate, hidden),
                humming.make_layer(experts, hidden, intermediate),
            )
        rows = -(-case.choices * scenario.experts // scenario.total)
        gate_up, down = (humming.Plan.of(layer, Mode.INDEXED, rows) for layer in self._layers[scenario])
        return gate_up, down


class HummingVllm(Humming):
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
    ) -> tuple[dict[str, Tensor], Tensor | None]:
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
        return _buffers(sorted_ids, expert_ids, used), own_rows[0] if skip else None

    def combine(self, results: Tensor, weights: Tensor, ids: Tensor, expert_map: Tensor | None, out: Tensor) -> object:
        """See the base class."""
        from vllm.model_executor.layers.fused_moe.moe_fused_mul_sum import moe_fused_mul_sum

        return moe_fused_mul_sum(inputs=results, topk_weights=weights, topk_ids=ids, expert_map=expert_map, outputs=out)


def _buffers(sorted_ids: Tensor, expert_ids: Tensor, num_tokens_padded: Tensor) -> dict[str, Tensor]:
    return {"sorted_ids": sorted_ids, "expert_ids": expert_ids, "num_tokens_padded": num_tokens_padded}


def _multiprocessors() -> int:
    return torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count


def weighted_sum(results: Tensor, weights: Tensor, ids: Tensor, expert_map: Tensor | None) -> Tensor:
    """Results [T, top_k, hidden] summed in FP32; other ranks' rows, which were never written, stay unread."""
    mine = ids >= 0 if expert_map is None else expert_map[ids] >= 0
    index = torch.arange(ids.numel(), device=ids.device).view_as(ids)
    rows = results.view(ids.numel(), -1)[torch.where(mine, index, 0)]  # one row for all others: it stays in cache
    return (torch.where(mine.unsqueeze(-1), rows, 0).float() * weights.unsqueeze(-1)).sum(1).bfloat16()
