"""A compiled kernel on a device, ready to be launched from any thread and inside a stream capture."""

from __future__ import annotations

from typing import Any

import torch
from cuda.bindings import driver

from chord_runtime.cuda.compile import Cubin
from chord_runtime.cuda.parameters import Parameters
from chord_runtime.errors import KernelError

_INVALID_CONTEXT = driver.CUresult.CUDA_ERROR_INVALID_CONTEXT
_CONFIG_LIMIT = 4096


class Handle:
    """One kernel loaded on one device. Immutable but for a cache of launch configurations."""

    def __init__(self, cubin: Cubin, device: int, shared_bytes: int = 0, *, waits: bool = True) -> None:
        """Load ``cubin`` on ``device``.

        Args:
            shared_bytes: dynamic shared memory of a block.
            waits: the kernel waits for the one before it by itself (griddepcontrol.wait), so it may be launched early.

        Raises:
            KernelError: the driver cannot load it.
        """
        self.name = cubin.name
        self._device = device
        self._shared_bytes = shared_bytes
        self._waits = waits
        self._configs: dict[tuple[int, int, int, int], Any] = {}
        # PyTorch works in the device's primary context; a thread that has not used CUDA yet has none current.
        ordinal = check(driver.cuDeviceGet(device), f"cuda:{device}")
        self._context = check(driver.cuDevicePrimaryCtxRetain(ordinal), f"the context of cuda:{device}")
        check(driver.cuCtxPushCurrent(self._context), f"the context of cuda:{device}")
        # Loading is not allowed while a stream of this thread captures a graph, unless the thread says it knows.
        relaxed = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
        before = check(driver.cuThreadExchangeStreamCaptureMode(relaxed), "capture mode")
        try:
            self._module = check(driver.cuModuleLoadData(cubin.code), f"loading {cubin.title}")
            entry = f"chord_{cubin.name}".encode()
            self._function = check(driver.cuModuleGetFunction(self._module, entry), f"finding {cubin.title}")
            attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            found = driver.cuFuncSetAttribute(self._function, attribute, shared_bytes)
            check(found, f"shared memory of {cubin.title}")
        finally:
            driver.cuThreadExchangeStreamCaptureMode(before)
            driver.cuCtxPopCurrent()

    def launch(
        self, blocks_x: int, blocks_y: int, threads: int, arguments: tuple[Any, ...], parameters: Parameters
    ) -> None:
        """Launch on the device's current PyTorch stream."""
        stream = torch._C._cuda_getCurrentRawStream(self._device)
        key = (stream, blocks_x, blocks_y, threads)
        config = self._configs.get(key)
        if config is None:
            config = self._config(key)
        table = parameters.pack(arguments)
        if torch._C._cuda_getDevice() != self._device:
            with torch.cuda.device(self._device):
                status = driver.cuLaunchKernelEx(config, self._function, table, 0)[0]
        else:
            status = driver.cuLaunchKernelEx(config, self._function, table, 0)[0]
            if status == _INVALID_CONTEXT:  # a thread that has not used CUDA yet
                check(driver.cuCtxSetCurrent(self._context), f"the context of cuda:{self._device}")
                status = driver.cuLaunchKernelEx(config, self._function, table, 0)[0]
        if status:
            raise KernelError(f"launching kernel {self.name} on cuda:{self._device} failed: {status.name}")

    def _config(self, key: tuple[int, int, int, int]) -> Any:
        config = driver.CUlaunchConfig()
        config.hStream, config.gridDimX, config.gridDimY, config.blockDimX = key
        config.gridDimZ = config.blockDimY = config.blockDimZ = 1
        config.sharedMemBytes = self._shared_bytes
        if self._waits:
            early = driver.CUlaunchAttribute()
            early.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
            early.value.programmaticStreamSerializationAllowed = 1
            config.attrs, config.numAttrs = [early], 1
        if len(self._configs) >= _CONFIG_LIMIT:
            self._configs.clear()
        self._configs[key] = config
        return config


def check(result: tuple[Any, ...], what: str) -> Any:
    """The values of a driver call; raises KernelError naming ``what`` if it failed."""
    status, *values = result
    if status:
        raise KernelError(f"{what} failed with {status.name}; `chord doctor` shows what the driver and device support")
    return values[0] if values else None
