"""Activations in shared memory: what the gather writes is where a tensor map would put it and where wgmma reads it."""

from __future__ import annotations

import re

from tests.emulation.hardware import swizzle_128
from tests.emulation.source import Header, assigned, evaluate, returned

ROW_BYTES = 128


def test_gathered_chunks_lie_where_the_swizzle_puts_them() -> None:
    expression = returned(Header("gather.cuh").function("swizzled"))
    values = Header("block.cuh").constants()
    for row in range(128):
        places = [evaluate(expression, {**values, "row": row, "chunk": chunk}) for chunk in range(8)]
        assert places == [swizzle_128(row * ROW_BYTES + 16 * chunk) for chunk in range(8)]
    for chunk in range(8):  # the same chunk of eight rows, as wgmma reads it, comes from eight different banks
        column = [evaluate(expression, {**values, "row": row, "chunk": chunk}) for row in range(8)]
        assert len({place // 16 % 8 for place in column}) == 8


def test_sixteen_rows_further_the_swizzle_is_the_same() -> None:
    """The gather adds multiples of 16 rows to a lane's place instead of computing it again."""
    for address in range(0, 16 * ROW_BYTES, 16):
        assert swizzle_128(address + 16 * ROW_BYTES) == swizzle_128(address) + 16 * ROW_BYTES


def descriptor(address: int, step: int) -> int:
    header = Header("wgmma.cuh")
    body, values = header.function("activation_descriptor"), {"address": address, "step": step}
    for name in ("kSwizzle128", "kGroupStride", "kLeadingUnused"):
        values[name] = evaluate(assigned(body, name), values)
    [stepped] = re.findall(r"descriptor_step\(([^)]+)\)", header.function("wgmma_step"))
    values["bytes"] = evaluate(stepped, values)
    return evaluate(returned(body), values) + evaluate(returned(header.function("descriptor_step")), values)


def test_descriptor_fields() -> None:
    """PTX ISA, matrix descriptor: start address bits 0-13, stride bits 32-45, swizzle mode bits 62-63 (1 = 128 B)."""
    for address in range(0, 227 * 1024, 1024):
        for step in range(4):
            found = descriptor(address, step)
            assert found >> 62 == 1
            assert found >> 32 & 0x3FFF == 8 * ROW_BYTES // 16, "eight rows to the next group"
            assert (found & 0x3FFF) * 16 == address + 32 * step, "16 elements of 2 bytes a step"
            assert found >> 16 & 0x3FFF == 1, "unused with a swizzle; 1 by convention"
