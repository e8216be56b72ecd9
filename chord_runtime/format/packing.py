"""Source layout ↔ packed layout, exactly, in plain PyTorch.

The source layout is compressed-tensors' ``pack-quantized``: element i of a row in bits 4·(i mod 8) of int32 word
i div 8, stored as q + 8; one BF16 scale per 32 elements. These functions are the definition that the native packer is
tested against; they also pack on a CUDA device.
"""

from __future__ import annotations

import torch
from torch import Tensor

from chord_runtime.errors import ScaleError, UsageError
from chord_runtime.format.block import (
    BLOCK_BYTES,
    BLOCK_K,
    CODE_BYTES,
    GROUP_SIZE,
    HIGH_EXP,
    LOW_EXP,
    MAX_SCALE,
    MIN_SCALE,
    STRIP_ROWS,
    check_shape,
    packed_bytes,
)

INTERLEAVE = 8
"""Rows of gate, then as many of up, in the ``gate_up_8`` row order."""


def check_source(words: Tensor, scale: Tensor) -> tuple[int, int]:
    """Return (N, K) of a source weight, or raise UsageError if dtypes or shapes are not those of INT4 group 32."""
    if words.dtype != torch.int32 or words.dim() != 2:
        raise UsageError(f"weight_packed must be int32 [N, K/8]; found {words.dtype} {list(words.shape)}")
    n, k = words.shape[0], words.shape[1] * 8
    check_shape(n, k)
    if scale.dtype != torch.bfloat16 or tuple(scale.shape) != (n, k // GROUP_SIZE):
        raise UsageError(
            f"weight_scale must be bfloat16 [{n}, {k // GROUP_SIZE}] beside weight_packed {list(words.shape)}; "
            f"found {scale.dtype} {list(scale.shape)} (only group size {GROUP_SIZE} is supported)"
        )
    if words.device != scale.device:
        raise UsageError(f"weight_packed is on {words.device}, weight_scale on {scale.device}: put both on one device")
    return n, k


def check_scales(scale: Tensor) -> None:
    """Raise ScaleError naming the first scale that the format cannot hold (NaN, infinite, or out of range)."""
    size = scale.float().abs()
    good = ((size >= MIN_SCALE) & (size < MAX_SCALE)) | (size == 0)
    if not bool(good.all()):
        row, group = (int(i) for i in (~good).nonzero()[0])
        raise ScaleError(
            f"scale [{row}, {group}] is {float(scale[row, group])}: supported are 0 and 2^-94 ≤ |s| < 2^27; "
            f"{int((~good).sum())} of {scale.numel()} scales are outside. Re-quantize this tensor or fetch it again"
        )


def pack(words: Tensor, scale: Tensor, out: Tensor | None = None) -> Tensor:
    """Pack one weight: int32 [N, K/8] and bfloat16 [N, K/32] → uint8 [packed_bytes(N, K)] on the same device.

    ``out``, when given, is a contiguous tensor of that size that receives the bytes.

    Raises UsageError for dtypes and shapes, ScaleError for a scale that cannot be stored exactly.
    """
    n, k = check_source(words, scale)
    check_scales(scale)
    if out is None:
        out = torch.empty(packed_bytes(n, k), dtype=torch.uint8, device=words.device)
    blocks = out.view(n // STRIP_ROWS, k // BLOCK_K, 2, BLOCK_BYTES)
    # Axes, outermost first: N = strip, half, w, h, r and K = block, t, g, q, e (docs/format.md).
    nibbles = words.contiguous().view(torch.uint8)
    codes = torch.stack((nibbles & 15, nibbles >> 4), -1).view(n // STRIP_ROWS, 2, 4, 2, 8, k // BLOCK_K, 4, 2, 4, 2)
    pairs = codes[:, :, :, 0] | codes[:, :, :, 1] << 4
    blocks[..., :CODE_BYTES] = pairs.permute(0, 4, 1, 2, 3, 7, 5, 8, 6).reshape(*blocks.shape[:3], CODE_BYTES)
    scales = (scale.float().view(-1, 2, 8, k // GROUP_SIZE) * _exponents(scale.device)).to(torch.bfloat16)
    scales = scales.view(n // STRIP_ROWS, 2, 4, 2, 8, k // BLOCK_K, 2).permute(0, 5, 1, 2, 4, 6, 3).contiguous()
    blocks[..., CODE_BYTES:] = scales.view(torch.uint8).view(*blocks.shape[:3], BLOCK_BYTES - CODE_BYTES)
    return out


def unpack(packed: Tensor, n: int, k: int) -> tuple[Tensor, Tensor]:
    """Exact inverse of ``pack``: uint8 [packed_bytes(n, k)] → (int32 [n, k/8], bfloat16 [n, k/32])."""
    codes, scale = _codes_and_scale(packed, n, k)
    nibbles = codes.view(n, k // 2, 2)
    return (nibbles[..., 0] | nibbles[..., 1] << 4).contiguous().view(torch.int32), scale


def pack_gate_up(
    gate_words: Tensor, gate_scale: Tensor, up_words: Tensor, up_scale: Tensor, out: Tensor | None = None
) -> Tensor:
    """Pack gate and up ([I, K] each) as one [2·I, K] weight in ``gate_up_8`` row order; ``out`` as in ``pack``."""
    return pack(interleave(gate_words, up_words), interleave(gate_scale, up_scale), out)


def unpack_gate_up(packed: Tensor, n: int, k: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Exact inverse of ``pack_gate_up``; n = 2·I. Returns (gate words, gate scale, up words, up scale)."""
    words, scale = unpack(packed, n, k)
    (gate_words, up_words), (gate_scale, up_scale) = deinterleave(words), deinterleave(scale)
    return gate_words, gate_scale, up_words, up_scale


def interleave(gate: Tensor, up: Tensor) -> Tensor:
    """Rows of gate and up, 8 by 8: [I, X] and [I, X] → [2·I, X]."""
    if gate.shape != up.shape or gate.shape[0] % INTERLEAVE:
        raise UsageError(
            f"gate {list(gate.shape)} and up {list(up.shape)} must be equal, rows a multiple of {INTERLEAVE}"
        )
    pairs = torch.stack((gate.view(-1, INTERLEAVE, gate.shape[1]), up.view(-1, INTERLEAVE, up.shape[1])), 1)
    return pairs.view(2 * gate.shape[0], gate.shape[1])


def deinterleave(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Inverse of ``interleave``: [2·I, X] → gate [I, X], up [I, X]."""
    pairs = rows.view(-1, 2, INTERLEAVE, rows.shape[1])
    return pairs[:, 0].reshape(-1, rows.shape[1]), pairs[:, 1].reshape(-1, rows.shape[1])


def dequantize(packed: Tensor, n: int, k: int) -> Tensor:
    """The weight every kernel multiplies by: bfloat16 [n, k] = (code − 8) · scale, rounded once; packed row order."""
    codes, scale = _codes_and_scale(packed, n, k)
    values = (codes.view(n, -1, GROUP_SIZE).float() - 8) * scale.float().unsqueeze(-1)
    return values.to(torch.bfloat16).view(n, k)


def _codes_and_scale(packed: Tensor, n: int, k: int) -> tuple[Tensor, Tensor]:
    """(uint8 codes [n, k], bfloat16 scale [n, k/32]) of a packed weight."""
    if packed.dtype != torch.uint8 or packed.numel() != packed_bytes(n, k):
        raise UsageError(
            f"a packed [{n}, {k}] weight is {packed_bytes(n, k)} bytes of uint8; found {packed.numel()}, {packed.dtype}"
        )
    blocks = packed.reshape(n // STRIP_ROWS, k // BLOCK_K, 2, BLOCK_BYTES)
    pairs = blocks[..., :CODE_BYTES].view(*blocks.shape[:3], 4, 8, 4, 4, 2, 2).permute(0, 2, 3, 4, 1, 6, 8, 5, 7)
    codes = torch.stack((pairs & 15, pairs >> 4), 3).reshape(n, k)
    stored = blocks[..., CODE_BYTES:].contiguous().view(torch.bfloat16).view(*blocks.shape[:3], 4, 8, 2, 2)
    scale = stored.permute(0, 2, 3, 6, 4, 1, 5).reshape(n // 16, 2, 8, k // GROUP_SIZE)
    return codes, (scale.float() / _exponents(packed.device)).to(torch.bfloat16).reshape(n, k // GROUP_SIZE)


def _exponents(device: torch.device) -> Tensor:
    """Factors of the stored scales for rows [.., h, r, ..]: low nibbles (h = 0), then high ones."""
    return torch.tensor([2.0**LOW_EXP, 2.0**HIGH_EXP], device=device).view(2, 1, 1)
