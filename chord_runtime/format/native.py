"""The packer in C++ (csrc/pack/pack.cpp): built with the package where a compiler is, found here, called on tensors.

:mod:`chord_runtime.format.packing` is what to call; it uses this where it can and says once where it cannot.
"""

from __future__ import annotations

import ctypes
import sys
import warnings
from functools import cache
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

from torch import Tensor

_POINTER, _INT = ctypes.c_void_p, ctypes.c_int64


@cache
def library() -> ctypes.CDLL | None:
    """The compiled packer, or None, with one warning that says what to do. Calls release the interpreter's lock."""
    here = Path(__file__).resolve().parent
    found = [path for suffix in EXTENSION_SUFFIXES if (path := here / f"_pack{suffix}").is_file()]
    try:
        if sys.byteorder != "little" or not found:
            raise OSError("it was not built" if sys.byteorder == "little" else "this machine is big-endian")
        loaded = ctypes.CDLL(str(found[0]))
    except OSError as error:
        warnings.warn(
            f"Chord's native packer is not available ({error}): packing on the CPU is some 20 times slower. "
            "Install a C++17 compiler (g++ or clang) and reinstall chord-moe to build it",
            RuntimeWarning,
            stacklevel=2,
        )
        return None
    weights = [_POINTER] * 4 + [_INT] * 4
    loaded.chord_pack.argtypes = [_POINTER, *weights, ctypes.POINTER(ctypes.c_int32)]
    loaded.chord_pack.restype = _INT
    loaded.chord_unpack.argtypes = [_POINTER, *weights]
    loaded.chord_unpack.restype = None
    return loaded


def takes(*tensors: Tensor) -> bool:
    """Whether all are on the CPU, with the elements of a row side by side, and the packer is there."""
    return all(t.device.type == "cpu" and t.stride(-1) == 1 for t in tensors) and library() is not None


def pack(out: Tensor, words: Tensor, scale: Tensor, up: tuple[Tensor, Tensor] | None = None) -> tuple[bool, int]:
    """Pack a weight, or gate and ``up``, into ``out``; shapes are checked by the caller, strides of the two are equal.

    Returns whether a code is 0, and the index of the first scale out of range in [rows, K/32] of the first weight and
    then of the second, −1 if there is none.
    """
    native = library()
    assert native is not None
    zero = ctypes.c_int32()
    bad = native.chord_pack(out.data_ptr(), *_weights(words, scale, up), ctypes.byref(zero))
    return bool(zero.value), int(bad)


def unpack(packed: Tensor, words: Tensor, scale: Tensor, up: tuple[Tensor, Tensor] | None = None) -> None:
    """The inverse of ``pack``: write words and scales of the weight, or of gate and ``up``."""
    native = library()
    assert native is not None
    native.chord_unpack(packed.data_ptr(), *_weights(words, scale, up))


def _weights(words: Tensor, scale: Tensor, up: tuple[Tensor, Tensor] | None) -> tuple[int | None, ...]:
    second = (None, None) if up is None else (up[0].data_ptr(), up[1].data_ptr())
    rows, k = words.shape[0], words.shape[1] * 8
    return words.data_ptr(), scale.data_ptr(), *second, rows, k, words.stride(0) * 4, scale.stride(0) * 2
