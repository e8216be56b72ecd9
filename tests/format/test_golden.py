"""The worked example of docs/format.md is what the code does, and what the page's own formulas say."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

import pytest
import torch

from chord_runtime.format import native, packing
from chord_runtime.format.block import code_offset, scale_offset

PAGE = (Path(__file__).parents[2] / "docs" / "format.md").read_text()
N, K = 128, 128


def golden() -> list[str]:
    found = re.search(r"```golden\n(.*?)```", PAGE, re.DOTALL)
    assert found
    return found[1].splitlines()


def code(n: int, k: int) -> int:
    return (5 * n + 3 * k + n // 16) % 16


def source() -> tuple[torch.Tensor, torch.Tensor]:
    words = [[sum(code(n, 8 * word + i) << 4 * i for i in range(8)) for word in range(K // 8)] for n in range(N)]
    signed = [[word - (1 << 32) if word >> 31 else word for word in row] for row in words]
    scales = [[(1 + (n + group) % 8 / 8) * 2.0**-7 for group in range(K // 32)] for n in range(N)]
    return torch.tensor(signed, dtype=torch.int32), torch.tensor(scales).bfloat16()


@pytest.mark.parametrize("packer", ["native", "torch"])
def test_the_page_is_right(packer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if packer == "native" and native.library() is None:
        pytest.skip("the native packer was not built")
    if packer == "torch":
        monkeypatch.setattr(native, "library", lambda: None)
    packed = bytes(packing.pack(*source()).tolist())
    size, digest, *rest = golden()
    assert size == f"bytes {len(packed)}"
    assert digest == f"sha256 {hashlib.sha256(packed).hexdigest()}"
    checked = 0
    for line in rest:
        if found := re.fullmatch(r"at (\d+): ([0-9a-f ]+)", line):
            at, expected = int(found[1]), bytes.fromhex(found[2])
            assert packed[at : at + len(expected)] == expected
        else:
            found = re.fullmatch(r"n (\d+) k (\d+): byte (\d+) (low|high) = (\d+), scale at (\d+) = (.. ..)", line)
            assert found, line
            n, k = int(found[1]), int(found[2])
            nibble = int(found[4] == "high")
            assert code_offset(n, k, K) == (int(found[3]), nibble)
            assert packed[int(found[3])] >> 4 * nibble & 15 == int(found[5]) == code(n, k)
            assert scale_offset(n, k, K) == int(found[6])
            assert packed[int(found[6]) : int(found[6]) + 2] == bytes.fromhex(found[7])
        checked += 1
    assert checked == 6


def test_the_formulas_on_the_page_are_those_of_the_code() -> None:
    """The page's text, evaluated."""
    block = re.search(r"block = (.*?)\s{2,}", PAGE)
    place = re.search(r"code of \(n, k\)\s+byte (.*?) of the block", PAGE)
    scale = re.search(r"scale of \(n, k\)\s+bytes (.*?), BF16", PAGE)
    assert block and place and scale
    names = dict(re.findall(r"\b([whrtgqe]) = ([nk](?:>>\d)? & \d)", PAGE))
    assert sorted(names) == sorted("whrtgqe")
    for n, k in [(0, 0), (9, 42), (77, 100), (127, 127), (300, 500), (511, 575)]:
        known: dict[str, int] = {"n": n, "k": k, "K": 576}
        known |= {name: eval(text, {}, known) for name, text in names.items()}

        def value(text: str, known: dict[str, int] = known) -> int:
            text = re.sub(r"(\d)([a-z])", r"\1*\2", text.replace("·", "*").replace("K/64", "(K//64)"))
            return int(eval(text.replace("n>>6 & 1", "(n>>6 & 1)"), {}, known))

        start = 2304 * value(block[1])
        assert code_offset(n, k, 576) == (start + value(place[1]), known["h"])
        assert scale_offset(n, k, 576) == start + value(scale[1])
