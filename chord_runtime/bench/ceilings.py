"""What the card itself can do, measured in the same run: copying, reading, and dense bf16 multiplication.

No kernel here can be faster than the bytes it must read at the read rate. Dense bf16 is a softer limit: cuBLAS is held
back by power, and INT4 weights cost less power to move, so a W4A16 kernel can pass it by a few percent. All are
measured alone on a rested card, as Chord's times that are held against them are; what cuBLAS does while contenders take
turns is a contender of the contiguous points (:class:`chord_runtime.bench.contenders.Dense`).
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from chord_runtime.bench.timing import Timer
from chord_runtime.cuda.compile import arch_of, compile_kernel
from chord_runtime.errors import KernelError

BUFFER_BYTES = 4 << 30
CHUNK = 18432
STAGES = 8
DENSE_SIZES = (4096, 8192)


@dataclass(frozen=True)
class Ceilings:
    """Rates of this card."""

    copy_tbps: float
    """TB/s read plus written by a device-to-device copy."""
    read_tbps: float
    """TB/s read by bulk copies into shared memory."""
    dense_tflops: dict[str, float]
    """TFLOP/s of cuBLAS bf16, by matrix size."""

    def floor_us(self, moved_bytes: int, flops: int) -> float:
        """The larger of the time to move the bytes and the time to do the arithmetic, in microseconds."""
        return max(moved_bytes / self.read_tbps, flops / max(self.dense_tflops.values())) / 1e6


def measure_ceilings(timer: Timer) -> Ceilings:
    """Measure on the current device.

    Raises:
        KernelError: two buffers of 4 GiB do not fit in its memory.
    """
    try:
        source = torch.empty(BUFFER_BYTES // 4, dtype=torch.int32, device="cuda").random_()
        copy_us = _copy_us(source, timer)
    except torch.OutOfMemoryError as failure:
        raise KernelError(
            f"the ceilings need {2 * BUFFER_BYTES >> 30} GiB of free GPU memory; nvidia-smi shows who holds it"
        ) from failure
    read, read_bytes = bulk_read(source)
    read_us = timer.alone(read)
    tflops = {str(size): dense_flops(size) / timer.alone(dense(size)) / 1e6 for size in DENSE_SIZES}
    return Ceilings(2 * BUFFER_BYTES / copy_us / 1e6, read_bytes / read_us / 1e6, tflops)


def dense(size: int) -> Callable[[], object]:
    """cuBLAS: a product of two random bf16 matrices of this size."""
    a, b = (torch.randn(size, size, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    return lambda: a @ b.T


def dense_flops(size: int) -> int:
    """Multiplications and additions of ``dense``."""
    return 2 * size**3


def _copy_us(source: torch.Tensor, timer: Timer) -> float:
    target = torch.empty_like(source)
    return timer.alone(lambda: target.copy_(source))


def bulk_read(source: torch.Tensor) -> tuple[Callable[[], None], int]:
    """A call of csrc/kernels/bulk_read.cu, an equal range of ``source`` for each SM, and the bytes it reads."""
    from cuda.bindings import driver

    properties = torch.cuda.get_device_properties(source.device)
    blocks = properties.multi_processor_count
    chunks = source.numel() * source.element_size() // (blocks * CHUNK)
    cubin = compile_kernel(
        "bulk_read", {"CHUNK": CHUNK, "STAGES": STAGES}, arch_of((properties.major, properties.minor))
    )
    module = _check(driver.cuModuleLoadData(cubin.code))
    function = _check(driver.cuModuleGetFunction(module, b"bulk_read"))
    shared = cubin.dynamic_shared
    attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    _check(driver.cuFuncSetAttribute(function, attribute, shared))
    arguments = ((source.data_ptr(), chunks), (ctypes.c_void_p, ctypes.c_ulonglong))

    def call() -> None:
        stream = torch.cuda.current_stream().cuda_stream
        _check(driver.cuLaunchKernel(function, blocks, 1, 1, 32, 1, 1, shared, stream, arguments, 0))

    return call, blocks * chunks * CHUNK


def _check(result: tuple[Any, ...]) -> Any:
    status, *values = result
    if int(status):
        raise KernelError(f"the read ceiling cannot be measured: {status.name}")
    return values[0] if values else None
