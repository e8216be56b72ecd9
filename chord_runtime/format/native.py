"""The packer in C++ (csrc/pack/pack.cpp): built with the package where a compiler is, found here, called on addresses.

:mod:`chord_runtime.format.packing` is what to call with tensors; it uses this where it can and says once where it
cannot. The converter calls this itself, so that it starts without importing torch.
"""

from __future__ import annotations

import ctypes
import sys
import warnings
from dataclasses import dataclass
from functools import cache
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

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
        # From no line of code: the one that happened to come first tells nobody anything.
        warnings.warn_explicit(
            f"Chord's native packer is not available ({error}): packing on the CPU is some 50 times slower. "
            "Install a C++17 compiler (g++ or clang) and reinstall chord-moe to build it",
            RuntimeWarning,
            filename="chord_runtime",
            lineno=0,
        )
        return None
    weights = [_POINTER] * 4 + [_INT] * 4
    loaded.chord_pack.argtypes = [_POINTER, *weights, ctypes.POINTER(ctypes.c_int32)]
    loaded.chord_pack.restype = _INT
    loaded.chord_unpack.argtypes = [_POINTER, *weights]
    loaded.chord_unpack.restype = None
    return loaded


@dataclass(frozen=True, slots=True)
class Rows:
    """A source weight in memory: addresses of its int32 words and BF16 scales, [rows, k], and bytes from row to row."""

    words: int
    scale: int
    rows: int
    k: int
    words_stride: int
    scale_stride: int


def pack(out: int, weight: Rows, up: Rows | None = None) -> tuple[bool, int]:
    """Pack a weight, or gate and ``up``, to address ``out``; the caller has checked shapes, the two are laid out alike.

    Returns whether a code is 0, and the index of the first scale out of range in [rows, K/32] of the first weight and
    then of the second, −1 if there is none.
    """
    native = library()
    assert native is not None
    zero = ctypes.c_int32()
    bad = native.chord_pack(out, *_arguments(weight, up), ctypes.byref(zero))
    return bool(zero.value), int(bad)


def unpack(packed: int, weight: Rows, up: Rows | None = None) -> None:
    """The inverse of ``pack``: write words and scales of the weight, or of gate and ``up``."""
    native = library()
    assert native is not None
    native.chord_unpack(packed, *_arguments(weight, up))


def _arguments(weight: Rows, up: Rows | None) -> tuple[int | None, ...]:
    second = (None, None) if up is None else (up.words, up.scale)
    return weight.words, weight.scale, *second, weight.rows, weight.k, weight.words_stride, weight.scale_stride
