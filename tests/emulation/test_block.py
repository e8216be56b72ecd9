"""csrc/chord/block.cuh against chord_runtime/format/block.py: two spellings of one geometry."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch

from chord_runtime.format import block
from chord_runtime.format.packing import dequantize, pack
from tests.emulation.hardware import a_element
from tests.emulation.source import Header, assigned, evaluate, returned

BLOCK = Header("block.cuh")
CONSTANTS = BLOCK.constants()


def test_constants() -> None:
    python = {
        "kBlockRows": block.BLOCK_ROWS,
        "kBlockK": block.BLOCK_K,
        "kStripRows": block.STRIP_ROWS,
        "kCodeBytes": block.CODE_BYTES,
        "kScaleBytes": block.SCALE_BYTES,
        "kBlockBytes": block.BLOCK_BYTES,
        "kStripBytes": 2 * block.BLOCK_BYTES,
        "kOutputExp": block.OUTPUT_EXP,
    }
    assert {name: CONSTANTS[name] for name in python} == python


@pytest.mark.parametrize(("n", "k"), [(128, 64), (384, 256), (4096, 7168), (7168, 256)])
def test_strip_offset(n: int, k: int) -> None:
    body = BLOCK.function("strip_offset")
    generator = np.random.default_rng(n)
    for _ in range(50):
        expert, strip, kb = (int(generator.integers(top)) for top in (400, n // 128, k // 64))
        values = {**CONSTANTS, "n": n, "k": k, "expert": expert, "strip": strip, "kb": kb}
        values["strips"] = evaluate(assigned(body, "strips"), values)
        expected = expert * block.packed_bytes(n, k) + block.block_offset(strip * 128, kb * 64, k)
        assert evaluate(returned(body), values) == expected


def bf16(bits: int) -> float:
    """The value of a bf16 bit pattern, subnormals included."""
    return float(np.uint32(bits << 16).view(np.float32))


def round_bf16(value: float) -> float:
    """To bf16, ties to even, in one rounding: the values here are exact in FP32."""
    assert float(np.float32(value)) == value
    return float(torch.tensor(value, dtype=torch.float32).to(torch.bfloat16))


REGISTERS = ((0, 0x000F000F, 0), (0, 0x00F000F0, 1), (8, 0x000F000F, 0), (8, 0x00F000F0, 1))
"""For each A register of a k16 step: shift and mask of the code word, and which half of the scale pair."""

OFFSET_FACTORS = (0x8008, 0x8080)
"""bf16 −2⁻¹³⁰ and −2⁻¹²⁶: what makes −8·s·2⁻ᵀ of a stored scale, low and high row."""


def lane_reads(thread: int) -> tuple[int, int]:
    """Where in the block a thread of the warpgroup reads its 16 bytes of codes and 8 bytes of scales."""
    values = {**CONSTANTS, "thread": thread, "first_block": 0, "kStageK": 1}
    body = Header("consumer.cuh").function("multiply_tile")
    words, scales = (
        assigned(body, name).replace("offset_in(shared, shared.weights)", "0") for name in ("words", "scales")
    )
    values |= {"base": 0}
    values["words"] = evaluate(words, values)
    return values["words"], evaluate(scales, values)


def fragments(packed: bytes, reads: tuple[int, int]) -> list[tuple[int, int, int, float]]:
    """(k16 step, register, half, value) of every bf16 that a thread hands to the matrix multiply."""
    words = np.frombuffer(packed, np.uint32, 4, reads[0])
    scales = np.frombuffer(packed, np.uint32, 2, reads[1])
    result = []
    for step in range(4):
        for register, (shift, mask, high) in enumerate(REGISTERS):
            scale = bf16(int(scales[step // 2]) >> 16 * high & 0xFFFF)
            offset = round_bf16(scale * bf16(OFFSET_FACTORS[high]))
            bits = int(words[step]) >> shift & mask
            for half in range(2):
                value = round_bf16(bf16(bits >> 16 * half & 0xFFFF) * scale + offset)
                result.append((step, register, half, value))
    return result


def test_dequant_header_does_the_same() -> None:
    text = Header("dequant.cuh").text
    found = re.findall(r"\[(\d)\] = [^;]*?\b(\w+) & (0x\w{8})u", text)
    shifts = {"upper": 8}
    assert re.search(r"upper = \w+ >> 8;", text)
    assert [(int(at), shifts.get(word, 0), int(mask, 16)) for at, word, mask in found] == [
        (at, shift, mask) for at, (shift, mask, _) in enumerate(REGISTERS)
    ]
    halves = re.findall(r"\[(\d)\] = fma_bf16x2\([^;]*?, (low|high)_half\(scales\), (low|high)_half\(offsets\)\)", text)
    names = ("low", "high")
    assert halves == [(str(at), names[high], names[high]) for at, (_, _, high) in enumerate(REGISTERS)]
    factors = re.findall(r"multiply_bf16x2\(scales, (0x\w{8})u\)", text)
    assert [int(factor, 16) for factor in factors] == [OFFSET_FACTORS[1] << 16 | OFFSET_FACTORS[0]]


@pytest.mark.parametrize("seed", [0, 1])
def test_lanes_hold_the_fragments_that_the_instructions_read(seed: int) -> None:
    n, k = 128, 128
    generator = torch.Generator().manual_seed(seed)
    words = torch.randint(-(2**31), 2**31, (n, k // 8), dtype=torch.int32, generator=generator)
    exponents = torch.randint(-60, 20, (n, k // 32), generator=generator)
    scale = (torch.randn((n, k // 32), generator=generator) * 2.0**exponents).to(torch.bfloat16)
    packed = pack(words, scale).numpy().tobytes()
    expected = dequantize(pack(words, scale), n, k).float().numpy()
    found = np.full((n, k), np.nan, np.float32)
    places = [lane_reads(thread) for thread in range(128)]
    for row0 in range(0, n, 64):
        for k0 in range(0, k, 64):
            at = block.block_offset(row0, k0, k)
            for thread in range(128):
                for step, register, half, value in fragments(packed[at : at + block.BLOCK_BYTES], places[thread]):
                    row, column = a_element(thread, register, half)
                    place = row0 + row, k0 + 16 * step + column
                    assert np.isnan(found[place]), "each weight belongs to one lane"
                    found[place] = value * 2.0**block.OUTPUT_EXP
    np.testing.assert_array_equal(found, expected)


def test_shared_memory_reads_are_free_of_bank_conflicts() -> None:
    for warp in range(4):
        reads = [lane_reads(thread) for thread in range(32 * warp, 32 * warp + 32)]
        for quarter in range(4):  # 16-byte reads are served eight lanes at a time
            assert len({codes // 16 % 8 for codes, _ in reads[8 * quarter : 8 * quarter + 8]}) == 8
        rows = {scales for _, scales in reads}
        assert len(rows) == 8, "lanes of one row read the same word: a broadcast"
        assert len({scales // 8 % 16 for scales in rows}) == 8
