"""A packed weight as the operators take it."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from chord_runtime.errors import UsageError
from chord_runtime.format.block import packed_bytes
from chord_runtime.format.layout import ALL_MODES, Mode, RowOrder


@dataclass(frozen=True)
class PackedWeight:
    """One projection of a rank's experts, ready to multiply by."""

    data: Tensor
    """uint8 [experts, packed_bytes(n, k)], contiguous."""
    n: int
    """Rows of one expert's weight: output features."""
    k: int
    """Columns: input features."""
    row_order: RowOrder = RowOrder.PLAIN
    modes: tuple[Mode, ...] = ALL_MODES
    """The modes it was packed for; the operators refuse others."""
    num_experts: int = field(init=False, repr=False, compare=False)
    """Experts on this rank."""
    interleaved: bool = field(init=False, repr=False, compare=False)
    """Whether rows are gate and up, 8 by 8."""
    device: torch.device = field(init=False, repr=False, compare=False)
    """Where ``data`` is. These three are kept: every call asks for them, and has few microseconds."""

    def __post_init__(self) -> None:
        expected = packed_bytes(self.n, self.k)
        data = self.data
        if data.dtype is not torch.uint8 or data.dim() != 2 or data.shape[1] != expected or not data.is_contiguous():
            raise UsageError(
                f"a packed weight of [{self.n}, {self.k}] is contiguous uint8 [experts, {expected}]; "
                f"found {data.dtype} {list(data.shape)}"
            )
        object.__setattr__(self, "num_experts", data.shape[0])
        object.__setattr__(self, "interleaved", self.row_order is RowOrder.GATE_UP_8)
        object.__setattr__(self, "device", data.device)


def check_tensor(name: str, value: object) -> None:
    """Raise UsageError for what is no tensor."""
    if not isinstance(value, Tensor):
        raise UsageError(f"{name} must be a tensor; found {type(value).__name__}")
