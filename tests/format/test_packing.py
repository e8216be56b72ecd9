"""Packing is exactly invertible, the native packer equals the PyTorch definition, and bad input is named."""

from __future__ import annotations

import ctypes
import subprocess
import sys
import warnings
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from chord_runtime.errors import ScaleError, UsageError
from chord_runtime.format import native, packing
from chord_runtime.format.block import code_offset, packed_bytes, scale_offset, stored_exponent
from tests.generators import SMALL_SHAPES, codes_of, dense, source_weight

needs_native = pytest.mark.skipif(native.library() is None, reason="the native packer was not built")


@st.composite
def shapes(draw: st.DrawFn) -> tuple[int, int, int]:
    """N, K and a seed."""
    return 128 * draw(st.integers(1, 4)), 64 * draw(st.integers(1, 9)), draw(st.integers(0, 2**31))


@st.composite
def good_scale_bits(draw: st.DrawFn) -> int:
    """BF16 bits of any scale that the format holds: zeros of both signs, 2^-94 ≤ |s| < 2^27."""
    size = draw(st.one_of(st.just(0), st.integers((127 - 94) << 7, ((127 + 27) << 7) - 1)))
    return size | draw(st.sampled_from([0, 0x8000]))


def bits(tensor: Tensor) -> Tensor:
    return tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor


def assert_same(found: Tensor, expected: Tensor) -> None:
    assert found.dtype == expected.dtype
    assert torch.equal(bits(found), bits(expected))


@pytest.fixture(params=["native", "torch"])
def packer(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Runs a test with the native packer and with the PyTorch definition."""
    if request.param == "native" and native.library() is None:
        pytest.skip("the native packer was not built")
    if request.param == "torch":
        monkeypatch.setattr(native, "library", lambda: None)
    return str(request.param)


@given(shapes(), st.lists(good_scale_bits(), min_size=1, max_size=64))
@settings(max_examples=60, deadline=None)
def test_unpack_gives_back_words_and_scales_bit_for_bit(shape: tuple[int, int, int], scales: list[int]) -> None:
    n, k, seed = shape
    words, _ = source_weight(n, k, seed)
    count = n * k // 32
    scale = (
        torch.tensor((scales * (count // len(scales) + 1))[:count]).to(torch.uint16).view(torch.bfloat16).view(n, -1)
    )
    packed = packing.pack(words, scale)
    by_torch = torch.empty_like(packed)
    packing._pack(words, scale, by_torch)
    assert_same(packed, by_torch)
    for found in (packing.unpack(packed, n, k), packing._unpack(packed, n, k)):
        assert_same(found[0], words)
        assert_same(found[1], scale)


@given(shapes())
@settings(max_examples=30, deadline=None)
def test_gate_up_round_trip(shape: tuple[int, int, int]) -> None:
    rows, k, seed = shape[0] // 2, shape[1], shape[2]
    gate, up = source_weight(rows, k, seed), source_weight(rows, k, seed + 1)
    packed = packing.pack_gate_up(*gate, *up)
    by_torch = torch.empty_like(packed)
    packing._pack(packing.interleave(gate[0], up[0]), packing.interleave(gate[1], up[1]), by_torch)
    assert_same(packed, by_torch)
    for found, expected in zip(packing.unpack_gate_up(packed, 2 * rows, k), (*gate, *up), strict=True):
        assert_same(found, expected)


def test_every_code_and_scale_lies_where_the_index_formula_says(packer: str) -> None:
    n, k = 384, 192
    words, scale = source_weight(n, k)
    packed, codes = packing.pack(words, scale).tolist(), codes_of(words).tolist()
    for row in range(n):
        for column in range(k):
            byte, nibble = code_offset(row, column, k)
            assert packed[byte] >> 4 * nibble & 15 == codes[row][column], (row, column)
        for column in range(0, k, 32):
            at = scale_offset(row, column, k)
            stored = torch.tensor(packed[at : at + 2], dtype=torch.uint8).view(torch.bfloat16)
            assert float(stored) == float(scale[row, column // 32]) * 2.0 ** stored_exponent(row), (row, column)


def test_gate_and_up_alternate_by_eight_rows(packer: str) -> None:
    gate, up = source_weight(64, 64, 1), source_weight(64, 64, 2)
    found = packing.dequantize(packing.pack_gate_up(*gate, *up), 128, 64)
    gate_dense, up_dense = dense(*gate), dense(*up)
    for row in range(128):
        channel = 8 * (row >> 4) + (row & 7)
        assert torch.equal(found[row], (up_dense if row >> 3 & 1 else gate_dense)[channel]), row


@pytest.mark.parametrize(("n", "k"), SMALL_SHAPES)
def test_dequantize_rounds_once(n: int, k: int, packer: str) -> None:
    words, scale = source_weight(n, k)
    assert torch.equal(packing.dequantize(packing.pack(words, scale), n, k), dense(words, scale))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_default_dtype_changes_nothing(dtype: torch.dtype, packer: str) -> None:
    """Servers set it while they load; in float16 the factors of the scales would be infinite."""
    words, scale = source_weight(128, 64, 3)
    expected = packing.pack(words, scale)
    torch.set_default_dtype(dtype)
    try:
        packed = packing.pack(words, scale)
        unpacked = packing.unpack(packed, 128, 64)
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(packed, expected)
    assert all(torch.equal(got, given) for got, given in zip(unpacked, (words, scale), strict=True))


def test_a_full_size_expert_round_trips(packer: str) -> None:
    gate, up, down = source_weight(2048, 7168, 1), source_weight(2048, 7168, 2), source_weight(7168, 2048, 3)
    w13 = packing.pack_gate_up(*gate, *up)
    assert w13.numel() == packed_bytes(4096, 7168) == 4096 * 7168 // 4096 * 2304
    for found, expected in zip(packing.unpack_gate_up(w13, 4096, 7168), (*gate, *up), strict=True):
        assert_same(found, expected)
    w2 = packing.pack(*down)
    for found, expected in zip(packing.unpack(w2, 7168, 2048), down, strict=True):
        assert_same(found, expected)


@needs_native
def test_large_output_at_any_alignment_equals_the_definition() -> None:
    """Large aligned outputs are written past the cache, others not: the bytes must not depend on it."""
    words, scale = source_weight(2048, 7168)
    expected = torch.empty(packed_bytes(2048, 7168), dtype=torch.uint8)
    packing._pack(words, scale, expected)
    memory = torch.empty(expected.numel() + 128, dtype=torch.uint8)
    for offset in (-memory.data_ptr() % 64, -memory.data_ptr() % 64 + 16, 1 - memory.data_ptr() % 2):
        memory.fill_(0xA5)
        packing.pack_into(memory[offset : offset + expected.numel()], words, scale)
        assert torch.equal(memory[offset : offset + expected.numel()], expected)
        assert bool((memory[:offset] == 0xA5).all() and (memory[offset + expected.numel() :] == 0xA5).all())


@pytest.mark.parametrize("tp", [2, 4])
def test_slices_pack_as_if_copied_out(tp: int, packer: str) -> None:
    """TP: rows of gate and up, columns of down, straight from the whole source."""
    gate, up, down = source_weight(256, 256, 1), source_weight(256, 256, 2), source_weight(256, 256, 3)
    for rank in range(tp):
        part = slice(rank * 256 // tp, (rank + 1) * 256 // tp)
        rows = [tensor[part] for tensor in (*gate, *up)]
        assert_same(packing.pack_gate_up(*rows), packing.pack_gate_up(*[t.clone() for t in rows]))
        words = down[0][:, part.start // 8 : part.stop // 8]
        scale = down[1][:, part.start // 32 : part.stop // 32]
        assert not words.is_contiguous()
        assert_same(packing.pack(words, scale), packing.pack(words.contiguous(), scale.contiguous()))


def test_sources_at_odd_addresses(packer: str) -> None:
    """Tensors in a safetensors file may start anywhere."""
    words, scale = source_weight(128, 128)
    expected = packing.pack(words, scale)
    raw = bytearray(b"x") + bytearray(words.numpy().tobytes()) + bytearray(scale.view(torch.int16).numpy().tobytes())
    size = words.numel() * 4
    odd_words = torch.frombuffer(raw, dtype=torch.int32, offset=1, count=words.numel()).view(words.shape)
    odd_scale = torch.frombuffer(raw, dtype=torch.bfloat16, offset=1 + size).view(scale.shape)
    assert odd_words.data_ptr() % 4
    assert_same(packing.pack(odd_words, odd_scale), expected)


@pytest.mark.parametrize("where", [(0, 0), (127, 15), (70, 9)])
def test_code_zero_is_noticed(where: tuple[int, int], packer: str) -> None:
    codes = torch.full((128, 128), 0x77777777, dtype=torch.int32)[:, :16]
    scale = source_weight(128, 128)[1]
    out = torch.empty(packed_bytes(128, 128), dtype=torch.uint8)
    assert packing.pack_into(out, codes, scale) is False
    for nibble in range(8):
        changed = codes.clone()
        changed[where] &= ~(15 << 4 * nibble) if nibble < 7 else 0x0FFFFFFF
        assert packing.pack_into(out, changed, scale) is True
    gate, gate_scale = codes[:64], scale[:64]
    assert packing.pack_into(out, gate, gate_scale, (gate, gate_scale)) is False
    changed = gate.clone()
    changed[5, 3] = 0x77707777
    assert packing.pack_into(out, gate, gate_scale, (changed, gate_scale)) is True


BAD_SCALES = [float("nan"), float("inf"), -float("inf"), 2.0**27, -(2.0**27), 2.0**-95, 2.0**-130]


@pytest.mark.parametrize("value", BAD_SCALES)
def test_scales_out_of_range_are_refused_by_place(value: float, packer: str) -> None:
    words, scale = source_weight(256, 192)
    scale[200, 5] = value
    scale[201, 0] = value
    with pytest.raises(ScaleError, match=r"scale \[200, 5\] is .*2 of 1536 scales"):
        packing.pack(words, scale)
    with pytest.raises(ScaleError, match=r"up scale \[200, 5\]"):
        packing.pack_gate_up(*source_weight(256, 192, 1), words, scale)
    with pytest.raises(ScaleError, match=r"gate scale \[200, 5\]"):
        packing.pack_gate_up(words, scale, *source_weight(256, 192, 1))


@pytest.mark.parametrize("value", [0.0, -0.0, 2.0**-94, -(2.0**-94), 2.0**27 * (1 - 2.0**-8), -(2.0**26)])
def test_scales_at_the_edges_are_kept(value: float, packer: str) -> None:
    words, scale = source_weight(128, 64)
    scale[9, 1] = scale[3, 0] = value
    found = packing.unpack(packing.pack(words, scale), 128, 64)[1]
    assert_same(found, scale)


W, S = source_weight(128, 64)
WRONG: dict[str, tuple[Callable[[], object], str]] = {
    "rows": (lambda: packing.pack(W[:64], S[:64]), r"\[N=64, K=64\].*multiple of 128"),
    "columns": (lambda: packing.pack(W[:, :4].contiguous(), S[:, :1].contiguous()), r"K=32.*of 64"),
    "words dtype": (lambda: packing.pack(W.long(), S), "int32.*found torch.int64"),
    "words flat": (lambda: packing.pack(W.view(-1), S), "int32"),
    "scale dtype": (lambda: packing.pack(W, S.half()), "bfloat16.*found torch.float16"),
    "group size": (lambda: packing.pack(W, S[:, :1]), "only group size 32"),
    "gate and up differ": (lambda: packing.pack_gate_up(W, S, *source_weight(256, 64)), "equal shapes"),
    "up dtype": (lambda: packing.pack_gate_up(W, S, W.long(), S), "int32"),
    "out size": (lambda: packing.pack_into(torch.empty(9, dtype=torch.uint8), W, S), "4608"),
    "out dtype": (lambda: packing.pack_into(torch.empty(4608, dtype=torch.int8), W, S), "uint8"),
    "packed size": (lambda: packing.unpack(torch.empty(9, dtype=torch.uint8), 128, 64), "4608"),
    "packed strided": (lambda: packing.unpack(torch.empty(9216, dtype=torch.uint8)[::2], 128, 64), "contiguous"),
    "packed dtype": (lambda: packing.dequantize(torch.empty(4608), 128, 64), "uint8"),
    "interleave": (lambda: packing.interleave(W[:4], W[:4]), "multiple of 8"),
}


@pytest.mark.parametrize("what", WRONG)
def test_wrong_sources_are_named(what: str, packer: str) -> None:
    call, message = WRONG[what]
    with pytest.raises(UsageError, match=message):
        call()


def test_without_the_native_packer_one_warning_says_what_to_do() -> None:
    program = (
        "import warnings, pathlib\n"
        "from chord_runtime.format import native\n"
        "native.EXTENSION_SUFFIXES = ['.none']\n"
        "import torch\n"
        "from chord_runtime.format.packing import pack\n"
        "with warnings.catch_warnings(record=True) as caught:\n"
        "    warnings.simplefilter('always')\n"
        "    for _ in range(2):\n"
        "        pack(torch.zeros(128, 8, dtype=torch.int32), torch.ones(128, 2, dtype=torch.bfloat16))\n"
        "found = [str(w.message) for w in caught if 'native packer' in str(w.message)]\n"
        "assert len(found) == 1 and 'compiler' in found[0] and 'reinstall' in found[0], found\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@needs_native
def test_packing_lets_other_threads_run() -> None:
    """ctypes.CDLL, unlike PyDLL, releases the interpreter's lock around each call."""
    library = native.library()
    assert library is not None
    assert not library._func_flags_ & ctypes._FUNCFLAG_PYTHONAPI  # type: ignore[attr-defined]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_packing_on_a_gpu_gives_the_same_bytes() -> None:
    words, scale = source_weight(256, 448)
    gate, up = source_weight(128, 448, 1), source_weight(128, 448, 2)
    assert_same(packing.pack(words.cuda(), scale.cuda()).cpu(), packing.pack(words, scale))
    on_gpu = [tensor.cuda() for tensor in (*gate, *up)]
    packed = packing.pack_gate_up(*on_gpu)
    assert_same(packed.cpu(), packing.pack_gate_up(*gate, *up))
    for found, expected in zip(packing.unpack_gate_up(packed, 256, 448), on_gpu, strict=True):
        assert_same(found, expected)


def test_a_packer_that_was_not_built_is_told_without_a_line_of_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "EXTENSION_SUFFIXES", [])
    with pytest.warns(RuntimeWarning, match="native packer is not available .*C\\+\\+17 compiler") as told:
        assert native.library.__wrapped__() is None
    (warning,) = told
    shown = warnings.formatwarning(warning.message, warning.category, warning.filename, warning.lineno)
    assert len(shown.splitlines()) == 1
