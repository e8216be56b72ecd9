"""Integers that a kernel source exports to the host, read from its cubin: the launch needs no second copy of them.

``extern "C" __constant__ unsigned chord_shared_bytes = sizeof(Shared);`` becomes a data symbol of the cubin, which is
an ELF file (64-bit, little endian; System V ABI, "Object files").
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

_SECTION = struct.Struct("<IIQQQQIIQQ")
_SYMBOL = struct.Struct("<IBBHQQ")
_SYMTAB = 2
_DATA_SECTIONS = (".nv.constant3", ".nv.global.init")


def exported_constants(cubin: bytes, prefix: str = "chord_") -> dict[str, int]:
    """Every 4-byte data symbol whose name starts with ``prefix``, as an unsigned integer."""
    sections = list(_sections(cubin))
    names = sections[struct.unpack_from("<H", cubin, 0x3E)[0]][4]
    found = {}
    for section in (section for section in sections if section[1] == _SYMTAB):
        strings = sections[section[6]][4]
        for at in range(section[4], section[4] + section[5], _SYMBOL.size):
            name_at, _, _, index, value, size = _SYMBOL.unpack_from(cubin, at)
            name = _text(cubin, strings + name_at)
            if name.startswith(prefix) and size == 4 and index < len(sections):
                holder = sections[index]
                if _text(cubin, names + holder[0]) in _DATA_SECTIONS:
                    found[name] = int.from_bytes(cubin[holder[4] + value :][:4], "little")
    return found


def _sections(cubin: bytes) -> Iterator[tuple[int, ...]]:
    """(name, type, flags, address, offset, size, link, info, align, entry size) of each section."""
    (start,) = struct.unpack_from("<Q", cubin, 0x28)
    size, count = struct.unpack_from("<HH", cubin, 0x3A)
    for index in range(count):
        yield _SECTION.unpack_from(cubin, start + index * size)


def _text(cubin: bytes, at: int) -> str:
    return cubin[at : cubin.index(b"\0", at)].decode()
