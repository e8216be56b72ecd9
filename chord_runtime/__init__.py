"""Chord's runtime: packed Kimi K2.x experts, loaded as they are and multiplied by W4A16 MoE kernels.

Importing this package needs neither CUDA nor a compiler nor the network; torch is imported with the first name used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from chord_runtime.version import VERSION as __version__

if TYPE_CHECKING:
    from chord_runtime.errors import ChordError
    from chord_runtime.format.layout import Mode, Placement, RowOrder
    from chord_runtime.layer import moe_layer
    from chord_runtime.loader import load
    from chord_runtime.ops.api import contiguous, indexed, masked, pack_w4a16_grouped
    from chord_runtime.ops.weight import PackedWeight

_HOME = {
    "ChordError": "chord_runtime.errors",
    "Mode": "chord_runtime.format.layout",
    "PackedWeight": "chord_runtime.ops.weight",
    "Placement": "chord_runtime.format.layout",
    "RowOrder": "chord_runtime.format.layout",
    "contiguous": "chord_runtime.ops.api",
    "indexed": "chord_runtime.ops.api",
    "load": "chord_runtime.loader",
    "masked": "chord_runtime.ops.api",
    "moe_layer": "chord_runtime.layer",
    "pack_w4a16_grouped": "chord_runtime.ops.api",
}

__all__ = [
    "ChordError",
    "Mode",
    "PackedWeight",
    "Placement",
    "RowOrder",
    "__version__",
    "contiguous",
    "indexed",
    "load",
    "masked",
    "moe_layer",
    "pack_w4a16_grouped",
]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(_HOME[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
