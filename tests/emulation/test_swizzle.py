"""Activations in shared memory: what the gather writes is where a tensor map would put it and where wgmma reads it."""

from __future__ import annotations

import re

import numpy as np

from tests.emulation.hardware import swizzle_128
from tests.emulation.source import Header, assigned, evaluate

ROW_BYTES = 128


def test_gathered_chunks_lie_where_the_swizzle_puts_them() -> None:
    header = Header("gather.cuh")
    expression = assigned(header.function("produce_gathered"), "swizzled")
    values = Header("block.cuh").constants()
    for warp in range(4):
        banks = []
        for lane in range(32):
            body = header.function("produce_gathered")
            row = evaluate(assigned(body, "group_row"), {"warp": warp, "lane": lane})
            chunk = evaluate(assigned(body, "chunk"), {"lane": lane})
            at = evaluate(expression, {**values, "group_row": row, "chunk": chunk})
            assert at == swizzle_128(row * ROW_BYTES + chunk * 16)
            banks.append(at // 16 % 8)
        assert all(len(set(banks[i : i + 8])) == 8 for i in range(0, 32, 8))


def test_sixteen_rows_further_the_swizzle_is_the_same() -> None:
    for address in range(0, 16 * ROW_BYTES, 16):
        assert swizzle_128(address + 16 * ROW_BYTES) == swizzle_128(address) + 16 * ROW_BYTES


def test_k16_steps_of_the_descriptor() -> None:
    text = Header("wgmma.cuh").text
    [step_units] = re.findall(r"activations \+ (\d+) \* step", text)
    for step in range(4):
        for row in range(24):
            for byte in range(0, 32, 16):
                linear = row * ROW_BYTES + int(step_units) * 16 * step + byte
                assert linear == row * ROW_BYTES + (16 * step) * 2 + byte
                assert swizzle_128(linear) // ROW_BYTES == row


def test_descriptor_fields() -> None:
    """PTX ISA, matrix descriptor: start address bits 0-13, stride bits 32-45, swizzle mode bits 62-63 (1 = 128 B)."""
    body = Header("wgmma.cuh").function("activation_descriptor")
    names = ("kSwizzle128", "kGroupStride", "kLeadingUnused")
    fields = {name: evaluate(assigned(body, name), {}) for name in names}
    assert fields["kSwizzle128"] >> 62 == 1
    assert fields["kGroupStride"] >> 32 == 8 * ROW_BYTES // 16
    for address in np.arange(0, 227 * 1024, 1024).tolist():
        [expression] = re.findall(r"\(\(address & 0x3FFFF\) >> 4\)", body)
        assert evaluate(expression, {"address": address}) == address // 16 < 1 << 14
