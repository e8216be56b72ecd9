"""The small model in vLLM on GPUs, every route, eager and with CUDA graphs, against the default backend: tiny.py OUT.

Activations are BF16 here, so two correct implementations differ, and now and then a token is routed to another expert.
What is required: Chord is as near to Transformers in FP32 as the default backend is, and its routes agree bit for bit.
All routes run at once, each in its own process, on the last GPU; two ranks where there are two GPUs.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tests.vllm import model
from tests.vllm.h200.slice import convert

LIMIT_S = 120
COMMON = {"dtype": "bfloat16", "gpu_memory_utilization": 0.04, "kv_cache_memory_bytes": 1 << 28}
KINDS: dict[str, dict[str, Any]] = {
    "eager": {**COMMON, "enforce_eager": True},
    "graphs": {**COMMON, "enforce_eager": False},
}


@dataclass(frozen=True)
class Route:
    """How vLLM is started, and what may be required of its answers."""

    kind: str
    options: dict[str, Any]
    opt_in: bool = False
    same_bits: bool = True
    """Whether they are those of ``packed``: not where vLLM sums over experts or ranks, in BF16."""


def routes(source: str, packed: str, contiguous: str, tp2: str, gpus: int) -> dict[str, Route]:
    """All routes by name. Graphs take long to start, so they run the routes that differ in them."""
    eager: dict[str, Route] = {
        "packed": Route("eager", {"model": packed}),
        "own loader": Route("eager", {"model": packed, "load_format": "chord"}),
        "contiguous": Route("eager", {"model": contiguous}),
        "by name": Route("eager", {"model": source, "quantization": "chord"}),
        "batched": Route("eager", {"model": packed, "batched": True}, same_bits=False),
        "nothing said": Route("eager", {"model": source}, opt_in=True),
        "as humming": Route("eager", {"model": source, "quantization": "humming"}, opt_in=True),
        "moe_backend": Route("eager", {"model": source, "kernel_config": {"moe_backend": "humming"}}, opt_in=True),
    }
    if gpus > 1:
        two = {"tensor_parallel_size": 2, "disable_custom_all_reduce": True, "load_format": "chord"}
        eager["two ranks by expert"] = Route(
            "eager", {"model": packed, "enable_expert_parallel": True, **two}, same_bits=False
        )
        eager["two ranks by slice"] = Route("eager", {"model": tp2, **two}, same_bits=False)
    graphs = {
        "packed": Route("graphs", {"model": packed}),
        "contiguous": Route("graphs", {"model": contiguous}),
        "nothing said": Route("graphs", {"model": source}, opt_in=True),
    }
    default = {f"default {kind}": Route(kind, {"model": source}, same_bits=False) for kind in KINDS}
    ours = {f"{name} {route.kind}": route for group in (eager, graphs) for name, route in group.items()}
    return default | ours


def start(work: Path, name: str, route: Route, gpu: int) -> subprocess.Popen[bytes]:
    """Start the process that answers through one route; its log is beside its answers."""
    asked = json.dumps({name: {**route.options, **KINDS[route.kind]}})
    environment = {
        **os.environ,
        "CHORD_VLLM": str(int(route.opt_in)),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "OMP_NUM_THREADS": "1",
        "TORCHINDUCTOR_COMPILE_THREADS": "4",
    }
    if "tensor_parallel_size" not in route.options:
        environment["CUDA_VISIBLE_DEVICES"] = str(gpu)
    with (work / f"{name}.log").open("wb") as log:
        command = [sys.executable, "-m", "tests.vllm.routes", str(work), asked]
        return subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT)


def main(out: Path) -> int:
    """Run all routes; returns the number of requirements not met."""
    began = time.monotonic()
    work = Path("/tmp/chord-tiny")
    source = model.write(work / "source")
    packed = convert(source, work / "packed")
    contiguous = convert(source, work / "contiguous", "--mode", "contiguous")
    tp2 = convert(source, work / "tp2", "--tp", "2")
    gpus = torch.cuda.device_count()
    chosen = routes(str(source), str(packed), str(contiguous), str(tp2), gpus)
    running = {name: start(work, name, route, gpus - 1) for name, route in chosen.items()}
    answers, problems = {}, []
    for name, process in running.items():
        try:
            code: int | str = process.wait(max(1.0, began + LIMIT_S - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            code = f"killed after {LIMIT_S} s"
        if code == 0:
            answers[name] = torch.load(work / f"{name}.pt")
        else:
            lines = (work / f"{name}.log").read_text(errors="replace").splitlines()
            print(f"--- {name}: {code}", *lines[-40:], sep="\n")
            problems.append(f"{name} did not answer: {code}")
    print(f"{len(answers)} of {len(chosen)} routes answered within {time.monotonic() - began:.0f} s")
    problems += report(out, source, chosen, answers)
    print("\n".join(problems) or "all routes as required")
    subprocess.run(["tar", "-C", work, "-czf", out / "tiny-logs.tgz", *(f"{name}.log" for name in chosen)], check=True)
    return len(problems)


def report(out: Path, source: Path, chosen: dict[str, Route], answers: dict[str, dict[str, model.Answer]]) -> list[str]:
    """Print and save each route's distance from FP32; returns what is not as required."""
    rows, problems = {}, []
    for name, answer in answers.items():
        expected = model.reference(source, answer)
        gaps = torch.cat([(answer[key]["logprobs"] - expected[key]).abs().flatten() for key in expected])
        rows[name] = {"mean": float(gaps.mean()), "p99": float(gaps.quantile(0.99)), "max": float(gaps.max())}
        print(f"{name:28} mean {rows[name]['mean']:.5f}  p99 {rows[name]['p99']:.4f}  max {rows[name]['max']:.4f}")
    for name, answer in answers.items():
        kind = chosen[name].kind
        default, first = rows.get(f"default {kind}"), answers.get(f"packed {kind}")
        if default and rows[name]["mean"] > 1.2 * default["mean"] + 1e-3:
            problems.append(f"{name} is farther from FP32 than the default backend")
        same = not first or all(torch.equal(answer[key]["logprobs"], first[key]["logprobs"]) for key in first)
        if chosen[name].same_bits and not same:
            problems.append(f"{name} differs from packed {kind}")
    (out / "tiny.json").write_text(json.dumps({"routes": rows, "problems": problems}, indent=1))
    return problems


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
