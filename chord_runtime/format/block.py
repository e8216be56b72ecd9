"""Geometry of the packed block: the one place in Python that knows a byte offset. The spec is docs/format.md.

A block holds 64 rows × 64 k: 2048 bytes of 4-bit codes, then 256 bytes of pre-scaled BF16 scales. Two blocks side by
side along N make a strip of 128 rows, which is contiguous along K. ``csrc/chord/block.cuh`` repeats these constants for
the kernels; a test holds the two against each other.
"""

from __future__ import annotations

from chord_runtime.errors import UsageError

FORMAT_VERSION = 1

GROUP_SIZE = 32
"""Elements along K that share one scale."""

BLOCK_ROWS = 64
BLOCK_K = 64
STRIP_ROWS = 128
"""N must be a multiple of this, K of ``BLOCK_K``."""

CODE_BYTES = BLOCK_ROWS * BLOCK_K // 2
SCALE_BYTES = BLOCK_ROWS * (BLOCK_K // GROUP_SIZE) * 2
BLOCK_BYTES = CODE_BYTES + SCALE_BYTES

OUTPUT_EXP = 32
"""T: the kernels accumulate weights times 2^-T and multiply the sum by 2^T, exactly."""

LOW_EXP = 133 - OUTPUT_EXP
"""A scale of a row in a low nibble (n & 8 == 0) is stored times 2^LOW_EXP."""

HIGH_EXP = 129 - OUTPUT_EXP
"""A scale of a row in a high nibble (n & 8 == 8) is stored times 2^HIGH_EXP."""

MIN_SCALE = 2.0**-94
MAX_SCALE = 2.0**27
"""A scale s is 0 or MIN_SCALE ≤ |s| < MAX_SCALE: then every stored scale and every product in the kernels is exact."""


def check_shape(n: int, k: int) -> None:
    """Raise UsageError unless an [n, k] weight fills whole strips and blocks."""
    if n <= 0 or k <= 0 or n % STRIP_ROWS or k % BLOCK_K:
        raise UsageError(
            f"a weight of shape [N={n}, K={k}] cannot be packed: N must be a positive multiple of {STRIP_ROWS}, "
            f"K of {BLOCK_K}; choose a parallel size that leaves whole strips and blocks"
        )


def packed_bytes(n: int, k: int) -> int:
    """Bytes of one packed [n, k] weight."""
    check_shape(n, k)
    return (n // BLOCK_ROWS) * (k // BLOCK_K) * BLOCK_BYTES


def block_offset(n: int, k: int, k_total: int) -> int:
    """First byte of the block that holds element (n, k) of a weight with ``k_total`` columns."""
    return BLOCK_BYTES * (((n // STRIP_ROWS) * (k_total // BLOCK_K) + k // BLOCK_K) * 2 + (n // BLOCK_ROWS) % 2)


def code_offset(n: int, k: int, k_total: int) -> tuple[int, int]:
    """(byte, nibble) of the code of element (n, k); nibble 0 is bits 0-3."""
    w, h, r = (n >> 4) & 3, (n >> 3) & 1, n & 7
    t, g, q, e = (k >> 4) & 3, (k >> 3) & 1, (k >> 1) & 3, k & 1
    return block_offset(n, k, k_total) + 512 * w + 16 * (4 * r + q) + 4 * t + 2 * e + g, h


def scale_offset(n: int, k: int, k_total: int) -> int:
    """First byte of the stored scale of element (n, k)."""
    w, h, r = (n >> 4) & 3, (n >> 3) & 1, n & 7
    return block_offset(n, k, k_total) + CODE_BYTES + 64 * w + 8 * r + 4 * ((k >> 5) & 1) + 2 * h


def stored_exponent(n: int) -> int:
    """The power of two by which the scale of row n is multiplied when stored."""
    return HIGH_EXP if n & 8 else LOW_EXP
