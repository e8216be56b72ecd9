"""Source layout ↔ packed layout, exactly, on tensors.

The source layout is compressed-tensors' ``pack-quantized``: element i of a row in bits 4·(i mod 8) of int32 word
i div 8, stored as q + 8; one BF16 scale per 32 elements. CPU tensors go through the native packer; CUDA tensors, and
all tensors if it was not built, through the plain PyTorch at the end of this file, which defines the layout: tests
hold the native packer against it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from chord_runtime.errors import ScaleError, UsageError
from chord_runtime.format import native
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
    return _check_source(words, scale, 1)


def _check_source(words: Tensor, scale: Tensor, parts: int) -> tuple[int, int]:
    """(N, K) of the packed weight that ``parts`` weights of this shape make."""
    _check_kinds(words, scale, words.device)
    rows, k = words.shape[0], words.shape[1] * 8
    check_shape(parts * rows, k)
    if tuple(scale.shape) != (rows, k // GROUP_SIZE):
        raise UsageError(
            f"weight_scale must be bfloat16 [{rows}, {k // GROUP_SIZE}] beside weight_packed {list(words.shape)}; "
            f"found {list(scale.shape)} (only group size {GROUP_SIZE} is supported)"
        )
    return parts * rows, k


def _check_kinds(words: Tensor, scale: Tensor, device: torch.device) -> None:
    if words.dtype != torch.int32 or words.dim() != 2:
        raise UsageError(f"weight_packed must be int32 [N, K/8]; found {words.dtype} {list(words.shape)}")
    if scale.dtype != torch.bfloat16 or scale.dim() != 2:
        raise UsageError(f"weight_scale must be bfloat16 [N, K/32]; found {scale.dtype} {list(scale.shape)}")
    if words.device != device or scale.device != device:
        raise UsageError(f"weights are on {device}, {words.device} and {scale.device}: put them on one device")


def check_scales(scale: Tensor, name: str = "") -> None:
    """Raise ScaleError naming the first scale that the format cannot hold (NaN, infinite, or out of range)."""
    size = scale.float().abs()
    good = ((size >= MIN_SCALE) & (size < MAX_SCALE)) | (size == 0)
    if not bool(good.all()):
        row, group = (int(i) for i in (~good).nonzero()[0])
        raise ScaleError(
            f"{name}scale [{row}, {group}] is {float(scale[row, group])}: supported are 0 and 2^-94 ≤ |s| < 2^27; "
            f"{int((~good).sum())} of {scale.numel()} scales are outside. Re-quantize this tensor or fetch it again"
        )


def pack(words: Tensor, scale: Tensor) -> Tensor:
    """Pack one weight: int32 [N, K/8] and bfloat16 [N, K/32] → uint8 [packed_bytes(N, K)] on the same device.

    Raises UsageError for dtypes and shapes, ScaleError for a scale that cannot be stored exactly.
    """
    out = torch.empty(packed_bytes(*check_source(words, scale)), dtype=torch.uint8, device=words.device)
    pack_into(out, words, scale)
    return out


def pack_gate_up(gate_words: Tensor, gate_scale: Tensor, up_words: Tensor, up_scale: Tensor) -> Tensor:
    """Pack gate and up ([I, K] each) as one [2·I, K] weight in ``gate_up_8`` row order; errors as in ``pack``."""
    n, k = 2 * gate_words.shape[0], gate_words.shape[-1] * 8
    out = torch.empty(packed_bytes(n, k), dtype=torch.uint8, device=gate_words.device)
    pack_into(out, gate_words, gate_scale, (up_words, up_scale))
    return out


def pack_into(out: Tensor, words: Tensor, scale: Tensor, up: tuple[Tensor, Tensor] | None = None) -> bool:
    """Pack into ``out``, contiguous uint8 [packed_bytes(N, K)]: one weight, or with ``up`` (words, scale) gate and up.

    Sources may be slices of rows and of columns (whole blocks of 64). Returns whether a code is 0: −8 is a value that
    Moonshot's own checkpoints never hold, so somebody re-quantized this one. Errors as in ``pack``; what ``out`` then
    holds is undefined.
    """
    if up is None:
        n, k = check_source(words, scale)
    else:
        n, k = _check_gate_up(words, scale, *up)
    if out.dtype != torch.uint8 or out.numel() != packed_bytes(n, k) or not out.is_contiguous():
        raise UsageError(
            f"a packed [{n}, {k}] weight goes into contiguous uint8 [{packed_bytes(n, k)}]; "
            f"found {out.dtype} {list(out.shape)}"
        )
    sources = (words, scale) if up is None else (words, scale, *up)
    if _takes_native(out, *sources) and (up is None or _strides(words, scale) == _strides(*up)):
        zero, bad = native.pack(out.data_ptr(), _rows(words, scale), None if up is None else _rows(*up))
        if bad >= 0:
            for name, part in (("", scale),) if up is None else (("gate ", scale), ("up ", up[1])):
                check_scales(part, name)
        return zero
    check_scales(scale, "" if up is None else "gate ")
    if up is not None:
        check_scales(up[1], "up ")
        words, scale = interleave(words, up[0]), interleave(scale, up[1])
    _pack(words, scale, out)
    return any(_has_zero(part) for part in sources[::2])


def unpack(packed: Tensor, n: int, k: int) -> tuple[Tensor, Tensor]:
    """Exact inverse of ``pack``: uint8 [packed_bytes(n, k)] → (int32 [n, k/8], bfloat16 [n, k/32])."""
    _check_packed(packed, n, k)
    if _takes_native(packed):
        words, scale = _empty_source(n, k)
        native.unpack(packed.data_ptr(), _rows(words, scale))
        return words, scale
    return _unpack(packed, n, k)


def unpack_gate_up(packed: Tensor, n: int, k: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Exact inverse of ``pack_gate_up``; n = 2·I. Returns (gate words, gate scale, up words, up scale)."""
    _check_packed(packed, n, k)
    if _takes_native(packed):
        gate, up = _empty_source(n // 2, k), _empty_source(n // 2, k)
        native.unpack(packed.data_ptr(), _rows(*gate), _rows(*up))
        return *gate, *up
    words, scale = _unpack(packed, n, k)
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
    words, scale = unpack(packed, n, k)
    nibbles = words.view(torch.uint8)
    codes = torch.stack((nibbles & 15, nibbles >> 4), -1).view(n, -1, GROUP_SIZE)
    return ((codes.to(torch.int8) - 8) * scale.unsqueeze(-1)).view(n, k)


def _check_gate_up(gate_words: Tensor, gate_scale: Tensor, up_words: Tensor, up_scale: Tensor) -> tuple[int, int]:
    if gate_words.shape != up_words.shape or gate_scale.shape != up_scale.shape:
        raise UsageError(
            f"gate {list(gate_words.shape)} {list(gate_scale.shape)} and up {list(up_words.shape)} "
            f"{list(up_scale.shape)} must have equal shapes"
        )
    _check_kinds(up_words, up_scale, gate_words.device)
    return _check_source(gate_words, gate_scale, 2)


def _check_packed(packed: Tensor, n: int, k: int) -> None:
    if packed.dtype != torch.uint8 or packed.numel() != packed_bytes(n, k) or not packed.is_contiguous():
        raise UsageError(
            f"a packed [{n}, {k}] weight is {packed_bytes(n, k)} contiguous bytes of uint8; "
            f"found {packed.dtype} {list(packed.shape)}"
        )


def _empty_source(n: int, k: int) -> tuple[Tensor, Tensor]:
    return torch.empty(n, k // 8, dtype=torch.int32), torch.empty(n, k // GROUP_SIZE, dtype=torch.bfloat16)


def _takes_native(*tensors: Tensor) -> bool:
    """Whether all are on the CPU, with the elements of a row side by side, and the native packer is there."""
    return all(t.device.type == "cpu" and t.stride(-1) == 1 for t in tensors) and native.library() is not None


def _rows(words: Tensor, scale: Tensor) -> native.Rows:
    rows, k = words.shape[0], words.shape[1] * 8
    return native.Rows(words.data_ptr(), scale.data_ptr(), rows, k, words.stride(0) * 4, scale.stride(0) * 2)


def _strides(words: Tensor, scale: Tensor) -> tuple[int, int]:
    return words.stride(0), scale.stride(0)


def _has_zero(words: Tensor) -> bool:
    """Whether a code is 0: bit 0 of each nibble becomes the OR of its four bits."""
    nibbles = words.contiguous().view(torch.uint8)
    nibbles = nibbles | nibbles >> 1
    nibbles = nibbles | nibbles >> 2
    return bool(((nibbles & 0x11) != 0x11).any())


def _pack(words: Tensor, scale: Tensor, out: Tensor) -> None:
    """The definition of the packed layout. Axes, outermost first: N = strip, half, w, h, r; K = block, t, g, q, e."""
    n, k = words.shape[0], words.shape[1] * 8
    blocks = out.view(n // STRIP_ROWS, k // BLOCK_K, 2, BLOCK_BYTES)
    nibbles = words.contiguous().view(torch.uint8)
    codes = torch.stack((nibbles & 15, nibbles >> 4), -1).view(n // STRIP_ROWS, 2, 4, 2, 8, k // BLOCK_K, 4, 2, 4, 2)
    pairs = codes[:, :, :, 0] | codes[:, :, :, 1] << 4
    blocks[..., :CODE_BYTES] = pairs.permute(0, 4, 1, 2, 3, 7, 5, 8, 6).reshape(*blocks.shape[:3], CODE_BYTES)
    scales = (scale.float().reshape(-1, 2, 8, k // GROUP_SIZE) * _exponents(scale.device)).to(torch.bfloat16)
    scales = scales.view(n // STRIP_ROWS, 2, 4, 2, 8, k // BLOCK_K, 2).permute(0, 5, 1, 2, 4, 6, 3).contiguous()
    blocks[..., CODE_BYTES:] = scales.view(torch.uint8).view(*blocks.shape[:3], BLOCK_BYTES - CODE_BYTES)


def _unpack(packed: Tensor, n: int, k: int) -> tuple[Tensor, Tensor]:
    blocks = packed.view(n // STRIP_ROWS, k // BLOCK_K, 2, BLOCK_BYTES)
    pairs = blocks[..., :CODE_BYTES].view(*blocks.shape[:3], 4, 8, 4, 4, 2, 2).permute(0, 2, 3, 4, 1, 6, 8, 5, 7)
    nibbles = torch.stack((pairs & 15, pairs >> 4), 3).reshape(n, k // 2, 2)
    words = (nibbles[..., 0] | nibbles[..., 1] << 4).contiguous().view(torch.int32)
    stored = blocks[..., CODE_BYTES:].contiguous().view(torch.bfloat16).view(*blocks.shape[:3], 4, 8, 2, 2)
    scale = stored.permute(0, 2, 3, 6, 4, 1, 5).reshape(n // 16, 2, 8, k // GROUP_SIZE)
    return words, (scale.float() / _exponents(packed.device)).to(torch.bfloat16).reshape(n, k // GROUP_SIZE)


def _exponents(device: torch.device) -> Tensor:
    """Factors of the stored scales for rows [.., h, r, ..]: low nibbles (h = 0), then high ones."""
    return torch.tensor([2.0**LOW_EXP, 2.0**HIGH_EXP], dtype=torch.float32, device=device).view(2, 1, 1)
