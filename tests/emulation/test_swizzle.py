"""Activations in shared memory: what the gather writes is where a tensor map would put it and where wgmma reads it."""

from __future__ import annotations

from tests.emulation.hardware import swizzle_128
from tests.emulation.source import Header, assigned, evaluate, returned

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


def descriptor(address: int, step: int) -> int:
    body = Header("wgmma.cuh").function("activation_descriptor")
    values = {"address": address, "step": step}
    for name in ("kSwizzle128", "kGroupStride", "kLeadingUnused"):
        values[name] = evaluate(assigned(body, name), values)
    return evaluate(returned(body), values)


def test_descriptor_fields() -> None:
    """PTX ISA, matrix descriptor: start address bits 0-13, stride bits 32-45, swizzle mode bits 62-63 (1 = 128 B)."""
    for address in range(0, 227 * 1024, 1024):
        for step in range(4):
            found = descriptor(address, step)
            assert found >> 62 == 1
            assert found >> 32 & 0x3FFF == 8 * ROW_BYTES // 16, "eight rows to the next group"
            assert (found & 0x3FFF) * 16 == address + 32 * step, "16 elements of 2 bytes a step"
            assert found >> 16 & 0x3FFF == 1, "unused with a swizzle; 1 by convention"
