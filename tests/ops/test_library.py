"""PyTorch sees the operators: schemas, fake kernels, torch.compile, torch.export; and refuses gradients."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

import chord_runtime as chord
from chord_runtime.errors import UsageError
from chord_runtime.layer import moe_layer
from chord_runtime.ops import library
from tests.generators import ROUTINGS, activations, experts, layer

E, N, K = 3, 128, 64
PACKED, _ = experts(E, N, K, gate_up=True)
A = activations(256, K)
M_INDICES = torch.tensor([2] * 128 + [0] * 100 + [-1] * 28, dtype=torch.int32)
MASKED_M = torch.tensor([3, 0, 5], dtype=torch.int32)
SORTED = torch.tensor([0, 2, 6, 6, 1, 3, 5, 6, 9, 9, 9, 9], dtype=torch.int32)
EXPERT_IDS = torch.tensor([0, 2, 55], dtype=torch.int32)
PADDED = torch.tensor([8], dtype=torch.int32)


def contiguous(rows: Tensor, weight: Tensor) -> Tensor:
    out = torch.zeros(256, N // 2, dtype=rows.dtype)
    return chord.contiguous(rows, PACKED, M_INDICES, activation="swiglu", row_weight=weight, out=out) * 2


def masked(rows: Tensor, weight: Tensor) -> Tensor:
    out = torch.zeros(15, N, dtype=rows.dtype)
    rows = rows[:15].view(E, 5, K)
    return chord.masked(rows, PACKED, MASKED_M, 4, row_weight=weight[:15], out=out) * 2


def indexed(rows: Tensor, weight: Tensor) -> Tensor:
    out = torch.zeros(6, N // 2, dtype=rows.dtype)
    return (
        chord.indexed(
            rows[:3], PACKED, SORTED, EXPERT_IDS, PADDED, 2, 4, topk_weights=weight[:6], activation="swiglu", out=out
        )
        * 2
    )


CALLS = {"contiguous": contiguous, "masked": masked, "indexed": indexed}
ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "contiguous": (A, PACKED.data, M_INDICES, None, torch.zeros(256, N).bfloat16(), N, True, False),
    "masked": (A[:15], PACKED.data, MASKED_M, 4, torch.ones(15), torch.zeros(15, 64).bfloat16(), N, True, True),
    "indexed": (
        A[:3], PACKED.data, SORTED, EXPERT_IDS, PADDED, 2, 4, torch.ones(3, 2), torch.zeros(6, 64).bfloat16(), N, True,
        True,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_opcheck(name: str) -> None:
    operator = getattr(torch.ops.chord, name).default
    torch.library.opcheck(operator, ARGUMENTS[name])


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_without_a_graph_break(name: str, backend: str, dynamic: bool) -> None:
    torch._dynamo.reset()
    weight = torch.rand(256)
    compiled = torch.compile(CALLS[name], fullgraph=True, backend=backend, dynamic=dynamic)
    assert torch.equal(compiled(A, weight), CALLS[name](A, weight))
    assert torch.equal(compiled(A + 1, weight), CALLS[name](A + 1, weight))


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("strict", [False, True])
def test_exported(name: str, strict: bool) -> None:
    call = CALLS[name]

    class Module(torch.nn.Module):
        def forward(self, rows: Tensor, weight: Tensor) -> Tensor:
            return call(rows, weight)

    weight = torch.rand(256)
    program = torch.export.export(Module(), (A, weight), strict=strict)
    assert f"chord.{name}" in str(program.graph)
    assert torch.equal(program.module()(A, weight), call(A, weight))


class Quiet(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


WATCHERS: dict[str, Callable[[Callable[[Tensor], Tensor]], object]] = {
    "a dispatch mode": lambda look: call_inside(Quiet(), look),
    "fake tensors": lambda look: call_inside(FakeTensorMode(), look),
    "the profiler": lambda look: call_inside(torch.profiler.profile(), look),
    "make_fx": lambda look: make_fx(look)(torch.zeros(2)),
    "vmap": lambda look: torch.vmap(look)(torch.zeros(2)),
    "functionalize": lambda look: torch.func.functionalize(look)(torch.zeros(2)),
    "jit.trace": lambda look: torch.jit.trace(look, torch.zeros(2), check_trace=False),
}


def call_inside(context: AbstractContextManager[object], look: Callable[[Tensor], Tensor]) -> None:
    with context:
        look(torch.zeros(2))


@pytest.mark.parametrize("watcher", WATCHERS)
@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
def test_who_watches_operators_sees_them(watcher: str) -> None:
    seen: list[bool] = []

    def look(rows: Tensor) -> Tensor:
        seen.append(library._watched())
        return rows + 1

    assert not library._watched()
    WATCHERS[watcher](look)
    assert seen and all(seen)
    assert not library._watched()


def test_only_plain_cuda_tensors_go_past_the_dispatcher(monkeypatch: pytest.MonkeyPatch) -> None:
    launch = pytest.importorskip("chord_runtime.cuda.launch", reason="the CUDA bindings are an extra")

    class OnCuda(Tensor):
        is_cuda = True  # type: ignore[assignment]

    called: list[str] = []
    monkeypatch.setattr(launch, "masked", lambda *args: called.append("the kernel"))
    rows, *rest = ARGUMENTS["masked"]
    library.masked(rows, *rest)
    library.masked(rows.as_subclass(OnCuda), *rest)
    assert called == [], "a CPU tensor, and a subclass that might mean something else"
    monkeypatch.setattr(library.torch, "Tensor", OnCuda)
    library.masked(rows.as_subclass(OnCuda), *rest)
    assert called == ["the kernel"]


@pytest.mark.parametrize("mode", list(chord.Mode))
def test_a_whole_layer_compiles(mode: chord.Mode) -> None:
    torch._dynamo.reset()
    packed, _, _ = layer((0, 1, 2, 3), 4)
    ids, weights = ROUTINGS["uniform"](7, 2, 4), torch.rand(7, 2)
    x = activations(7, 128)

    def run(x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        return moe_layer(x, packed, ids, weights, mode=mode)

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x, ids, weights), run(x, ids, weights))


@pytest.mark.parametrize("mode", list(chord.Mode))
def test_a_layer_is_compiled_once_for_all_batches(mode: chord.Mode) -> None:
    torch._dynamo.reset()
    packed, _, _ = layer((0, 1, 2, 3), 4)

    def run(x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        return moe_layer(x, packed, ids, weights, mode=mode)

    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(run, backend=counter, dynamic=True)
    for tokens in range(3, 12):
        arguments = activations(tokens, 128), ROUTINGS["uniform"](tokens, 2, 4), torch.rand(tokens, 2)
        assert torch.equal(compiled(*arguments), run(*arguments))
    assert counter.frame_count <= 2, "a rule that depends on the batch may be one guard"


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("which", ["rows", "weight"])
def test_gradients_are_refused(name: str, which: str) -> None:
    rows, weight = A.clone(), torch.rand(256)
    (rows if which == "rows" else weight).requires_grad_()
    call: Callable[[Tensor, Tensor], Tensor] = CALLS[name]
    with pytest.raises(UsageError, match=r"requires a gradient.*no_grad"):
        call(rows, weight)
    torch._dynamo.reset()
    with pytest.raises(Exception, match="requires a gradient"):
        torch.compile(call, fullgraph=True, backend="aot_eager")(rows, weight)
    for context in (torch.no_grad(), torch.inference_mode()):
        with context:
            assert not call(rows, weight).requires_grad


def test_the_operators_can_be_seen_without_memory() -> None:
    """On the meta device nothing is computed, and nothing fails."""
    arguments = [value.to("meta") if isinstance(value, Tensor) else value for value in ARGUMENTS["contiguous"]]
    assert torch.ops.chord.contiguous(*arguments) is None


@pytest.mark.gpu
def test_on_a_gpu_the_way_past_the_dispatcher_does_the_same() -> None:
    weight = replace(PACKED, data=PACKED.data.cuda())
    rows, masked_m = A[:15].view(E, 5, K).cuda(), MASKED_M.cuda()
    out, through = torch.zeros(2, 15, N, dtype=torch.bfloat16, device="cuda").unbind()
    chord.masked(rows, weight, masked_m, 4, out=out)
    torch.ops.chord.masked(rows, weight.data, masked_m, 4, None, through, N, True, False)
    assert torch.equal(out, through) and bool(out.any())
    traced = make_fx(lambda rows: chord.masked(rows, weight, masked_m, 4, out=torch.zeros_like(out)))(rows)
    assert "chord.masked" in str(traced.graph)
    with torch.profiler.profile() as profile:
        chord.masked(rows, weight, masked_m, 4, out=out)
    assert "chord::masked" in {event.key for event in profile.key_averages()}
