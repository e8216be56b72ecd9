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


class Lane:
    """dequant.cuh for one thread: which word, mask, half and scale make each of its A registers."""

    def __init__(self) -> None:
        header = Header("dequant.cuh")
        one = header.function("dequantize")
        assert evaluate(assigned(one, "upper"), {"codes": 0xABCD1234}) == 0xABCD12
        half = r"(low|high)_half"
        pattern = rf"a\[(\d)\] = fma_bf16x2\((codes|upper) & (0x\w+?)u, {half}\(scales\), {half}\(offsets\)\)"
        found = re.findall(pattern, one)
        assert [int(register) for register, *_ in found] == [0, 1, 2, 3]
        self.registers = [(8 if word == "upper" else 0, int(mask, 16), half) for _, word, mask, half, _ in found]
        assert all(half == other for *_, half, other in found)
        steps = re.findall(
            r"dequantize\(codes\.(\w), scales\.(\w), offsets_(\w), a\[(\d)\]\)", header.function("dequantize_block")
        )
        assert [int(step) for *_, step in steps] == [0, 1, 2, 3]
        assert all(scale == offset for _, scale, offset, _ in steps)
        self.steps = [("xyzw".index(word), "xy".index(scale)) for word, scale, *_ in steps]
        consumer = Header("consumer.cuh").function("multiply_tile")
        self.codes, self.scales = (
            assigned(consumer, name).replace("shared.weights", "0") for name in ("codes", "scales")
        )
        self.offset_factor = int(
            re.search(r"multiply_bf16x2\(scales, (0x\w+?)u\)", header.function("offsets_of"))[1], 16
        )  # type: ignore[index]

    def reads(self, thread: int) -> tuple[int, int]:
        """Where in the block the thread reads its codes and its scales."""
        values = {**CONSTANTS, "thread": thread, "first_block": 0, "kStageK": 1}
        values["codes"] = evaluate(self.codes, values)
        return values["codes"], evaluate(self.scales, values)

    def fragments(self, packed: bytes, thread: int) -> list[tuple[int, int, int, float]]:
        """(k16 step, register, half, value) of every bf16 that the thread hands to the matrix multiply."""
        at_codes, at_scales = self.reads(thread)
        words = np.frombuffer(packed, np.uint32, 4, at_codes)
        scales = np.frombuffer(packed, np.uint32, 2, at_scales)
        result = []
        for step, (word, pair) in enumerate(self.steps):
            for register, (shift, mask, half_name) in enumerate(self.registers):
                up = 16 * (half_name == "high")
                scale = bf16(int(scales[pair]) >> up & 0xFFFF)
                offset = round_bf16(scale * bf16(self.offset_factor >> up & 0xFFFF))
                bits = int(words[word]) >> shift & mask
                for half in range(2):
                    value = round_bf16(bf16(bits >> 16 * half & 0xFFFF) * scale + offset)
                    result.append((step, register, half, value))
        return result


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
    lane = Lane()
    for row0 in range(0, n, 64):
        for k0 in range(0, k, 64):
            at = block.block_offset(row0, k0, k)
            for thread in range(128):
                for step, register, half, value in lane.fragments(packed[at : at + block.BLOCK_BYTES], thread):
                    row, column = a_element(thread, register, half)
                    place = row0 + row, k0 + 16 * step + column
                    assert np.isnan(found[place]), "each weight belongs to one lane"
                    found[place] = value * 2.0**block.OUTPUT_EXP
    np.testing.assert_array_equal(found, expected)


def test_shared_memory_reads_are_free_of_bank_conflicts() -> None:
    lane = Lane()
    for warp in range(4):
        reads = [lane.reads(thread) for thread in range(32 * warp, 32 * warp + 32)]
        for quarter in range(4):  # 16-byte reads are served eight lanes at a time
            assert len({codes // 16 % 8 for codes, _ in reads[8 * quarter : 8 * quarter + 8]}) == 8
        rows = {scales for _, scales in reads}
        assert len(rows) == 8, "lanes of one row read the same word: a broadcast"
        assert len({scales // 8 % 16 for scales in rows}) == 8
