"""Peers that can run here, beside Chord: Humming through its public layer, and torch's bf16 grouped matmul."""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib import metadata
from typing import Any, Protocol

import torch
from torch import Tensor

from chord_runtime.bench.cases import MAX_M, Case
from chord_runtime.bench.problem import Problem, Routing
from chord_runtime.format.layout import Mode
from chord_runtime.routing import indexed


class Contender(Protocol):
    """A peer: named in reports, set up once for each projection's shape."""

    name: str

    def prepare(self, case: Case) -> None:
        """Make what all cases of this shape share: weights, compiled kernels."""

    def call(self, problem: Problem) -> Callable[[], object]:
        """A function that does the problem's work once."""


class TorchGrouped:
    """bf16 weights, four times the bytes; rows already sorted by expert, so that gathering costs it nothing."""

    name = "torch bf16"

    def prepare(self, case: Case) -> None:
        """Nothing to make: the problem carries the dense weights."""

    def call(self, problem: Problem) -> Callable[[], object]:
        offsets = problem.routing.counts.cumsum(0, dtype=torch.int32)
        rows = _sorted_rows(problem)
        weight = problem.weights.dense.transpose(1, 2)
        multiply = getattr(torch.nn.functional, "grouped_mm", None) or torch._grouped_mm
        return lambda: multiply(rows, weight, offs=offsets)


class Humming:
    """humming-kernels: its own random weights of the same shape, its own heuristics, our inputs and routing."""

    name = "humming"

    def __init__(self) -> None:
        self._shape: tuple[int, int, int] | None = None
        self._layer: Any = None

    @staticmethod
    def version() -> str | None:
        """Of the installed package; None without one."""
        try:
            return metadata.version("humming-kernels")
        except metadata.PackageNotFoundError:
            return None

    def prepare(self, case: Case) -> None:
        shape = (case.scenario.experts, case.n, case.k)
        if shape == self._shape:
            return
        from humming.layer import HummingLayer
        from humming.testing import random_fill_tensor

        self._shape, self._layer = None, None
        layer = HummingLayer(
            shape_n=case.n,
            shape_k=case.k,
            num_experts=case.scenario.experts,
            weight_config={"dtype": "uint4", "group_size": 32, "scale_dtype": "bfloat16"},
            input_config={"dtype": "bfloat16"},
            torch_dtype=torch.bfloat16,
        ).to("cuda")
        for parameter in layer.parameters():
            random_fill_tensor(parameter)
        layer.transform()
        self._shape, self._layer = shape, layer

    def call(self, problem: Problem) -> Callable[[], object]:
        from humming.config import GemmType
        from humming.tune import get_heuristics_config

        case, layer = problem.case, self._layer
        kind = GemmType(_HUMMING_MODES[case.scenario.mode])
        tuning = get_heuristics_config(layer_config=layer.humming_config, gemm_type=kind)
        options: dict[str, Any] = {
            "inputs": problem.rows.view(-1, case.k),
            "compute_config": json.dumps({"gemm_type": kind.value}),
            "tuning_config": json.dumps(tuning),
            "valid_shape_m": case.routed if case.scenario.mode is Mode.MASKED else 0,
            "top_k": case.fan_out,
        } | humming_routing(case, problem.routing, tuning)
        return lambda: layer(**options)


_HUMMING_MODES = {Mode.MASKED: "grouped_masked", Mode.CONTIGUOUS: "grouped_contiguous", Mode.INDEXED: "indexed"}


def humming_routing(case: Case, routing: Routing, tuning: list[Any]) -> dict[str, Tensor]:
    """The routing in Humming's terms; in indexed mode with the block size that its heuristics choose for these rows."""
    if case.scenario.mode is Mode.MASKED:
        return {"expert_layout": routing.counts}
    if case.scenario.mode is Mode.CONTIGUOUS:
        return {"expert_layout": torch.nn.functional.pad(routing.counts.long().cumsum(0), (1, 0))}
    [block] = [config["block_shape"][0] for low, high, config in tuning if low < case.routed <= high]
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
