"""Shapes, weights and routings that tests use, each enumerated once."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from chord_runtime.format.block import packed_bytes
from chord_runtime.format.layout import Mode, RowOrder
from chord_runtime.format.packing import pack_gate_up, pack_into
from chord_runtime.layer import PackedLayer
from chord_runtime.ops.weight import PackedWeight

SMALL_SHAPES = ((128, 64), (128, 320), (256, 192), (384, 128))
"""(N, K): one block wide and several, odd numbers of blocks and strips."""

KIMI_SHAPES = {
    "ep gate_up": (4096, 7168),
    "ep down": (7168, 2048),
    "tp4 gate_up": (1024, 7168),
    "tp4 down": (7168, 512),
    "tp8 gate_up": (512, 7168),
    "tp8 down": (7168, 256),
    "tp16 gate_up": (256, 7168),
    "tp16 down": (7168, 128),
}
"""(N, K) of one expert of Kimi K2, whole and cut for tensor parallelism."""


def source_weight(n: int, k: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Uniform codes and normal scales: int32 [n, k/8], bfloat16 [n, k/32]."""
    generator = torch.Generator().manual_seed(seed)
    words = torch.randint(-(2**31), 2**31, (n, k // 8), dtype=torch.int32, generator=generator)
    return words, (torch.randn(n, k // 32, generator=generator) * 0.02).bfloat16()


def codes_of(words: Tensor) -> Tensor:
    """uint8 [n, k] codes of int32 [n, k/8] words, by the definition: element i in bits 4·(i mod 8) of word i div 8."""
    shifts = torch.arange(0, 32, 4, dtype=torch.int32)
    return (words.unsqueeze(-1) >> shifts & 15).to(torch.uint8).flatten(-2)


def dense(words: Tensor, scale: Tensor) -> Tensor:
    """bfloat16 [n, k] = (code − 8) · scale, rounded once."""
    values = (codes_of(words).double() - 8) * scale.double().repeat_interleave(32, -1)
    return values.bfloat16()


def experts(count: int, n: int, k: int, *, gate_up: bool = False, seed: int = 0) -> tuple[PackedWeight, Tensor]:
    """Packed experts, and the same as dense BF16 [count, n, k] with the rows in source order ([gate | up])."""
    data = torch.empty(count, packed_bytes(n, k), dtype=torch.uint8)
    weights = []
    for expert in range(count):
        words, scale = source_weight(n, k, 1000 * seed + expert)
        weights.append(dense(words, scale))
        if gate_up:
            (gate, up), (gate_scale, up_scale) = words.chunk(2), scale.chunk(2)
            data[expert] = pack_gate_up(gate, gate_scale, up, up_scale)
        else:
            pack_into(data[expert], words, scale)
    order = RowOrder.GATE_UP_8 if gate_up else RowOrder.PLAIN
    return PackedWeight(data, n, k, order), torch.stack(weights)


def layer(
    held: tuple[int, ...], total: int, hidden: int = 128, intermediate: int = 64, modes: tuple[Mode, ...] = tuple(Mode)
) -> tuple[PackedLayer, Tensor, Tensor]:
    """A layer of which a rank holds some experts, and dense w13 and w2 of all of them."""
    w13, dense13 = experts(total, 2 * intermediate, hidden, gate_up=True, seed=1)
    w2, dense2 = experts(total, hidden, intermediate, seed=2)
    rows = list(held)
    return (
        PackedLayer(
            PackedWeight(w13.data[rows], w13.n, w13.k, w13.row_order, modes),
            PackedWeight(w2.data[rows], w2.n, w2.k, w2.row_order, modes),
            held,
            total,
        ),
        dense13,
        dense2,
    )


def activations(*shape: int, seed: int = 0) -> Tensor:
    """Normal BF16."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def _uniform(tokens: int, top_k: int, count: int) -> Tensor:
    generator = torch.Generator().manual_seed(tokens)
    return torch.stack([torch.randperm(count, generator=generator)[:top_k] for _ in range(tokens)]).int()


def _one_hot(tokens: int, top_k: int, count: int) -> Tensor:
    """Every token's first choice is the last expert."""
    ids = _uniform(tokens, top_k, count - 1)
    ids[:, 0] = count - 1
    return ids


def _few(tokens: int, top_k: int, count: int) -> Tensor:
    """Only the first ``top_k`` experts are ever chosen: all others are empty."""
    return _uniform(tokens, top_k, top_k)


def _sentinels(tokens: int, top_k: int, count: int) -> Tensor:
    """A third of the choices is −1."""
    ids = _uniform(tokens, top_k, count)
    ids.view(-1)[::3] = -1
    return ids


def _nobody(tokens: int, top_k: int, count: int) -> Tensor:
    return torch.full((tokens, top_k), -1, dtype=torch.int32)


def _repeated(tokens: int, top_k: int, count: int) -> Tensor:
    """A token may choose the same expert twice."""
    return torch.randint(0, count, (tokens, top_k), generator=torch.Generator().manual_seed(3)).int()


ROUTINGS: dict[str, Callable[[int, int, int], Tensor]] = {
    "uniform": _uniform,
    "one hot": _one_hot,
    "few": _few,
    "sentinels": _sentinels,
    "nobody": _nobody,
    "repeated": _repeated,
}
"""Name → (tokens, top_k, experts) → int32 topk_ids [tokens, top_k], −1 for none."""
