"""The scripts for GPU hosts, as far as a CPU can tell: how engines are started, and what is concluded."""

from __future__ import annotations

import ast
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.vllm import routes
from tests.vllm.conftest import ROOT, Models, environment
from tests.vllm.h200 import engine, speed, tiny

pytestmark = pytest.mark.vllm


def cuda_calls(module: str) -> set[str]:
    """What a script asks of ``torch.cuda``."""
    tree = ast.parse((ROOT / "tests/vllm/h200" / f"{module}.py").read_text())
    return {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "torch.cuda"
    }


def test_whoever_starts_engines_never_uses_cuda() -> None:
    """``engine`` asks in functions that run in the engine, beside the check itself; counting opens no device."""
    assert cuda_calls("speed") == set()
    assert cuda_calls("tiny") == {"device_count"}
    assert cuda_calls("engine") == {"is_initialized", "is_available", "get_device_name", "max_memory_allocated"}


def test_engines_are_refused_beside_cuda(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    with pytest.raises(RuntimeError, match="CUDA is in use"):
        engine.Engine("one", tmp_path, tmp_path / "home")
    assert not (tmp_path / "home").exists()
    with pytest.raises(SystemExit, match="spawned"):
        routes.run(tmp_path, {})


def test_routes_are_refused_when_ranks_would_be_forked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("VLLM_WORKER_MULTIPROC_METHOD", "fork")
    with pytest.raises(SystemExit, match="VLLM_WORKER_MULTIPROC_METHOD=spawn"):
        routes.run(tmp_path, {})


def test_every_process_of_the_small_model_is_spawned_and_has_its_cache(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    started = []
    monkeypatch.setattr(tiny.subprocess, "Popen", lambda command, env, **_: started.append(env))
    groups = tiny.routes("source", "packed", "contiguous", "tp2")
    for process, group in groups.items():
        tiny.start(tmp_path, process, group, 1, 1234)
    assert all(env["VLLM_WORKER_MULTIPROC_METHOD"] == "spawn" for env in started)
    assert len({env["VLLM_CACHE_ROOT"] for env in started}) == len(groups)
    alone = [env for process, env in zip(groups, started, strict=True) if not process.startswith("two ranks")]
    assert {env["CUDA_VISIBLE_DEVICES"] for env in alone} == {"1"} and len(alone) == len(groups) - 4


def test_an_engine_in_its_own_process_answers_twice_the_same(
    models: Models, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name, value in environment().items():
        monkeypatch.setenv(name, value)
    one = engine.Engine(
        "chord", models.ep2, tmp_path / "home", load_format="chord", dtype="float32", enforce_eager=True,
        max_model_len=256, max_num_seqs=4, max_num_batched_tokens=256, kv_cache_memory_bytes=1 << 28,
    )  # fmt: skip
    try:
        assert one.result(300)["start_s"] > 0
        results: speed.Results = {}
        monkeypatch.setattr(speed, "PREFILL", ((1, 64),))
        monkeypatch.setattr(speed, "DECODE", (2,))
        monkeypatch.setattr(speed, "REPEATS", 1)
        saved: list[int] = []
        speed.measure([one], results, lambda: saved.append(len(results)))
        assert list(results) == ["prefill 1x64", "decode batch 2"] and saved == [1, 2]
        asked = speed.prompts(2, 16)
        assert one.call(engine.answers, asked, 4, 5) == one.call(engine.answers, asked, 4, 5)
        assert one.call(engine.versions)["torch"] == torch.__version__
        with pytest.raises(RuntimeError, match=r"does not answer(.|\n)*ZeroDivisionError: "):
            one.call(divide, 0)
    finally:
        one.stop()


def divide(llm: object, number: int) -> float:
    """A call that fails."""
    return 1 / number


def test_what_a_log_says_of_a_failure(tmp_path: Path) -> None:
    log = tmp_path / "log"
    lines = ["start", "ValueError: the cause", *(f"line {number}" for number in range(99)), "RuntimeError: late"]
    log.write_text("\n".join(lines))
    assert engine.trouble(log).splitlines() == ["ValueError: the cause", "RuntimeError: late", "…", *lines[-30:]]
    assert engine.trouble(tmp_path / "none") == "…"


def test_what_is_required_of_speed() -> None:
    def report(prefill: float, small: float, large: float, start: float, repeatable: bool = True) -> list[str]:
        points = {"prefill 4x4096": prefill, "decode batch 8": small, "decode batch 32": large}
        return speed.problems(
            {
                "points": {name: {"default": 1.0, "chord": 1 / gain} for name, gain in points.items()},
                "default": {"start_s": 100.0},
                "chord": {"start_s": start, "repeatable": repeatable},
            }
        )

    assert report(1.06, 1.01, 1.05, 79) == []
    assert [line.split(":")[0] for line in report(1.04, 0.98, 1.03, 81, False)] == [
        "prefill 4x4096", "decode batch 8", "decode batch 32", "start",
        "decoding in CUDA graphs does not repeat its bits",
    ]  # fmt: skip
    assert speed.problems({"default": {"error": "…"}, "chord": {}, "points": {}}) == ["default did not start"]
    assert (speed.tokens("prefill 4x4096"), speed.tokens("decode batch 32")) == (16384, 32)


def test_the_first_of_a_turn_is_the_last_of_the_next() -> None:
    engines = [SimpleNamespace(name=name) for name in ("default", "chord")]
    order: list[str] = []
    turns = speed.in_turns(engines, lambda one: order.append(one.name) or len(order))
    assert order[:4] == ["default", "chord", "chord", "default"]
    assert {name: len(taken) for name, taken in turns.items()} == {"default": speed.REPEATS, "chord": speed.REPEATS}
