"""Rows of source weights in host memory, and their packing: natively, without torch, or else with it."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from chord_runtime.format import native
from chord_runtime.format.block import GROUP_SIZE

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class HostRows:
    """Whole rows of a source weight, of which columns ``first:last`` are meant.

    ``words`` are int32 [rows, k/8] and ``scale`` bfloat16 [rows, k/32], as bytes in writable memory.
    """

    words: memoryview
    scale: memoryview
    rows: int
    k: int
    first: int
    last: int

    @classmethod
    def whole(cls, words: memoryview, scale: memoryview, rows: int) -> HostRows:
        """All columns."""
        k = 2 * len(words) // rows
        return cls(words, scale, rows, k, 0, k)

    def columns(self, first: int, last: int) -> HostRows:
        """Columns ``first:last``, multiples of 64."""
        return replace(self, first=first, last=last)

    def tensors(self) -> tuple[Tensor, Tensor]:
        """(words, scale) of the columns, in the same memory."""
        import torch

        words = torch.frombuffer(self.words, dtype=torch.int32).view(self.rows, -1)
        scale = torch.frombuffer(self.scale, dtype=torch.bfloat16).view(self.rows, -1)
        groups = slice(self.first // GROUP_SIZE, self.last // GROUP_SIZE)
        return words[:, self.first // 8 : self.last // 8], scale[:, groups]

    def native(self) -> native.Rows:
        """The same for the native packer."""
        return native.Rows(
            words=_address(self.words) + self.first // 2,
            scale=_address(self.scale) + self.first // GROUP_SIZE * 2,
            rows=self.rows,
            k=self.last - self.first,
            words_stride=self.k // 2,
            scale_stride=self.k // GROUP_SIZE * 2,
        )


def pack_rows(out: memoryview, weight: HostRows, up: HostRows | None = None) -> bool:
    """Pack a weight, or gate and ``up``, into ``out``; see ``chord_runtime.format.packing.pack_into``.

    Shapes must fit: the plan has checked them. Raises ScaleError.
    """
    if native.library() is not None:
        has_zero, bad = native.pack(_address(out), weight.native(), None if up is None else up.native())
        if bad < 0:
            return has_zero
    import torch

    from chord_runtime.format.packing import pack_into

    # Without the native packer; or with a scale out of range, which this finds again and puts into words.
    target = torch.frombuffer(out, dtype=torch.uint8)
    return pack_into(target, *weight.tensors(), up=None if up is None else up.tensors())


def _address(view: memoryview) -> int:
    return ctypes.addressof(ctypes.c_ubyte.from_buffer(view))
