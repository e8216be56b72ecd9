"""csrc/chord/epilogue.cuh: sums in fragments → staging rows → output columns, un-interleaved."""

from __future__ import annotations

import re

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.emulation.hardware import LANES, d_element, stored_transposed
from tests.emulation.source import Header, assigned, evaluate, returned

EPILOGUE = Header("epilogue.cuh")
STAGE = EPILOGUE.function("stage_eight")
PLAIN, GATE_UP, SWIGLU = range(3)
OUTPUTS = {"kPlain": PLAIN, "kGateUp": GATE_UP, "kSwiGLU": SWIGLU}
TOKEN_UNIT = 1 << 20
"""A sum is stood for by token · TOKEN_UNIT + row; after SwiGLU by the same of its gate row."""


def constants(blocks: int, output: int) -> dict[str, int]:
    values = {"kBlocks": blocks, "kOutput": output, "kBlockRows": 64, **OUTPUTS}
    tile = Header("tile.cuh").text
    values["kChunk"] = evaluate(assigned(tile, "kChunk"), {"smaller": min, "kTokens": 128})
    values["kRowBytes"] = evaluate(assigned(tile, "kRowBytes"), values)
    values["kChunksPerRow"] = evaluate(assigned(EPILOGUE.text, "kChunksPerRow"), values)
    return values


def staging_offset(values: dict[str, int], token: int, chunk: int) -> int:
    body = EPILOGUE.function("staging_offset")
    values = {**values, "token": token, "chunk": chunk}
    values["kPerLine"] = evaluate(assigned(body, "kPerLine"), values)
    values["key"] = evaluate(assigned(body, "key"), values)
    return evaluate(returned(body), values)


def column_of(values: dict[str, int], chunk: int, first_row: int, n: int) -> int:
    body = EPILOGUE.function("column_of")
    values = {**values, "chunk": chunk, "first_row": first_row, "n": n}
    if values["kOutput"] == PLAIN:
        return evaluate(re.findall(r"kOutput == kPlain\) return ([^;]+);", body)[0], values)
    values["half"] = evaluate(assigned(body, "half"), values)
    values["within"] = evaluate(assigned(body, "within"), values)
    return evaluate(returned(body), values)


def chunk_expression(output: int) -> str:
    if output == SWIGLU:
        return re.findall(r"store_matrix_transposed\(staging \+ staging_offset\(stage_token, ([^)]+)\)", STAGE)[0]
    return re.findall(r"const int chunk = (kOutput == [^;]+);", STAGE)[0]


def stage(values: dict[str, int], tokens: int) -> dict[int, NDArray[np.int64]]:
    """Run the warpgroup's stmatrix stores: byte offset → the 8 values of the 16-byte chunk there."""
    output, blocks = values["kOutput"], values["kBlocks"]
    expression, stored = chunk_expression(output), {}
    for warp in range(4):
        for block in range(blocks):
            for group in range(tokens // 8):
                threads = range(LANES * warp, LANES * warp + LANES)
                sums = np.array([[_sum(thread, 4 * group + i, block) for i in range(4)] for thread in threads])
                pairs = [sums[:, :2]] if output == SWIGLU else [sums[:, :2], sums[:, 2:]]
                for h, pair in enumerate(pairs):
                    rows = stored_transposed(pair)
                    offsets = []
                    for lane in range(8 * h, 8 * h + 8):
                        at = {**values, "lane": lane, "token": 8 * group, "block": block, "warp": warp}
                        at["h"] = evaluate(assigned(STAGE, "h"), at)
                        at["stage_token"] = evaluate(assigned(STAGE, "stage_token"), at)
                        offset = staging_offset(values, at["stage_token"], evaluate(expression, at))
                        assert offset not in stored, "two chunks in one place"
                        stored[offset] = rows[lane % 8]
                        offsets.append(offset)
                    assert len({offset // 16 % 8 for offset in offsets}) == 8, "the eight rows meet in a bank"
    return stored


def _sum(thread: int, index: int, block: int) -> int:
    row, token = d_element(thread, index)
    return token * TOKEN_UNIT + 64 * block + row


def expected_column(row: int, output: int, first_row: int, n: int) -> int:
    """Logical column of an interleaved row: docs/format.md, row order gate_up_8."""
    whole = first_row + row
    if output == PLAIN:
        return whole
    channel = 8 * (whole >> 4) + (whole & 7)
    return channel + (n // 2 if whole >> 3 & 1 else 0)


@pytest.mark.parametrize("blocks", [1, 2])
@pytest.mark.parametrize("output", [PLAIN, GATE_UP, SWIGLU])
@pytest.mark.parametrize("tokens", [8, 24, 32])
def test_every_sum_reaches_its_column(blocks: int, output: int, tokens: int) -> None:
    values = constants(blocks, output)
    stored = stage(values, tokens)
    assert max(stored) + 16 <= tokens * values["kRowBytes"]
    n, first_row = 1024, 3 * 64 * blocks
    written = {}
    for token in range(tokens):
        for chunk in range(values["kChunksPerRow"]):
            column = column_of(values, chunk, first_row, n)
            for i, value in enumerate(stored[staging_offset(values, token, chunk)]):
                assert (token, column + i) not in written
                written[token, column + i] = int(value)
    rows = [row for row in range(64 * blocks) if output != SWIGLU or not row >> 3 & 1]
    expected = {
        (token, expected_column(row, output, first_row, n)): token * TOKEN_UNIT + row
        for token in range(tokens)
        for row in rows
    }
    assert written == expected


@pytest.mark.parametrize("thread", range(0, 128, 5))
def test_gate_and_up_of_a_channel_meet_in_one_thread(thread: int) -> None:
    """v[0], v[1] are the gate row of two tokens and v[2], v[3] the up row: what silu_times pairs."""
    assert re.findall(r"v\[(\d)\] = silu_times\(v\[(\d)\] \* kOutputScale, v\[(\d)\] \* kOutputScale\)", STAGE) == [
        ("0", "0", "2"),
        ("1", "1", "3"),
    ]
    for gate, up in ((0, 2), (1, 3)):
        (gate_row, gate_token), (up_row, up_token) = d_element(thread, gate), d_element(thread, up)
        assert gate_token == up_token
        assert up_row == gate_row + 8
        assert gate_row >> 3 & 1 == 0
