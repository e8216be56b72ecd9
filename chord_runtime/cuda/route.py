"""Launches of the small kernels around the GEMMs: align, gather, combine. Each is one launch on the current stream."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

import torch
from torch import Tensor

from chord_runtime.cuda.compile import Cubin, arch_of, compile_kernel
from chord_runtime.errors import KernelError, UsageError
from chord_runtime.ops.route import MAX_EXPERTS, Layout, align_outputs

_P, _I = ctypes.c_void_p, ctypes.c_int
_ALIGN_TYPES = (_P,) * 8 + (_I,) * 6
_GATHER_TYPES = (_P,) * 3 + (_I,) * 3
_COMBINE_TYPES = (_P,) * 3 + (_I,) * 2

CONFIGS: list[tuple[str, dict[str, int]]] = [
    *(("align", {"CHORD_LAYOUT": layout, "CHORD_IDS_64": wide}) for layout in Layout for wide in (0, 1)),
    ("gather", {}),
    ("combine", {}),
]
"""Every instantiation, for compiling ahead."""


def align(
    topk_ids: Tensor,
    expert_map: Tensor | None,
    topk_weights: Tensor | None,
    layout: int,
    num_experts: int,
    align: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """``chord::align`` (see :mod:`chord_runtime.ops.route`)."""
    known = num_experts if expert_map is None else expert_map.numel()
    if max(num_experts, known) > MAX_EXPERTS:
        raise UsageError(f"{max(num_experts, known)} experts: the align kernel counts at most {MAX_EXPERTS}")
    outputs = align_outputs(topk_ids, topk_weights, Layout(layout), num_experts, align)
    topk_ids = topk_ids.contiguous()
    weights = None if topk_weights is None else topk_weights.contiguous()
    choices = topk_ids.numel()
    kernel = _kernel("align", topk_ids.device.index, (layout, int(topk_ids.dtype is torch.int64)))
    threads = kernel.constants["chord_align_threads"]
    padding = choices if layout == Layout.INDEXED else -1
    tensors = (topk_ids, expert_map, weights, *outputs)
    kernel.launch(
        (max(1, -(-choices // threads)), 1),
        threads,
        (*map(_pointer, tensors), choices, known, num_experts, align, outputs[0].numel(), padding),
        _ALIGN_TYPES,
    )
    return outputs


def gather(x: Tensor, routed: Tensor, choices: int, top_k: int) -> Tensor:
    """``chord::gather``: row i of the result is row ``routed[i] // top_k`` of ``x``; unset where that is no row."""
    out = x.new_empty((routed.shape[0], x.shape[1]))
    kernel = _kernel("gather", x.device.index)
    threads = kernel.constants["chord_gather_threads"]
    arguments = (x.contiguous().data_ptr(), routed.data_ptr(), out.data_ptr(), choices, top_k, x.shape[1])
    kernel.launch((routed.shape[0], 1), threads, arguments, _GATHER_TYPES)
    return out


def combine(results: Tensor, rows: Tensor, out: Tensor) -> None:
    """``chord::combine``: ``out[t]`` = Σ of rows ``rows[t]`` of ``results``, −1 for none."""
    tokens, top_k = rows.shape
    columns = results.shape[1]
    kernel = _kernel("combine", results.device.index)
    per_block = kernel.constants["chord_combine_columns"]
    threads = kernel.constants["chord_combine_threads"]
    arguments = (results.data_ptr(), rows.data_ptr(), out.data_ptr(), top_k, columns)
    kernel.launch((tokens, -(-columns // per_block)), threads, arguments, _COMBINE_TYPES)


class _Kernel:
    """A kernel loaded on one device."""

    def __init__(self, cubin: Cubin, device: int) -> None:
        from cuda.bindings import driver

        self.constants = cubin.constants
        self._device = device
        self._launch = driver.cuLaunchKernel
        with torch.cuda.device(device):
            self._module = _check(driver.cuModuleLoadData(cubin.code))
            self._function = _check(driver.cuModuleGetFunction(self._module, f"chord_{cubin.name}".encode()))

    def launch(self, blocks: tuple[int, int], threads: int, values: tuple[Any, ...], types: tuple[Any, ...]) -> None:
        device = self._device
        stream = torch._C._cuda_getCurrentRawStream(device)
        _check(self._launch(self._function, *blocks, 1, threads, 1, 1, 0, stream, (values, types), 0))


@cache
def _kernel(name: str, device: int, align: tuple[int, int] | None = None) -> _Kernel:
    defines = {} if align is None else {"CHORD_LAYOUT": align[0], "CHORD_IDS_64": align[1]}
    cubin = compile_kernel(name, defines, arch_of(torch.cuda.get_device_capability(device)))
    return _Kernel(cubin, device)


def _pointer(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def _check(result: tuple[Any, ...]) -> Any:
    status, *values = result
    if int(status):
        raise KernelError(f"a routing kernel cannot be launched: {status.name}; `chord doctor` shows what is missing")
    return values[0] if values else None
