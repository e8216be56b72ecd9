"""A whole MoE layer over packed experts: gate_up with SwiGLU, down, and the weighted sum over each token's experts."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from chord_runtime import routing
from chord_runtime.errors import UsageError
from chord_runtime.format.layout import Mode, RowOrder
from chord_runtime.ops import api
from chord_runtime.ops.route import MAX_EXPERTS
from chord_runtime.ops.weight import PackedWeight, check_tensor


@dataclass(frozen=True)
class PackedLayer:
    """The routed experts of one layer that a rank holds."""

    w13: PackedWeight
    """gate and up: [experts, 2 · intermediate, hidden], row order ``gate_up_8``."""
    w2: PackedWeight
    """down: [experts, hidden, intermediate]."""
    experts: tuple[int, ...]
    """Global id of each local expert."""
    num_experts: int
    """Experts of the layer, on all ranks."""
    expert_map: Tensor = field(init=False)
    """int32 [num_experts]: global → local expert, −1 for other ranks'."""

    def __post_init__(self) -> None:
        w13, w2 = self.w13, self.w2
        if w13.row_order is not RowOrder.GATE_UP_8 or w2.row_order is not RowOrder.PLAIN or w13.n != 2 * w2.k:
            raise UsageError(
                f"w13 [{w13.n}, {w13.k}] {w13.row_order.value} and w2 [{w2.n}, {w2.k}] {w2.row_order.value} make no "
                "layer: w13 is gate_up_8 with twice as many rows as w2 has columns"
            )
        if not len(self.experts) == w13.num_experts == w2.num_experts or w13.k != w2.n:
            raise UsageError(
                f"{len(self.experts)} experts, {w13.num_experts} in w13 and {w2.num_experts} in w2, "
                f"hidden sizes {w13.k} and {w2.n}: these do not belong together"
            )
        expert_map = torch.full((self.num_experts,), -1, dtype=torch.int32)
        expert_map[list(self.experts)] = torch.arange(len(self.experts), dtype=torch.int32)
        object.__setattr__(self, "expert_map", expert_map.to(w13.data.device))


def moe_layer(
    x: Tensor,
    layer: PackedLayer,
    topk_ids: Tensor,
    topk_weights: Tensor,
    *,
    mode: Mode | str | None = None,
    max_m: int | None = None,
    block_size: int | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Σ over a token's experts of weight · down(silu(gate(x)) · up(x)): what the routed experts add to the residual.

    The three modes give equal results: SwiGLU and the weights are applied in FP32 before an operator rounds, and the
    sum over a token's choices runs in FP32 in their order, rounded once. The weight belongs to the down operator, whose
    epilogue holds a row's sums in FP32 anyway, so every mode rounds at the same places. With expert parallelism a rank
    gives the part of its own experts, with tensor parallelism its part of the sum: add the ranks' results.

    Args:
        x: bfloat16 [T, hidden], contiguous, on the layer's device; on the CPU float32 too.
        topk_ids: int32 or int64 [T, top_k], global experts; −1 for none.
        topk_weights: float32 [T, top_k].
        mode: by default as :func:`chord_runtime.routing.convention` chooses among those the layer was packed for.
        max_m: rows for each expert in masked mode; by default T.
        block_size: rows of a block in indexed mode; by default :func:`chord_runtime.routing.block_rows`.
        out: like ``x``, written in place and returned; a new tensor by default.

    Returns:
        bfloat16 [T, hidden].

    Raises:
        ModeError: the layer was not packed for ``mode``.
        UsageError: a dtype, shape, stride, device, mode or size that does not fit, whatever T is. Experts that do not
            exist, and more choices of an expert than ``max_m``, on the CPU outside of ``torch.compile`` only: on CUDA
            nothing is read, and they are routed nowhere.
    """
    chosen = _check(x, layer, topk_ids, topk_weights, mode, out)
    block_size = routing.block_rows(topk_ids.numel(), layer.num_experts) if block_size is None else block_size
    block_size = api.check_block_size(block_size)
    max_m = None if max_m is None else api.integer("max_m", max_m)
    out = torch.empty_like(x) if out is None else out
    if not topk_ids.numel():
        return out.zero_()
    arguments = x, layer, topk_ids, topk_weights
    if chosen is Mode.INDEXED:
        results, rows = _indexed(*arguments, block_size)
    elif chosen is Mode.CONTIGUOUS:
        results, rows = _contiguous(*arguments)
    else:
        results, rows = _masked(*arguments, max_m)
    return routing.combine(results, rows, out, overlap=_overlaps(layer))


def _check(
    x: Tensor,
    layer: PackedLayer,
    topk_ids: Tensor,
    topk_weights: Tensor,
    mode: Mode | str | None,
    out: Tensor | None,
) -> Mode:
    """The mode, once everything fits, by shapes, dtypes and devices alone: the same in all modes, whatever T is."""
    if not isinstance(layer, PackedLayer):
        raise UsageError(f"layer must be a PackedLayer, such as chord.load(…)[1]; found {type(layer).__name__}")
    for name, tensor in (("x", x), ("topk_ids", topk_ids), ("topk_weights", topk_weights)):
        check_tensor(name, tensor)
    try:
        chosen = routing.convention(layer.w13.modes) if mode is None else Mode(mode)
    except ValueError:
        raise UsageError(f"mode {mode!r}: supported are {', '.join(m.value for m in Mode)}") from None
    for weight in (layer.w13, layer.w2):
        api.check_weight(chosen, weight)
    if x.dim() != 2 or topk_ids.dim() != 2 or topk_ids.shape[0] != x.shape[0]:
        raise UsageError(f"x is [T, hidden] and topk_ids [T, top_k]; found {list(x.shape)} and {list(topk_ids.shape)}")
    api.check_rows("x", x, layer.w13)
    routing.check(topk_ids, layer.expert_map, topk_weights)
    if out is not None:
        api.check_out(out, (x.shape[0], layer.w2.n), x)
    return chosen


def _contiguous(x: Tensor, layer: PackedLayer, topk_ids: Tensor, topk_weights: Tensor) -> tuple[Tensor, Tensor]:
    route = routing.contiguous(topk_ids, layer.w13.num_experts, layer.expert_map, topk_weights)
    rows = routing.gather(x, route.routed, topk_ids)
    hidden = api.contiguous(rows, layer.w13, route.m_indices, activation="swiglu")
    return api.contiguous(hidden, layer.w2, route.m_indices, row_weight=route.row_weight), route.rows


def _masked(
    x: Tensor, layer: PackedLayer, topk_ids: Tensor, topk_weights: Tensor, max_m: int | None
) -> tuple[Tensor, Tensor]:
    route = routing.masked(topk_ids, layer.w13.num_experts, max_m, layer.expert_map, topk_weights)
    rows = routing.gather(x, route.routed, topk_ids)
    masked = route.masked_m, route.expected_m
    hidden = api.masked(rows, layer.w13, *masked, activation="swiglu")
    return api.masked(hidden, layer.w2, *masked, row_weight=route.row_weight), route.rows


def _indexed(
    x: Tensor, layer: PackedLayer, topk_ids: Tensor, topk_weights: Tensor, block_size: int
) -> tuple[Tensor, Tensor]:
    route = routing.indexed(topk_ids, layer.w13.num_experts, block_size, layer.expert_map)
    buffers = route.sorted_ids, route.expert_ids, route.num_tokens_padded
    top_k, total = topk_ids.shape[1], route.num_experts
    hidden = api.indexed(x, layer.w13, *buffers, top_k, block_size, num_experts=total, activation="swiglu")
    weights = topk_weights.contiguous()
    down = api.indexed(
        hidden, layer.w2, *buffers, 1, block_size, num_experts=total, topk_weights=weights, overlap=_overlaps(layer)
    )
    return down, route.rows


def _overlaps(layer: PackedLayer) -> bool:
    """Whether routing comes from one kernel: what torch's operators make of it, Inductor may move behind gate_up."""
    return layer.num_experts <= MAX_EXPERTS
