"""What of the GPU side can be held without one: the timing loop on a pretend clock, and the read kernel's compile."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch

from chord_runtime.bench import ceilings, timing
from chord_runtime.errors import KernelError


class PretendGpu:
    """A stream as a clock in microseconds: flushing takes 80, each contender its own time, a little noise on top."""

    def __init__(self) -> None:
        self.now = 0.0
        self.log: list[str] = []

    def call(self, name: str, us: float) -> None:
        self.now += us + len(self.log) % 7 * 0.01
        self.log.append(name)

    def flush(self) -> None:
        self.call("flush", 80.0)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> PretendGpu:
    clock = PretendGpu()

    class Event:
        at = 0.0

        def record(self) -> None:
            self.at = clock.now

        def elapsed_time(self, other: Event) -> float:
            return (other.at - self.at) / 1e3

    class Buffer:
        def zero_(self) -> None:
            clock.flush()

    monkeypatch.setattr(timing, "_event", Event)
    monkeypatch.setattr(timing.torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(timing.torch, "empty", lambda *args, **options: Buffer())
    return clock


def test_turns_flushes_and_medians(gpu: PretendGpu) -> None:
    calls = {"a": lambda: gpu.call("a", 200.0), "b": lambda: gpu.call("b", 400.0)}
    found = timing.CudaTimer().measure(calls, budget_ms=40.0)
    assert found["a"].us == pytest.approx(200.0, abs=0.1)
    assert found["b"].us == pytest.approx(400.0, abs=0.1)
    assert found["a"].low <= found["a"].us <= found["a"].high
    assert found["a"].rounds == found["b"].rounds == 100, "the budget over the slowest"
    assert gpu.log[:2] == ["a", "b"], "one call each to compile"
    assert gpu.log[2:10] == ["flush", "a", "flush", "b"] * 2


def test_rounds_have_bounds(gpu: PretendGpu) -> None:
    assert timing.CudaTimer().measure({"a": lambda: gpu.call("a", 1e6)}, 1.0)["a"].rounds == timing.MIN_ROUNDS
    assert timing.CudaTimer().measure({"a": lambda: gpu.call("a", 1.0)}, 1e6)["a"].rounds == timing.MAX_ROUNDS


def test_alone_is_do_bench_after_a_rest(gpu: PretendGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, object] = {}

    def do_bench(call: Callable[[], object], **options: object) -> float:
        call()
        asked.update(options)
        return 0.2

    testing = ModuleType("triton.testing")
    testing.do_bench = do_bench  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "triton", ModuleType("triton"))
    monkeypatch.setitem(sys.modules, "triton.testing", testing)
    monkeypatch.setattr(timing.time, "sleep", lambda seconds: gpu.log.append(f"rest {seconds}"))
    assert timing.CudaTimer().alone(lambda: gpu.call("a", 200.0)) == pytest.approx(200.0)
    assert gpu.log == ["rest 0.2", "a"]
    assert asked == {"warmup": 25, "rep": 100, "return_mode": "median"}


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a", "sm_103a"])
def test_read_kernel_compiles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arch: str) -> None:
    pytest.importorskip("cuda.bindings.nvrtc", reason="the CUDA bindings are an extra")
    from chord_runtime.cuda.compile import compile_kernel

    monkeypatch.setenv("CHORD_CACHE_DIR", str(tmp_path))
    cubin = compile_kernel("bulk_read", {"CHUNK": ceilings.CHUNK, "STAGES": ceilings.STAGES}, arch)
    assert cubin.problems() == []
    assert cubin.dynamic_shared == ceilings.CHUNK * ceilings.STAGES
    assert ceilings.CHUNK % 16 == 0
    assert ceilings.CHUNK * ceilings.STAGES > 54_000, "enough in flight to reach the memory's rate"


def test_a_full_gpu_is_one_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: object, **options: object) -> None:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(torch, "empty", full)
    with pytest.raises(KernelError, match="need 8 GiB of free GPU memory"):
        ceilings.measure_ceilings(timing.CudaTimer.__new__(timing.CudaTimer))
