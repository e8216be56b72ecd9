"""What a user calls: grouped W4A16 GEMMs over a rank's packed experts, one function per way in which rows arrive.

All three multiply BF16 rows by INT4 experts, ``out[row] = rows[row] @ dequantized(w[expert of row]).T``, summed in
FP32 and rounded to BF16 once. CUDA tensors go to Chord's kernels, CPU tensors to the reference. On CUDA nothing here
reads the device or waits for it: calls can be captured in CUDA graphs and compiled by ``torch.compile``.

Arguments that all three share:

- ``w``: packed weight [experts, N, K] of this rank (:class:`~chord_runtime.ops.weight.PackedWeight`).
- ``activation``: ``None``, or ``"swiglu"`` for a ``gate_up_8`` weight: the output is silu(gate)·up, computed in FP32.
  Without it a ``gate_up_8`` weight gives [gate | up].
- ``out``: bfloat16, contiguous, written in place and returned; a new tensor by default. The columns are N, or N/2
  after SwiGLU. Rows that no expert owns are left as they are, so in a new tensor they are undefined. It must share no
  memory with the other arguments, which is not checked: they are read while it is written.
- ``validate``: whether to check the routing values too, which reads them; by default only on the CPU.

On the CPU rows may be float32 too, and the result then is: so a whole model is compared without the noise of BF16
activations.

They raise :class:`~chord_runtime.errors.ModeError` for a weight that was not packed for the mode, and
:class:`~chord_runtime.errors.UsageError` for anything else that does not fit, before any work is done.
"""

from __future__ import annotations

import operator
from typing import Literal

import torch
from torch import Tensor

from chord_runtime.errors import ModeError, UsageError
from chord_runtime.format.layout import Mode
from chord_runtime.ops import library
from chord_runtime.ops import validate as values
from chord_runtime.ops.pack import pack_w4a16_grouped
from chord_runtime.ops.validate import RUN_ROWS
from chord_runtime.ops.weight import PackedWeight, check_tensor

__all__ = ["Activation", "contiguous", "indexed", "masked", "pack_w4a16_grouped"]

Activation = Literal["swiglu"]


def contiguous(
    a: Tensor,
    w: PackedWeight,
    m_indices: Tensor,
    *,
    activation: Activation | None = None,
    row_weight: Tensor | None = None,
    out: Tensor | None = None,
    validate: bool | None = None,
) -> Tensor:
    """Rows sorted by expert, each expert's run starting at a multiple of 128 rows: prefill.

    Args:
        a: bfloat16 [M, K], M a multiple of 128.
        m_indices: int32 [M], the expert of each row; −1 for padding, which is neither read nor written.
        row_weight: float32 [M], multiplied into each row before rounding.
        w, activation, out, validate: see the module.

    Returns:
        ``out``, bfloat16 [M, N] or [M, N/2].
    """
    check_weight(Mode.CONTIGUOUS, w)
    check_tensor("a", a)
    if a.dim() != 2 or a.shape[0] % RUN_ROWS:
        raise UsageError(
            f"a must be [M, K] with M a multiple of {RUN_ROWS}; found {_sizes(a)}: pad with rows of m_indices −1"
        )
    rows = a.shape[0]
    out, swiglu = _prepare("a", a, w, rows, activation, "row_weight", row_weight, out)
    _routing("m_indices", m_indices, rows, w.device)
    if _reads_values(validate, a):
        values.contiguous(m_indices, w.num_experts)
    if rows:
        library.contiguous(a, w.data, m_indices, row_weight, out, w.n, w.interleaved, swiglu)
    return out


def masked(
    a: Tensor,
    w: PackedWeight,
    masked_m: Tensor,
    expected_m: int,
    *,
    activation: Activation | None = None,
    row_weight: Tensor | None = None,
    out: Tensor | None = None,
    validate: bool | None = None,
) -> Tensor:
    """A fixed number of rows for each expert, of which the first ``masked_m`` are valid: decode.

    Args:
        a: bfloat16 [G, max_m, K] or [G·max_m, K]; group g belongs to expert g, G = ``w.num_experts``.
        masked_m: int32 [G], valid rows of each group, 0..max_m. Rows beyond are neither read nor written.
        expected_m: rows a group has on average, known without reading the device; only steers the choice of kernel.
        row_weight: float32 [G·max_m] or [G, max_m], multiplied into each row before rounding.
        w, activation, out, validate: see the module.

    Returns:
        ``out``, bfloat16 [G·max_m, N] or [G·max_m, N/2].
    """
    check_weight(Mode.MASKED, w)
    check_tensor("a", a)
    expected_m = integer("expected_m", expected_m)
    groups = w.num_experts
    shape = a.shape
    rows = shape[0] * shape[1] if len(shape) == 3 else shape[0] if len(shape) == 2 else 0
    if not (shape[0] == groups if len(shape) == 3 else len(shape) == 2 and rows % groups == 0):
        raise UsageError(
            f"a must be [G, max_m, K] or [G·max_m, K] with G = {groups}, the weight's experts; found {_sizes(a)}"
        )
    out, swiglu = _prepare("a", a, w, rows, activation, "row_weight", row_weight, out)
    _routing("masked_m", masked_m, groups, w.device)
    if _reads_values(validate, a):
        values.masked(masked_m, rows // groups)
    if rows:
        library.masked(a, w.data, masked_m, expected_m, row_weight, out, w.n, w.interleaved, swiglu)
    return out


def indexed(
    x: Tensor,
    w: PackedWeight,
    sorted_ids: Tensor,
    expert_ids: Tensor,
    num_tokens_padded: Tensor,
    top_k: int,
    block_size: int | None = None,
    *,
    num_experts: int | None = None,
    topk_weights: Tensor | None = None,
    activation: Activation | None = None,
    overlap: bool = False,
    out: Tensor | None = None,
    validate: bool | None = None,
) -> Tensor:
    """Rows gathered by the buffers of vLLM's ``moe_align_block_size``, as they are, over-allocated tails included.

    Args:
        x: bfloat16 [T, K]. Row ``id // top_k`` is multiplied for routed index ``id``: ``top_k`` is the fan-out of
            gate_up; for down, whose rows are routed already, it is 1.
        sorted_ids: int32, routed indices (token · top_k + choice) in blocks of one expert; T·top_k is padding. Larger
            values are skipped too, but refused where values are checked.
        expert_ids: int32, the expert of each block; −1 for blocks to skip.
        num_tokens_padded: int32 [1], how much of ``sorted_ids`` is used.
        block_size: entries of ``sorted_ids`` in a block. May be left out when the two buffers' sizes tell: their ratio
            is a power of two.
        num_experts: experts of all ranks, over which the T·top_k rows are spread; by default the weight's alone. Rows
            an expert has on average only steer the choice of kernel.
        topk_weights: float32 [T, top_k] or [T·top_k], multiplied into row id before rounding.
        overlap: promises that the kernel launched last on this stream wrote neither ``w`` nor a routing buffer, and
            waited for the one before it, as Chord's do: weights are then copied while it ends. So it is for down,
            whose routing gate_up has used already.
        w, activation, out, validate: see the module.

    Returns:
        ``out``, bfloat16 [T·top_k, N] or [T·top_k, N/2]; row = routed index.
    """
    check_weight(Mode.INDEXED, w)
    check_tensor("x", x)
    top_k = integer("top_k", top_k)
    if num_experts is not None and (num_experts := integer("num_experts", num_experts)) < w.num_experts:
        raise UsageError(f"num_experts, of all ranks, is at least the weight's {w.num_experts}; found {num_experts}")
    if x.dim() != 2 or top_k < 1:
        raise UsageError(f"x must be [T, K] and top_k at least 1; found {_sizes(x)} and {top_k}")
    rows = x.shape[0] * top_k
    out, swiglu = _prepare("x", x, w, rows, activation, "topk_weights", topk_weights, out)
    _routing("sorted_ids", sorted_ids, None, w.device)
    _routing("expert_ids", expert_ids, None, w.device)
    _routing("num_tokens_padded", num_tokens_padded, 1, w.device)
    block_size = _infer_block_size(sorted_ids, expert_ids) if block_size is None else check_block_size(block_size)
    if _reads_values(validate, x):
        values.indexed(sorted_ids, expert_ids, num_tokens_padded, block_size, rows, w.num_experts)
    if rows:
        library.indexed(
            x, w.data, sorted_ids, expert_ids, num_tokens_padded, top_k, block_size, topk_weights, out,
            w.n, w.interleaved, swiglu, num_experts or 0, overlap,
        )  # fmt: skip
    return out


def check_weight(mode: Mode, w: PackedWeight) -> None:
    """Raise UsageError for something else than a packed weight, ModeError for one that was packed for other modes."""
    if not isinstance(w, PackedWeight):
        raise UsageError(
            f"w must be a PackedWeight, found {type(w).__name__}: take it from a layer of chord.load, "
            "or pack a stack of experts with chord.pack_w4a16_grouped"
        )
    if mode not in w.modes:
        raise ModeError(
            f"{mode.value} was called on a weight packed for {', '.join(m.value for m in w.modes) or 'no mode'}: "
            f"convert again with --mode {mode.value} (or all) into another directory, or call an operation "
            "that it was packed for"
        )


def check_rows(name: str, rows: Tensor, w: PackedWeight) -> None:
    """Raise UsageError unless ``rows`` can be multiplied by ``w``."""
    fits = rows.dtype is torch.bfloat16 or (rows.dtype is torch.float32 and rows.is_cpu)
    if not fits or rows.shape[-1] != w.k or not rows.is_contiguous() or rows.device != w.device:
        raise UsageError(
            f"{name} must be contiguous bfloat16 […, {w.k}] on {w.device}, where the weight is; found {_found(rows)}"
        )


def check_out(out: Tensor, shape: tuple[int, int], rows: Tensor) -> None:
    """Raise UsageError unless results of ``rows`` can be written to ``out``."""
    check_tensor("out", out)
    if out.dtype is not rows.dtype or out.shape != shape or not out.is_contiguous() or out.device != rows.device:
        raise UsageError(
            f"out must be contiguous {_name(rows.dtype)} {list(shape)} on {rows.device}; found {_found(out)}"
        )


def integer(name: str, value: int) -> int:
    """``value`` as an int, from whatever is one to Python. A tensor is none: reading it would wait for its device."""
    if type(value) is int or isinstance(value, torch.SymInt):
        return value
    try:
        if not isinstance(value, (bool, Tensor)):
            return operator.index(value)
    except TypeError:
        pass
    found = type(value).__name__ if isinstance(value, Tensor) else f"{type(value).__name__} {value!r}"
    raise UsageError(f"{name} must be an integer; found {found}")


def check_block_size(block_size: int) -> int:
    """The block size as an int. Raises UsageError for one that is none, or that has no rows."""
    block_size = integer("block_size", block_size)
    if block_size < 1:
        raise UsageError(f"block_size must be at least 1; found {block_size}")
    return block_size


def _prepare(
    name: str,
    rows: Tensor,
    w: PackedWeight,
    num_rows: int,
    activation: str | None,
    weight_name: str,
    weight: Tensor | None,
    out: Tensor | None,
) -> tuple[Tensor, bool]:
    """Check what the modes share; returns ``out`` and whether SwiGLU is asked for. One pass of cheap comparisons."""
    check_rows(name, rows, w)
    device = w.device
    if activation is not None and (activation != "swiglu" or not w.interleaved):
        raise UsageError(
            f"activation {activation!r} on a weight in row order {w.row_order.value}: supported are None, and 'swiglu' "
            "for gate_up_8 (gate and up packed together)"
        )
    if weight is not None and (
        not isinstance(weight, Tensor)
        or weight.dtype is not torch.float32
        or weight.numel() != num_rows
        or not weight.is_contiguous()
        or weight.device != device
    ):
        raise UsageError(f"{weight_name} must be contiguous float32 [{num_rows}] on {device}; found {_found(weight)}")
    columns = w.n if activation is None else w.n // 2
    if out is None:
        return rows.new_empty((num_rows, columns)), activation is not None
    check_out(out, (num_rows, columns), rows)
    return out, activation is not None


def _routing(name: str, tensor: Tensor, length: int | None, device: torch.device) -> None:
    if (
        not isinstance(tensor, Tensor)
        or tensor.dtype is not torch.int32
        or tensor.dim() != 1
        or (length is not None and tensor.numel() != length)
        or not tensor.is_contiguous()
        or tensor.device != device
    ):
        size = "…" if length is None else length
        raise UsageError(f"{name} must be contiguous int32 [{size}] on {device}; found {_found(tensor)}")


def _found(value: object) -> str:
    if not isinstance(value, Tensor):
        return type(value).__name__
    layout = "" if value.is_contiguous() else f" with strides {value.stride()}"
    return f"{_name(value.dtype)} {_sizes(value)}{layout} on {value.device}"


def _sizes(tensor: Tensor) -> str:
    return str(list(tensor.shape)) if tensor.dim() else "scalar"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _reads_values(validate: bool | None, rows: Tensor) -> bool:
    if validate is None:
        return rows.is_cpu and not torch.compiler.is_compiling()
    return validate


def _infer_block_size(sorted_ids: Tensor, expert_ids: Tensor) -> int:
    """The block size, if the buffers' sizes tell: an aligner allocates ceil(sorted_ids / block size) expert ids."""
    entries, blocks = sorted_ids.numel(), expert_ids.numel()
    size = entries // blocks if blocks else 0
    if size < 1 or size * blocks != entries or size & (size - 1):
        raise UsageError(
            f"the block size does not follow from {entries} sorted_ids and {blocks} expert_ids: pass block_size"
        )
    return size
