"""Sizes and counts as people read them."""

from __future__ import annotations


def human(size: int) -> str:
    """A size in bytes for people, in decimal units as disks are sold."""
    for unit, scale in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size >= scale:
            return f"{size / scale:.2f} {unit}"
    return f"{size} bytes"


def counted(count: int, thing: str) -> str:
    """``1 file``, ``2 files``."""
    return f"{count:,} {thing}" + ("" if count == 1 else "s")
