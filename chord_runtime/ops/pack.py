"""Packing a stack of experts that is already in memory, on the CPU or on a GPU."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from chord_runtime.errors import UsageError
from chord_runtime.format.block import packed_bytes
from chord_runtime.format.layout import ALL_MODES, Mode, RowOrder
from chord_runtime.format.packing import check_source, pack_into
from chord_runtime.ops.weight import PackedWeight, check_tensor


def pack_w4a16_grouped(
    codes_or_packed: Tensor,
    scale: Tensor,
    mode: Mode | str | Iterable[Mode | str] = "all",
    *,
    gate_up: bool = False,
) -> PackedWeight:
    """Pack INT4 experts, one at a time, where they are (CPU or CUDA).

    Args:
        codes_or_packed: uint8 [E, N, K] codes 0..15 (weight = (code − 8) · scale), or the same as int32 [E, N, K/8]
            words of compressed-tensors' ``pack-quantized`` (element i of a row in bits 4·(i mod 8) of word i div 8).
        scale: bfloat16 [E, N, K/32], one for each 32 elements along K.
        mode: a mode, several, or ``"all"``: the operations that may be called on the result. The bytes are the same.
        gate_up: the first N/2 rows are gate, the others up; they are packed in row order ``gate_up_8``.

    Raises:
        UsageError: dtypes, shapes, devices or codes that do not fit; N % 128 or K % 64 is not 0.
        ScaleError: a scale that the format cannot hold (:func:`chord_runtime.format.packing.check_scales`).
    """
    check_tensor("codes_or_packed", codes_or_packed)
    check_tensor("scale", scale)
    modes = _modes(mode)
    source = codes_or_packed
    if source.dim() != 3 or source.dtype not in (torch.uint8, torch.int32) or not source.shape[0]:
        raise UsageError(
            "experts must be uint8 codes [E, N, K] or int32 words [E, N, K/8]; "
            f"found {source.dtype} {list(source.shape)}"
        )
    if scale.dim() != 3 or scale.shape[0] != source.shape[0]:
        raise UsageError(f"scale must be bfloat16 [{source.shape[0]}, N, K/32]; found {list(scale.shape)}")
    data = None
    for expert in range(source.shape[0]):
        words, scales = _words(source[expert]), scale[expert]
        n, k = check_source(words, scales)
        if data is None:
            data = torch.empty(source.shape[0], packed_bytes(n, k), dtype=torch.uint8, device=source.device)
        if gate_up:
            gate, up = words.chunk(2)
            pack_into(data[expert], gate, scales[: n // 2], (up, scales[n // 2 :]))
        else:
            pack_into(data[expert], words, scales)
    assert data is not None
    return PackedWeight(data, n, k, RowOrder.GATE_UP_8 if gate_up else RowOrder.PLAIN, modes)


def _words(source: Tensor) -> Tensor:
    """int32 [N, K/8] of one expert's codes or words."""
    if source.dtype == torch.int32:
        return source
    if source.shape[1] % 8 or bool((source > 15).any()):
        raise UsageError(
            f"codes [N, K] are 0..15, K a multiple of 64; found {list(source.shape)} up to {int(source.max())}"
        )
    words: Tensor = (source[:, ::2] | source[:, 1::2] << 4).contiguous().view(torch.int32)
    return words


def _modes(mode: Mode | str | Iterable[Mode | str]) -> tuple[Mode, ...]:
    wanted = [mode] if isinstance(mode, str) else list(mode)
    if wanted == ["all"]:
        return ALL_MODES
    try:
        found = {Mode(m) for m in wanted}
    except ValueError:
        found = set()
    if not found:
        known = ", ".join(m.value for m in Mode)
        raise UsageError(f"mode {mode!r}: supported are {known}, several of them, or 'all'")
    return tuple(m for m in Mode if m in found)
