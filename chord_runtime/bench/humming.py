"""The peer humming-kernels, through its public layer: random weights, its own heuristics, kernels compiled ahead.

Its heuristics are asked for exactly the rows of a call. That is the entry which its table for all sizes has for them
(compared at every point of ``cases``), without compiling the 15 to 37 kernels of that table for each shape.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib import metadata
from typing import Any

import torch
from torch import Tensor

from chord_runtime.format.layout import Mode

_KINDS = {Mode.MASKED: "grouped_masked", Mode.CONTIGUOUS: "grouped_contiguous", Mode.INDEXED: "indexed"}


def version() -> str | None:
    """Of the installed package; None without one."""
    try:
        return metadata.version("humming-kernels")
    except metadata.PackageNotFoundError:
        return None


def make_layer(experts: int, n: int, k: int) -> Any:
    """Random INT4 experts [experts, n, k], group size 32, on the current CUDA device."""
    from humming.layer import HummingLayer
    from humming.testing import random_fill_tensor

    with torch.device("cuda"):
        layer = HummingLayer(
            shape_n=n,
            shape_k=k,
            num_experts=experts,
            weight_config={"dtype": "uint4", "group_size": 32, "scale_dtype": "bfloat16"},
            input_config={"dtype": "bfloat16"},
            torch_dtype=torch.bfloat16,
        )
    layer = layer.to("cuda")
    for parameter in layer.parameters():
        random_fill_tensor(parameter)
    layer.transform()
    return layer


@dataclass(frozen=True)
class Plan:
    """One layer with the kernel that its heuristics choose for a number of routed rows."""

    layer: Any
    block: int
    """Rows of a block in indexed mode."""
    configs: dict[str, Any]
    """The layer's arguments that say which kernel."""

    @classmethod
    def of(cls, layer: Any, mode: Mode, rows: int) -> Plan:
        """Ask the heuristics."""
        from humming.config import GemmType
        from humming.tune import get_heuristics_config

        kind = _KINDS[mode]
        tuning = get_heuristics_config(layer_config=layer.humming_config, shape_m=rows, gemm_type=GemmType(kind))
        configs = {"compute_config": json.dumps({"gemm_type": kind}), "tuning_config": json.dumps(tuning)}
        return cls(layer, tuning["block_shape"][0], configs)

    def __call__(self, inputs: Tensor, **options: Any) -> Tensor:
        result: Tensor = self.layer(inputs=inputs, **self.configs, **options)
        return result


def compile_ahead(plans: Iterable[Plan]) -> None:
    """Compile the kernels of all plans at once, each in a process of Humming's own. Raises the first failure."""
    from humming.kernel.humming import HummingKernel

    different = {(id(plan.layer), *plan.configs.values()): plan for plan in plans}.values()
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        list(pool.map(lambda p: HummingKernel.prepare_kernels(p.layer.humming_config.to_str(), **p.configs), different))
