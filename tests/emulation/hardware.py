"""What the PTX ISA says of fragments, stmatrix and the 128-byte swizzle, as index functions.

Sections of the PTX ISA: "Matrix Fragments for mma.m16n8k16 with floating point type", "Register Fragments and Shared
Memory Matrix Layouts" (wgmma), "stmatrix", "Swizzling modes".
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

LANES = 32


def a_element(thread: int, register: int, half: int) -> tuple[int, int]:
    """(row, k) of one bf16 of an A fragment, m64k16 of a warpgroup; one warp of it is mma.sync's m16k16."""
    warp, group, q = thread // LANES, thread % LANES // 4, thread % 4
    return 16 * warp + group + 8 * (register & 1), 2 * q + half + 8 * (register >> 1)


def d_element(thread: int, index: int) -> tuple[int, int]:
    """(row, column) of one FP32 of a D fragment, m64nN of a warpgroup."""
    warp, group, q = thread // LANES, thread % LANES // 4, thread % 4
    return 16 * warp + group + 8 * (index >> 1 & 1), 8 * (index >> 2) + 2 * q + (index & 1)


def stored_transposed(fragment: NDArray[np.int64]) -> NDArray[np.int64]:
    """stmatrix.m8n8.trans: fragment [32 lanes, 2 halves] → the 8×8 matrix as its eight addressed rows hold it."""
    rows = np.empty((8, 8), dtype=np.int64)
    for lane in range(LANES):
        for half in range(2):
            rows[2 * (lane % 4) + half, lane // 4] = fragment[lane, half]
    return rows


def swizzle_128(address: int) -> int:
    """Where byte ``address`` of a tile with 128-byte rows lies: bits 4-6 are xored with bits 7-9."""
    return address ^ (address >> 7 & 7) << 4
