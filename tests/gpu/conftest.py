"""Shared by the GPU tests: weights made once a shape, and TF32 off in the reference."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache

import pytest
import torch
from torch import Tensor

from chord_runtime.ops.weight import PackedWeight
from tests import generators

Weights = Callable[..., tuple[PackedWeight, Tensor]]


@pytest.fixture(scope="session")
def weights() -> Weights:
    """(experts, n, k, gate_up) → packed experts and dense float32 [experts, n, k] in source order, on the GPU."""

    @cache
    def make(count: int, n: int, k: int, gate_up: bool) -> tuple[PackedWeight, Tensor]:
        packed, dense = generators.experts(count, n, k, gate_up=gate_up)
        return PackedWeight(packed.data.cuda(), n, k, packed.row_order), dense.cuda().float()

    return make


@pytest.fixture(autouse=True)
def exact_reference() -> Iterator[None]:
    """The reference multiplies in FP32, not TF32, and no test leaves work behind."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.cuda.synchronize()
    torch.backends.cuda.matmul.allow_tf32 = before
