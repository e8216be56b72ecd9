"""What runs here beside Chord: Humming, torch's bf16 grouped matmul, and cuBLAS on dense bf16 matrices."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from chord_runtime.bench import humming
from chord_runtime.bench.cases import MAX_M, Case
from chord_runtime.bench.ceilings import dense
from chord_runtime.bench.problem import Problem, Routing
from chord_runtime.bench.results import DENSE, DENSE_SIZE, HUMMING
from chord_runtime.format.layout import Mode
from chord_runtime.routing import indexed


class Contender(Protocol):
    """Named in reports; what it sets up for a shape, it keeps for the next case."""

    name: str

    def takes(self, case: Case) -> bool:
        """Whether it is to run at this point."""
        return True

    def compile_ahead(self, cases: Sequence[Case]) -> None:
        """Compile what these cases need, at once rather than one by one. May fail: ``call`` then fails too."""
        return

    def call(self, problem: Problem) -> Callable[[], object]:
        """A function that does the problem's work once."""


class TorchGrouped(Contender):
    """bf16 weights, four times the bytes; rows already sorted by expert, so that gathering costs it nothing."""

    name = "torch bf16"

    def call(self, problem: Problem) -> Callable[[], object]:
        offsets = problem.routing.counts.cumsum(0, dtype=torch.int32)
        rows = _sorted_rows(problem)
        weight = problem.weights.dense.transpose(1, 2)
        multiply = getattr(torch.nn.functional, "grouped_mm", None) or torch._grouped_mm
        return lambda: multiply(rows, weight, offs=offsets)


class Dense(Contender):
    """cuBLAS bf16, 4096³, at the clocks that the contenders' turns leave: what contiguous is held against."""

    name = DENSE

    def takes(self, case: Case) -> bool:
        return case.scenario.mode is Mode.CONTIGUOUS

    def call(self, problem: Problem) -> Callable[[], object]:
        return dense(DENSE_SIZE)


class Humming(Contender):
    """humming-kernels: its own random weights of the same shape, our inputs and routing."""

    name = HUMMING

    def __init__(self) -> None:
        self._layers: dict[tuple[int, int, int], Any] = {}

    def compile_ahead(self, cases: Sequence[Case]) -> None:
        humming.compile_ahead([self._plan(case) for case in cases])

    def call(self, problem: Problem) -> Callable[[], object]:
        case, plan = problem.case, self._plan(problem.case)
        rows, routing = problem.rows.view(-1, case.k), humming_routing(case, problem.routing, plan.block)
        return lambda: plan(rows, top_k=case.fan_out, **routing)

    def _plan(self, case: Case) -> humming.Plan:
        shape = (case.scenario.experts, case.n, case.k)
        if shape not in self._layers:
            self._layers[shape] = humming.make_layer(*shape)
        return humming.Plan.of(self._layers[shape], case.scenario.mode, case.routed)


def humming_routing(case: Case, routing: Routing, block: int) -> dict[str, Tensor]:
    """The routing in Humming's terms; in indexed mode in blocks of the size that its heuristics choose."""
    if case.scenario.mode is Mode.MASKED:
        return {"expert_layout": routing.counts}
    if case.scenario.mode is Mode.CONTIGUOUS:
        return {"expert_layout": torch.nn.functional.pad(routing.counts.long().cumsum(0), (1, 0))}
    assert routing.topk_ids is not None
    blocks = indexed(routing.topk_ids, case.scenario.experts, block)
    entries = int(blocks.num_tokens_padded)  # Humming's own harness passes buffers of the exact size
    return {
        "sorted_ids": blocks.sorted_ids[:entries].contiguous(),
        "expert_ids": blocks.expert_ids[: entries // block].contiguous(),
        "num_tokens_padded": blocks.num_tokens_padded.view(()),
    }


def _sorted_rows(problem: Problem) -> Tensor:
    case = problem.case
    if case.scenario.mode is Mode.CONTIGUOUS:
        return problem.rows
    if case.scenario.mode is Mode.MASKED:
        return problem.rows.view(-1, MAX_M, case.k)[:, : case.point].reshape(-1, case.k)
    assert problem.routing.topk_ids is not None
    order = problem.routing.topk_ids.view(-1).argsort(stable=True)
    return problem.rows[order // case.fan_out]
