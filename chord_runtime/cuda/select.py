"""Which tile a call uses: a few rules from (mode, weight shape, experts, rows per expert, architecture), and why.

Nothing here touches a device. ``choose`` is called once for each distinct (mode, shape, rows bucket); ``explain`` prints
what it chooses, ``all_configs`` lists every instantiation it can choose, for compiling ahead. For experiments a tile can
be passed to the functions of :mod:`chord_runtime.cuda.launch`, or fields of every chosen tile overridden with
``CHORD_TILE=tokens=64,stages=5``.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, fields, replace

from chord_runtime.errors import UsageError
from chord_runtime.format.block import BLOCK_BYTES, BLOCK_K, BLOCK_ROWS, STRIP_ROWS

SHARED_LIMIT = 227 * 1024
"""Bytes of shared memory that one thread block may use on Hopper."""

PLAIN, GATE_UP, SWIGLU = 0, 1, 2
"""What the epilogue stores: ``CHORD_OUTPUT`` of csrc/chord/tile.cuh."""

MODES = ("contiguous", "masked", "indexed")


@dataclass(frozen=True)
class TileConfig:
    """One instantiation of a kernel; csrc/chord/tile.cuh says what the figures mean."""

    tokens: int
    """Most tokens of a tile: N of the widest wgmma."""
    narrow: int
    """N for tiles with no more rows than this; ``tokens`` where one width serves all."""
    warpgroups: int
    """Consumer warpgroups of 128 threads; one more produces."""
    blocks: int
    """64-row blocks of the weight a warpgroup."""
    stage_k: int
    """k64 blocks a stage of the ring."""
    stages: int
    box: int = 0
    """Tokens of one tensor-map copy; 0 where rows are gathered."""
    producer_registers: int = 64
    occupancy: int = 1
    """Thread blocks a multiprocessor."""
    why: str = ""

    @property
    def rows(self) -> int:
        """Rows of the weight that a tile covers."""
        return self.warpgroups * self.blocks * BLOCK_ROWS

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return (self.warpgroups + 1) * 128

    def shared_bytes(self, output: int) -> int:
        """Dynamic shared memory of a block: ``Shared`` of csrc/chord/tile.cuh, which checks this figure."""
        stage = self.stage_k * (self.tokens * BLOCK_K * 2 + self.rows // BLOCK_ROWS * BLOCK_BYTES)
        staging = min(self.tokens, 64) * self.blocks * BLOCK_ROWS * 2 // (2 if output == SWIGLU else 1)
        tables = self.tokens * 8
        return self.stages * (stage + 16 + 16) + self.warpgroups * (staging + tables) + 1024 + 128

    def defines(self, output: int) -> dict[str, int]:
        """The macros that instantiate it."""
        return {
            "CHORD_TOKENS": self.tokens,
            "CHORD_NARROW": self.narrow,
            "CHORD_WARPGROUPS": self.warpgroups,
            "CHORD_BLOCKS": self.blocks,
            "CHORD_STAGE_K": self.stage_k,
            "CHORD_STAGES": self.stages,
            "CHORD_OCCUPANCY": self.occupancy,
            "CHORD_OUTPUT": output,
            "CHORD_PRODUCER_REGISTERS": self.producer_registers,
            "CHORD_SHARED_BYTES": self.shared_bytes(output),
            **({"CHORD_BOX": self.box} if self.box else {}),
        }
