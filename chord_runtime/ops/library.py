"""The operators as PyTorch sees them: ``torch.ops.chord.contiguous``, ``.masked`` and ``.indexed``.

They write into ``out`` and return nothing, so that a caller can reuse buffers and capture CUDA graphs; call them
through :mod:`chord_runtime.ops.api`, which checks arguments and allocates. ``w`` is uint8 [experts, bytes], ``n`` the
rows of one expert's weight; ``gate_up`` says that they are gate and up, 8 by 8 (stored un-interleaved as [gate | up],
or with ``swiglu`` as n/2 columns silu(gate)·up). Definitions go straight to the dispatcher: the ``custom_op``
decorator costs five times the host time a call.

The dispatcher itself takes 3 to 5 µs to hand a call from Python to Python. :func:`contiguous`, :func:`masked` and
:func:`indexed` are the operators, save that plain CUDA tensors outside of anything that watches operators (a compiler,
a tracer, a dispatch mode, a transform, a profiler) go to what the operator would call, at once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from chord_runtime.errors import UsageError
from chord_runtime.ops import reference

_SCHEMAS = {
    "contiguous": "(Tensor a, Tensor w, Tensor m_indices, Tensor? row_weight, Tensor(a!) out, "
    "int n, bool gate_up, bool swiglu) -> ()",
    "masked": "(Tensor a, Tensor w, Tensor masked_m, SymInt expected_m, Tensor? row_weight, Tensor(a!) out, "
    "int n, bool gate_up, bool swiglu) -> ()",
    "indexed": "(Tensor x, Tensor w, Tensor sorted_ids, Tensor expert_ids, Tensor num_tokens_padded, int top_k, "
    "int block_size, Tensor? topk_weights, Tensor(a!) out, int n, bool gate_up, bool swiglu, int num_experts=0, "
    "bool overlap=False) -> ()",
}

_library = torch.library.Library("chord", "DEF")  # type: ignore[no-untyped-call]


# Where the row weights stand among the arguments; the rows stand first.
_ROW_WEIGHT = {"contiguous": 3, "masked": 4, "indexed": 7}


def refuse_grad(rows: torch.Tensor, row_weight: torch.Tensor | None) -> None:
    """Raise UsageError if a gradient is asked for: without this, autograd would silently drop it."""
    if torch.is_grad_enabled() and (rows.requires_grad or (row_weight is not None and row_weight.requires_grad)):
        raise UsageError(
            "an input of a chord operator requires a gradient; packed INT4 experts are for inference: "
            "call under torch.no_grad() or torch.inference_mode(), or detach the input"
        )


def _cpu(name: str) -> Callable[..., None]:
    kernel: Callable[..., None] = getattr(reference, name)
    weight = _ROW_WEIGHT[name]

    def run(*args: Any) -> None:
        refuse_grad(args[0], args[weight])
        kernel(*args)

    return run


def _cuda(name: str) -> Callable[..., None]:
    """The CUDA kernel of an operator, found at its first call: importing this package needs no CUDA."""
    kernel: Callable[..., None] | None = None
    weight = _ROW_WEIGHT[name]

    def run(*args: Any) -> None:
        nonlocal kernel
        if kernel is None:
            from chord_runtime.cuda import launch

            kernel = getattr(launch, name)
        refuse_grad(args[0], args[weight])
        kernel(*args)

    return run


def _watched() -> bool:
    """Whether something beside the caller wants to see operators; not to be asked under ``torch.compile``."""
    return bool(
        torch._C._len_torch_dispatch_stack()
        or torch._C._functorch.peek_interpreter_stack() is not None
        or torch._C._get_tracing_state() is not None
        or torch._C._autograd._profiler_enabled()
    )


def _entry(name: str) -> Callable[..., None]:
    operator: Callable[..., None] = getattr(torch.ops.chord, name).default
    kernel = _cuda(name)

    def call(rows: torch.Tensor, *args: Any) -> None:
        if torch.compiler.is_compiling() or type(rows) is not torch.Tensor or not rows.is_cuda or _watched():
            operator(rows, *args)
        else:
            kernel(rows, *args)

    return call


def _fake(name: str) -> Callable[..., None]:
    """Shapes need no computing: the operators return nothing."""
    weight = _ROW_WEIGHT[name]

    def run(*args: Any) -> None:
        refuse_grad(args[0], args[weight])

    return run


for _name, _schema in _SCHEMAS.items():
    _library.define(_name + _schema)  # type: ignore[no-untyped-call]
    _library.impl(_name, _cpu(_name), "CPU")  # type: ignore[no-untyped-call]
    _library.impl(_name, _cuda(_name), "CUDA")  # type: ignore[no-untyped-call]
    torch.library.register_fake(f"chord::{_name}", _fake(_name), lib=_library)

contiguous, masked, indexed = map(_entry, _SCHEMAS)
