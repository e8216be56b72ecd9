"""Calls that cannot be meant are refused, by name, before anything is written."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import chord_runtime as chord
from chord_runtime.errors import ModeError, UsageError
from chord_runtime.ops.weight import PackedWeight
from tests.generators import activations, experts

E, N, K, M = 3, 256, 128, 256
PACKED, _ = experts(E, N, K, gate_up=True)
PLAIN, _ = experts(E, N, K)
A = activations(M, K)
M_INDICES = torch.tensor([0] * 128 + [2] * 100 + [-1] * 28, dtype=torch.int32)
MASKED_M = torch.tensor([3, 0, 4], dtype=torch.int32)
SORTED = torch.tensor([0, 2, 6, 6, 1, 3, 5, 6, 0, 0, 0, 0], dtype=torch.int32)
EXPERT_IDS = torch.tensor([0, 2, 55], dtype=torch.int32)
PADDED = torch.tensor([8], dtype=torch.int32)


def run(operation: str, **changes: Any) -> torch.Tensor:
    """A good call, with changes."""
    arguments: dict[str, dict[str, Any]] = {
        "contiguous": {"a": A, "w": PACKED, "m_indices": M_INDICES},
        "masked": {"a": A[: E * 4].view(E, 4, K), "w": PACKED, "masked_m": MASKED_M, "expected_m": 2},
        "indexed": {
            "x": A[:3], "w": PACKED, "sorted_ids": SORTED, "expert_ids": EXPERT_IDS, "num_tokens_padded": PADDED,
            "top_k": 2, "block_size": 4,
        },
    }  # fmt: skip
    result: torch.Tensor = getattr(chord, operation)(**(arguments[operation] | changes))
    return result


OPERATIONS = {"contiguous": (M, "a"), "masked": (12, "a"), "indexed": (6, "x")}


@pytest.mark.parametrize("operation", OPERATIONS)
def test_the_good_call_works(operation: str) -> None:
    rows, _ = OPERATIONS[operation]
    assert run(operation).shape == (rows, N)
    assert run(operation, activation="swiglu").shape == (rows, N // 2)
    assert run(operation, w=PLAIN).shape == (rows, N)


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("packed_for", [("masked",), ("contiguous",), ("indexed",), ("contiguous", "indexed"), ()])
def test_a_weight_is_refused_in_modes_it_was_not_packed_for(operation: str, packed_for: tuple[str, ...]) -> None:
    modes = tuple(chord.Mode(mode) for mode in packed_for)
    weight = PackedWeight(PACKED.data, N, K, PACKED.row_order, modes)
    if operation in packed_for:
        assert run(operation, w=weight) is not None
        return
    recorded = ", ".join(packed_for) or "no mode"
    with pytest.raises(ModeError, match=f"^{operation} was called on a weight packed for {recorded}: convert again"):
        run(operation, w=weight)


def changed_rows(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[str], dict[str, Any]]:
    def changes(operation: str) -> dict[str, Any]:
        name = OPERATIONS[operation][1]
        good = {"contiguous": A, "masked": A[: E * 4].view(E, 4, K), "indexed": A[:3]}[operation]
        return {name: change(good)}

    return changes


def out(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.zeros(*shape, dtype=dtype)


SHARED: dict[str, tuple[Callable[[str], dict[str, Any]], str]] = {
    "rows dtype": (changed_rows(lambda a: a.half()), r"^(a|x) must be .*bfloat16.*found float16"),
    "rows width": (changed_rows(lambda a: a[..., :64].contiguous()), r"\[…, 128\].*found bfloat16"),
    "rows strided": (
        changed_rows(lambda a: torch.empty(*a.shape[:-1], 2 * K, dtype=a.dtype)[..., ::2]),
        "contiguous bfloat16.*with strides",
    ),
    "rows device": (changed_rows(lambda a: a.to("meta")), "on cpu, where the weight is; found .* on meta"),
    "activation": (lambda _: {"activation": "gelu"}, "activation 'gelu'.*supported are None, and 'swiglu'"),
    "swiglu of plain": (lambda _: {"activation": "swiglu", "w": PLAIN}, "row order plain.*gate_up_8"),
    "out dtype": (lambda o: {"out": out(OPERATIONS[o][0], N, dtype=torch.float32)}, "out must be.*bfloat16.*float32"),
    "out shape": (lambda o: {"out": out(OPERATIONS[o][0], N // 2)}, rf"out must be .*, {N}\]"),
    "out strided": (lambda o: {"out": out(OPERATIONS[o][0], 2 * N)[:, ::2]}, "out must be contiguous.*strides"),
    "out device": (lambda o: {"out": out(OPERATIONS[o][0], N).to("meta")}, "out must be .* on cpu; found.*meta"),
}


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("what", SHARED)
def test_what_the_modes_share_is_checked(operation: str, what: str) -> None:
    changes, message = SHARED[what]
    with pytest.raises(UsageError, match=message):
        run(operation, **changes(operation))


@pytest.mark.parametrize("operation", OPERATIONS)
def test_row_weights_are_checked(operation: str) -> None:
    rows, _ = OPERATIONS[operation]
    name = "topk_weights" if operation == "indexed" else "row_weight"
    wrong = [
        torch.ones(rows).double(),
        torch.ones(rows + 1),
        torch.ones(2 * rows)[::2],
        torch.ones(rows, device="meta"),
    ]
    for weight in wrong:
        with pytest.raises(UsageError, match=rf"^{name} must be contiguous float32 \[{rows}\] on cpu; found"):
            run(operation, **{name: weight})


ROUTING_TENSORS = [
    ("contiguous", "m_indices"),
    ("masked", "masked_m"),
    ("indexed", "sorted_ids"),
    ("indexed", "expert_ids"),
    ("indexed", "num_tokens_padded"),
]


@pytest.mark.parametrize(("operation", "name"), ROUTING_TENSORS)
def test_routing_tensors_are_checked(operation: str, name: str) -> None:
    good = {
        "m_indices": M_INDICES, "masked_m": MASKED_M, "sorted_ids": SORTED, "expert_ids": EXPERT_IDS,
        "num_tokens_padded": PADDED,
    }[name]  # fmt: skip
    wrong = [
        good.long(),
        good.view(1, -1),
        good.repeat_interleave(2)[::2] if len(good) > 1 else good[0],
        good.to("meta"),
    ]
    if name in ("m_indices", "masked_m", "num_tokens_padded"):
        wrong.append(torch.cat([good, good]))
    for tensor in wrong:
        with pytest.raises(UsageError, match=rf"{name} must be contiguous int32 \[(\d+|…)\] on cpu; found"):
            run(operation, **{name: tensor})


def test_shapes_of_each_mode() -> None:
    with pytest.raises(UsageError, match=r"M a multiple of 128; found \[200, 128\]"):
        run("contiguous", a=A[:200], m_indices=M_INDICES[:200])
    with pytest.raises(UsageError, match=r"must be \[M, K\]"):
        run("contiguous", a=A.view(2, 128, K))
    with pytest.raises(UsageError, match=r"with G = 3, .*found \[4, 3, 128\]"):
        run("masked", a=A[:12].view(4, 3, K))
    with pytest.raises(UsageError, match=r"with G = 3, .*found \[13, 128\]"):
        run("masked", a=A[:13])
    with pytest.raises(UsageError, match=r"top_k at least 1; found \[3, 128\] and 0"):
        run("indexed", top_k=0)
    with pytest.raises(UsageError, match="block_size must be at least 1; found 0"):
        run("indexed", block_size=0)


INTEGERS: dict[str, list[tuple[str, int]]] = {
    "masked": [("expected_m", 2)],
    "indexed": [("top_k", 2), ("block_size", 4), ("num_experts", 9)],
}


@pytest.mark.parametrize(("operation", "name", "good"), [(o, *pair) for o, pairs in INTEGERS.items() for pair in pairs])
def test_integers_are_whatever_python_takes_as_one(operation: str, name: str, good: int) -> None:
    expected = run(operation, out=out(OPERATIONS[operation][0], N))
    for same in (np.int64(good), np.uint8(good)):
        assert torch.equal(run(operation, out=out(OPERATIONS[operation][0], N), **{name: same}), expected)
    for wrong in (True, np.bool_(True), float(good), str(good), [good]):
        found = re.escape(f"{name} must be an integer; found {type(wrong).__name__} {wrong!r}")
        with pytest.raises(UsageError, match=f"^{found}$"):
            run(operation, **{name: wrong})
    with pytest.raises(UsageError, match=f"^{name} must be an integer; found Tensor$"):
        run(operation, **{name: torch.tensor(good)})


VALUES: dict[str, tuple[str, dict[str, Any], str]] = {
    "expert beyond": ("contiguous", {"m_indices": torch.where(M_INDICES == 2, 3, M_INDICES)}, r"m_indices\[128\] is 3"),
    "expert below": (
        "contiguous",
        {"m_indices": torch.where(M_INDICES == 2, -2, M_INDICES)},
        r"m_indices\[128\] is -2",
    ),
    "run not aligned": ("contiguous", {"m_indices": M_INDICES.roll(1)}, r"\[1\] is 0 in a run that starts with -1"),
    "count beyond": ("masked", {"masked_m": MASKED_M + 1}, r"masked_m\[2\] is 5: it must be in 0\.\.4"),
    "count below": ("masked", {"masked_m": MASKED_M - 1}, r"masked_m\[1\] is -1"),
    "padded beyond": ("indexed", {"num_tokens_padded": PADDED + 8}, r"num_tokens_padded is 16.*0\.\.12"),
    "padded uneven": ("indexed", {"num_tokens_padded": PADDED - 1}, "is 7: it must be a multiple of block_size 4"),
    "padded below": ("indexed", {"num_tokens_padded": PADDED - 12}, "is -4"),
    "block's expert": ("indexed", {"expert_ids": EXPERT_IDS + 1}, r"expert_ids\[1\] is 3"),
    "negative id": ("indexed", {"sorted_ids": torch.where(SORTED == 2, -1, SORTED)}, r"sorted_ids\[1\] is -1"),
    "id beyond padding": ("indexed", {"sorted_ids": torch.where(SORTED == 6, 7, SORTED)}, r"\[2\] is 7: .* below 6"),
    "id twice": ("indexed", {"sorted_ids": torch.where(SORTED == 3, 2, SORTED)}, "routed index 2 twice"),
}


@pytest.mark.parametrize("what", VALUES)
def test_routing_values_are_checked_on_the_cpu(what: str) -> None:
    operation, changes, message = VALUES[what]
    untouched = torch.full((OPERATIONS[operation][0], N), 7, dtype=torch.bfloat16)
    with pytest.raises(UsageError, match=message):
        run(operation, out=untouched, **changes)
    with pytest.raises(UsageError, match=message):
        run(operation, out=untouched, validate=True, **changes)
    assert bool((untouched == 7).all())


def test_values_are_not_read_when_told_not_to() -> None:
    """A run that mixes experts is harmless to the reference, so that nothing but the check can refuse it."""
    assert run("contiguous", m_indices=M_INDICES.roll(1), validate=False).shape == (M, N)


def test_the_block_size_follows_from_the_buffers_when_it_can() -> None:
    expected = run("indexed", out=out(6, N))
    assert torch.equal(run("indexed", block_size=None, out=out(6, N)), expected)
    with pytest.raises(UsageError, match="block size does not follow from 12 sorted_ids and 4 expert_ids: pass"):
        run("indexed", block_size=None, expert_ids=torch.zeros(4, dtype=torch.int32))
    with pytest.raises(UsageError, match="does not follow"):
        run("indexed", block_size=None, expert_ids=EXPERT_IDS[:0])


def test_nothing_to_do() -> None:
    """No rows, no capacity, no tokens: an empty result, not an error."""
    empty = torch.zeros(0, dtype=torch.int32)
    assert run("contiguous", a=A[:0], m_indices=empty).shape == (0, N)
    assert run("masked", a=torch.zeros(E, 0, K).bfloat16(), masked_m=torch.zeros(E, dtype=torch.int32)).shape == (0, N)
    assert run("indexed", x=A[:0], num_tokens_padded=PADDED - 8).shape == (0, N)


def test_a_weight_of_the_wrong_size_is_refused() -> None:
    for data in (
        PACKED.data[:, :-1],
        PACKED.data.view(-1),
        PACKED.data.view(torch.int8),
        PACKED.data[:, ::1][::2][:, 1:],
    ):
        with pytest.raises(UsageError, match=r"packed weight of \[256, 128\] is contiguous uint8 \[experts, 18432\]"):
            PackedWeight(data, N, K)


def test_the_public_names_are_what_they_say() -> None:
    """``chord_runtime.load`` must stay the function whatever was imported before."""
    program = (
        "import chord_runtime, chord_runtime.layer, chord_runtime.loader, chord_runtime.routing\n"
        "import chord_runtime.ops.api\n"
        "for name in chord_runtime.__all__:\n"
        "    value = getattr(chord_runtime, name)\n"
        "    assert callable(value) or name == '__version__', (name, value)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("operation", ["contiguous", "masked", "indexed"])
def test_what_is_no_weight_and_what_are_no_rows(operation: str) -> None:
    call = getattr(chord, operation)
    rest = (torch.zeros(1, dtype=torch.int32),) * 3 + (1,) if operation == "indexed" else (torch.zeros(1).int(), 1)
    rest = rest[:1] if operation == "contiguous" else rest
    weight = chord.pack_w4a16_grouped(torch.zeros(1, 128, 64, dtype=torch.uint8), torch.ones(1, 128, 2).bfloat16())
    with pytest.raises(UsageError, match=r"must be .*found scalar"):
        call(torch.tensor(1.0).bfloat16(), weight, *rest)
    for wrong in (weight.data, None):
        with pytest.raises(UsageError, match=r"w must be a PackedWeight, found .*pack_w4a16_grouped"):
            call(torch.zeros(128, 64).bfloat16(), wrong, *rest)


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("wrong", [None, [[1.0]], 3, "x"])
def test_what_is_no_tensor_is_refused_by_name(operation: str, wrong: object) -> None:
    """None stands for a default where there is one."""
    names = [OPERATIONS[operation][1], *(name for of, name in ROUTING_TENSORS if of == operation)]
    optional = ["out", "topk_weights" if operation == "indexed" else "row_weight"]
    for name in names if wrong is None else names + optional:
        with pytest.raises(UsageError, match=f"^{name} must be .*found {type(wrong).__name__}"):
            run(operation, **{name: wrong})


def test_scalars_are_called_scalars() -> None:
    with pytest.raises(
        UsageError, match=r"expert_ids must be contiguous int32 \[…\] on cpu; found int32 scalar on cpu"
    ):
        run("indexed", expert_ids=EXPERT_IDS[0])
