"""The CUDA side of the three operators: from tensors to one kernel launch, without reading or waiting for the device.

What a shape needs (tile, compiled kernel, its handle on the device) is resolved at its first call and then found in a
dictionary; a call after that compiles and allocates nothing. Calls can be captured in CUDA graphs; the first one of a
shape compiles, so make it before capturing where you can (it also works inside a capture). Any number of devices,
streams and threads may call at once: handles are immutable, and kernels keep no state between launches.

The functions take what the operators take (:mod:`chord_runtime.ops.library`) and assume what
:mod:`chord_runtime.ops.api` has checked; what would corrupt memory or crash the device is checked here again.
"""

from __future__ import annotations

import ctypes
import threading
from dataclasses import dataclass
from typing import Any

import torch
from cuda.bindings import driver
from torch import Tensor

from chord_runtime.cuda import select
from chord_runtime.cuda.compile import arch_of, compile_kernel
from chord_runtime.cuda.handle import Handle, check
from chord_runtime.cuda.parameters import TENSOR_MAP_BYTES, Parameters
from chord_runtime.cuda.select import TileConfig
from chord_runtime.errors import UsageError
from chord_runtime.format.block import BLOCK_K, STRIP_ROWS, packed_bytes

_CACHE_LIMIT = 4096
_PORTABLE_BLOCKS, _PORTABLE_THREADS = 8, 128  # a multiprocessor, a block

_MOST_ELEMENTS = 2**32 // 2
"""Of gathered activations: kernels reach their rows by 32-bit offsets in bytes (csrc/chord/gather.cuh)."""

_MOST_STRIPS = 2**15
"""Of one expert's weight: ``Tile`` of csrc/chord/tile.cuh counts them, and a tile beyond, in 16 bits."""

_TILED = Parameters("TQQQQiiii")
_GATHERED = Parameters("QQQQQQQiiiiiii")
_PORTABLE = Parameters("QQQQQQQiiiiii")


@dataclass(frozen=True)
class Kernel:
    """One instantiation on one device, with all that its launches have in common."""

    name: str
    tile: TileConfig
    handle: Handle
    grid: int
    threads: int

    def launch(self, arguments: tuple[Any, ...], parameters: Parameters) -> None:
        """Launch on the device's current PyTorch stream."""
        self.handle.launch(self.grid, 1, self.threads, arguments, parameters)


_plans: dict[tuple[Any, ...], Kernel] = {}
_kernels: dict[tuple[Any, ...], Kernel] = {}
_tensor_maps: dict[tuple[int, ...], bytes] = {}
_lock = threading.Lock()


def contiguous(
    a: Tensor,
    w: Tensor,
    m_indices: Tensor,
    row_weight: Tensor | None,
    out: Tensor,
    n: int,
    gate_up: bool,
    swiglu: bool,
    *,
    tile: TileConfig | None = None,
) -> None:
    """Rows sorted by expert in runs that start at multiples of 128 rows; ``tile`` overrides selection."""
    m, k = a.shape
    experts = w.shape[0]
    if not m:
        return
    start, weights, target = a.data_ptr(), w.data_ptr(), out.data_ptr()
    mean = m // max(experts, 1)
    kernel = _kernel("contiguous", a, w, start | weights | target, experts, n, k, mean, gate_up, swiglu, tile)
    weight = 0 if row_weight is None else row_weight.data_ptr()
    pointers = (weights, m_indices.data_ptr(), weight, target)
    if kernel.name == "portable":
        _launch_portable(kernel, a, pointers, 0, 0, experts, m, 1, select.RUN_ROWS, n, k)
    else:
        activations = _tensor_map(kernel.tile, start, m, k)
        kernel.launch((activations, *pointers, experts, m, n, k), _TILED)


def masked(
    a: Tensor,
    w: Tensor,
    masked_m: Tensor,
    expected_m: int,
    row_weight: Tensor | None,
    out: Tensor,
    n: int,
    gate_up: bool,
    swiglu: bool,
    *,
    tile: TileConfig | None = None,
) -> None:
    """``max_m`` rows for each expert, the first ``masked_m`` valid; ``tile`` overrides selection."""
    experts, k = w.shape[0], a.shape[-1]
    rows = out.shape[0]
    if not rows:
        return
    max_m = rows // experts
    start, weights, target = a.data_ptr(), w.data_ptr(), out.data_ptr()
    mean = 1 if expected_m < 1 else expected_m if expected_m < max_m else max_m
    kernel = _kernel("masked", a, w, start | weights | target, experts, n, k, mean, gate_up, swiglu, tile)
    weight = 0 if row_weight is None else row_weight.data_ptr()
    pointers = (weights, masked_m.data_ptr(), weight, target)
    if kernel.name == "portable":
        _launch_portable(kernel, a, pointers, 0, 0, experts, rows, 1, select.RUN_ROWS, n, k)
    else:
        activations = _tensor_map(kernel.tile, start, rows, k)
        kernel.launch((activations, *pointers, experts, max_m, n, k), _TILED)


def indexed(
    x: Tensor,
    w: Tensor,
    sorted_ids: Tensor,
    expert_ids: Tensor,
    num_tokens_padded: Tensor,
    top_k: int,
    block_size: int,
    topk_weights: Tensor | None,
    out: Tensor,
    n: int,
    gate_up: bool,
    swiglu: bool,
    num_experts: int = 0,
    overlap: bool = False,
    *,
    tile: TileConfig | None = None,
) -> None:
    """Rows gathered by ``moe_align_block_size``'s buffers; ``tile`` overrides selection."""
    tokens, k = x.shape
    experts = w.shape[0]
    rows = tokens * top_k
    if not rows:
        return
    if tokens * k > _MOST_ELEMENTS:
        raise UsageError(
            f"activations [{tokens}, {k}] take {tokens * k * 2 / 2**30:.1f} GiB; indexed gathers from at most 4 GiB: "
            f"call it with at most {_MOST_ELEMENTS // k} rows at a time"
        )
    start, weights, target = x.data_ptr(), w.data_ptr(), out.data_ptr()
    mean = select.rounded(rows / (num_experts or experts))
    kernel = _kernel("indexed", x, w, start | weights | target, experts, n, k, mean, gate_up, swiglu, tile)
    weight = 0 if topk_weights is None else topk_weights.data_ptr()
    if kernel.name == "portable":
        pointers = (weights, sorted_ids.data_ptr(), weight, target)
        blocks, used = expert_ids.data_ptr(), num_tokens_padded.data_ptr()
        _launch_portable(kernel, x, pointers, blocks, used, experts, rows, top_k, block_size, n, k)
        return
    kernel.launch(
        (
            start, weights, sorted_ids.data_ptr(), expert_ids.data_ptr(), num_tokens_padded.data_ptr(),
            weight, target, experts, rows, top_k, block_size, n, k, int(overlap),
        ),
        _GATHERED,
    )  # fmt: skip


def _launch_portable(
    kernel: Kernel,
    x: Tensor,
    pointers: tuple[int, int, int, int],
    expert_ids: int,
    num_tokens_padded: int,
    *integers: int,
) -> None:
    w, routing, weight, out = pointers
    arguments = (x.data_ptr(), w, routing, expert_ids, num_tokens_padded, weight, out, *integers)
    kernel.launch(arguments, _PORTABLE)


def _kernel(
    mode: str,
    x: Tensor,
    w: Tensor,
    starts: int,
    experts: int,
    n: int,
    k: int,
    rows: float,
    gate_up: bool,
    swiglu: bool,
    tile: TileConfig | None,
) -> Kernel:
    """The kernel for a call; ``rows`` is the number of rows an expert has on average, as far as the host knows."""
    if starts & 15:
        raise UsageError(
            f"{mode}: activations, weight and output must start at multiples of 16 bytes: pass tensors that do not "
            "start inside another one, or copies of them"
        )
    key = (mode, x.get_device(), experts, n, k, rows, gate_up, swiglu, tile)
    found = _plans.get(key)
    return _resolve(key, tuple(w.shape)) if found is None else found


def _resolve(key: tuple[Any, ...], shape: tuple[int, ...]) -> Kernel:
    mode, device, experts, n, k, rows, gate_up, swiglu, tile = key
    if n % STRIP_ROWS or k % BLOCK_K or not 0 < n <= _MOST_STRIPS * STRIP_ROWS or k <= 0:
        raise UsageError(
            f"N={n}, K={k} is not supported: N must be a multiple of {STRIP_ROWS} up to {_MOST_STRIPS * STRIP_ROWS}, "
            f"and K of {BLOCK_K}"
        )
    if len(shape) != 2 or shape[1] != packed_bytes(n, k):
        raise UsageError(
            f"the packed weight has shape {list(shape)}; for N={n}, K={k} it must be [experts, {packed_bytes(n, k)}]"
        )
    output = select.SWIGLU if swiglu else select.GATE_UP if gate_up else select.PLAIN
    arch = arch_of(torch.cuda.get_device_capability(device))
    sms = torch.cuda.get_device_properties(device).multi_processor_count
    if tile is None:
        tile = select.choose(mode, n, k, experts, rows, arch, sms)
    else:
        select.check(mode, tile, k)
    name, defines = select.instantiation(mode, tile, output, arch)
    with _lock:
        kernel_key = (device, name, tuple(sorted(defines.items())))
        kernel = _kernels.get(kernel_key)
        if kernel is None:
            kernel = _kernels[kernel_key] = _load(device, name, defines, tile, tile.shared_bytes(output), arch, sms)
        if len(_plans) >= _CACHE_LIMIT:
            _plans.clear()
        _plans[key] = kernel
    return kernel


def _load(
    device: int, name: str, defines: dict[str, int], tile: TileConfig, shared_bytes: int, arch: str, sms: int
) -> Kernel:
    portable = name == "portable"  # it does not wait for the kernel before by itself, as the Hopper kernels do
    handle = Handle(compile_kernel(name, defines, arch), device, 0 if portable else shared_bytes, waits=not portable)
    blocks = sms * (_PORTABLE_BLOCKS if portable else tile.occupancy)
    return Kernel(name, tile, handle, blocks, _PORTABLE_THREADS if portable else tile.threads)


def _tensor_map(tile: TileConfig, address: int, rows: int, k: int) -> bytes:
    """Activations [rows, K] as boxes of 64 columns, ``tile.box`` rows and, if that is a whole tile, a stage of K."""
    deep = tile.stage_k if tile.box == tile.tokens else 1
    key = (address, rows, k, tile.box, deep)
    found = _tensor_maps.get(key)
    if found is None:
        u64, u32 = driver.cuuint64_t, driver.cuuint32_t
        encoded = check(
            driver.cuTensorMapEncodeTiled(
                driver.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
                3,
                address,
                [u64(BLOCK_K), u64(rows), u64(k // BLOCK_K)],
                [u64(k * 2), u64(BLOCK_K * 2)],
                [u32(BLOCK_K), u32(tile.box), u32(deep)],
                [u32(1)] * 3,
                driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
                driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
                driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
            ),
            f"describing activations [{rows}, {k}] at {address:#x}",
        )
        found = ctypes.string_at(encoded.getPtr(), TENSOR_MAP_BYTES)
        if len(_tensor_maps) >= _CACHE_LIMIT:
            _tensor_maps.clear()
        _tensor_maps[key] = found
    return found
