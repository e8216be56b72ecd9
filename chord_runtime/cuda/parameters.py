"""Kernel parameters as the driver wants them: an array of pointers to values."""

from __future__ import annotations

import ctypes
import struct
import threading
from typing import Any

TENSOR_MAP_BYTES = 128


class Parameters:
    """The parameters of a kernel's signature, packed into memory that each thread keeps.

    cuda-bindings can be given tuples of values and types instead, but then builds an object for every value of every
    call, which costs more than the launch itself.
    """

    def __init__(self, layout: str) -> None:
        """``layout``: a character a parameter, ``Q`` a pointer, ``i`` an int, ``T`` a tensor map's 128 bytes."""
        sizes = [TENSOR_MAP_BYTES if code == "T" else struct.calcsize(code) for code in layout]
        self._struct = struct.Struct("=" + layout.replace("T", f"{TENSOR_MAP_BYTES}s"))
        self._offsets = [sum(sizes[:index]) for index in range(len(sizes))]
        self._memory = threading.local()

    def pack(self, values: tuple[Any, ...]) -> int:
        """Address of the array of pointers to ``values``; it holds until this thread packs again."""
        memory = self._memory
        try:
            table: int = memory.address
        except AttributeError:
            memory.buffer = ctypes.create_string_buffer(self._struct.size)
            start = ctypes.addressof(memory.buffer)
            memory.table = (ctypes.c_void_p * len(self._offsets))(*(start + offset for offset in self._offsets))
            table = memory.address = ctypes.addressof(memory.table)
        self._struct.pack_into(memory.buffer, 0, *values)
        return table
