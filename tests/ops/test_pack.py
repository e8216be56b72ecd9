"""Packing a stack of experts in memory, from codes or from words."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import chord_runtime as chord
from chord_runtime.errors import ScaleError, UsageError
from chord_runtime.format import packing
from tests.generators import codes_of, source_weight

E, N, K = 3, 256, 128
SOURCES = [source_weight(N, K, seed) for seed in range(E)]
WORDS = torch.stack([words for words, _ in SOURCES])
SCALE = torch.stack([scale for _, scale in SOURCES])
CODES = codes_of(WORDS)


@pytest.mark.parametrize("gate_up", [False, True])
def test_codes_and_words_give_the_same_bytes(gate_up: bool) -> None:
    from_codes = chord.pack_w4a16_grouped(CODES, SCALE, "all", gate_up=gate_up)
    from_words = chord.pack_w4a16_grouped(WORDS, SCALE, "all", gate_up=gate_up)
    assert torch.equal(from_codes.data, from_words.data)
    assert (from_codes.n, from_codes.k, from_codes.num_experts) == (N, K, E)
    assert from_codes.row_order is (chord.RowOrder.GATE_UP_8 if gate_up else chord.RowOrder.PLAIN)
    for expert, (words, scale) in enumerate(SOURCES):
        if gate_up:
            half = N // 2
            expected = packing.pack_gate_up(words[:half], scale[:half], words[half:], scale[half:])
        else:
            expected = packing.pack(words, scale)
        assert torch.equal(from_codes.data[expert], expected)


@pytest.mark.parametrize(
    ("mode", "modes"),
    [
        ("all", ["contiguous", "masked", "indexed"]),
        ("masked", ["masked"]),
        (chord.Mode.INDEXED, ["indexed"]),
        (["indexed", chord.Mode.CONTIGUOUS], ["contiguous", "indexed"]),
        (("all",), ["contiguous", "masked", "indexed"]),
    ],
)
def test_modes_are_recorded(mode: object, modes: list[str]) -> None:
    packed = chord.pack_w4a16_grouped(WORDS, SCALE, mode)  # type: ignore[arg-type]
    assert [m.value for m in packed.modes] == modes


@pytest.mark.parametrize("mode", ["sideways", "", [], ["masked", "x"]])
def test_unknown_modes_are_refused(mode: object) -> None:
    with pytest.raises(UsageError, match="supported are contiguous, masked, indexed, several of them, or 'all'"):
        chord.pack_w4a16_grouped(WORDS, SCALE, mode)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("source", "scale", "message"),
    [
        (WORDS[0], SCALE, r"found torch.int32 \[256, 16\]"),
        (WORDS.long(), SCALE, "found torch.int64"),
        (WORDS[:0], SCALE[:0], "experts must be"),
        (WORDS, SCALE[:2], r"scale must be bfloat16 \[3, N, K/32\]; found \[2, 256, 4\]"),
        (WORDS, SCALE.float(), "bfloat16"),
        (WORDS, SCALE[:, :, :2].contiguous(), "only group size 32"),
        (WORDS[:, :64], SCALE[:, :64], "multiple of 128"),
        (CODES + 1, SCALE, r"codes \[N, K\] are 0..15.* up to 16"),
        (CODES[:, :, :100], SCALE, "K a multiple of 64"),
    ],
)
def test_wrong_sources_are_refused(source: torch.Tensor, scale: torch.Tensor, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        chord.pack_w4a16_grouped(source, scale)


@pytest.mark.parametrize("name", ["codes_or_packed", "scale"])
def test_what_is_no_tensor_is_refused(name: str) -> None:
    sources: dict[str, Any] = {"codes_or_packed": WORDS, "scale": SCALE}
    with pytest.raises(UsageError, match=f"{name} must be a tensor; found list"):
        chord.pack_w4a16_grouped(**{**sources, name: [1, 2]})


def test_a_scale_out_of_range_is_refused() -> None:
    scale = SCALE.clone()
    scale[1, 7, 3] = float("inf")
    with pytest.raises(ScaleError, match=r"scale \[7, 3\] is inf"):
        chord.pack_w4a16_grouped(CODES, scale)
