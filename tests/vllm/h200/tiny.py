"""The small model in vLLM on GPUs, every route, eager and with CUDA graphs, against the default backend: tiny.py OUT.

Activations are BF16 here, so two correct implementations differ, and now and then a token is routed to another expert.
What is required: Chord is as near to Transformers in FP32 as the default backend is, by the median, which tokens that
were routed elsewhere do not move, and its routes agree bit for bit.
Several processes run them at once, on the last GPU; two ranks where there are two GPUs. What has not answered after
CHORD_LIMIT_S seconds (default 400) is ended, and the rest reported.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tests.vllm import model
from tests.vllm.h200.engine import PROCESSES, refuse_cuda, trouble
from tests.vllm.h200.slice import convert
from tests.vllm.routes import free_port, rank_variables

LIMIT_S = float(os.environ.get("CHORD_LIMIT_S", "400"))
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
    same_bits: bool = True
    """Whether they are those of ``packed``: not where vLLM sums over experts or ranks, in BF16."""


Routes = dict[str, Route]


def routes(source: str, packed: str, contiguous: str, tp2: str) -> dict[str, Routes]:
    """Routes by process; a process named ``opt-in …`` has CHORD_VLLM=1, one named ``two ranks …`` needs two GPUs.

    Graphs take long to start, so they run the routes that differ in them, each by itself.
    """
    by_humming = {"kernel_config": {"moe_backend": "humming"}}
    own = {"load_format": "chord"}
    two = {"tensor_parallel_size": 2, "disable_custom_all_reduce": True, **own}
    data = Route("eager", {"model": packed, "enable_expert_parallel": True, **own}, same_bits=False)
    return {
        "default eager": {"default eager": Route("eager", {"model": source}, same_bits=False)},
        "default graphs": {"default graphs": Route("graphs", {"model": source}, same_bits=False)},
        "eager": {
            "packed eager": Route("eager", {"model": packed}),
            "own loader eager": Route("eager", {"model": packed, "load_format": "chord"}),
            "contiguous eager": Route("eager", {"model": contiguous}),
            "by name eager": Route("eager", {"model": source, "quantization": "chord"}),
            "batched eager": Route("eager", {"model": packed, "batched": True}, same_bits=False),
        },
        "packed graphs": {"packed graphs": Route("graphs", {"model": packed})},
        "contiguous graphs": {"contiguous graphs": Route("graphs", {"model": contiguous})},
        "opt-in eager": {
            "nothing said eager": Route("eager", {"model": source}),
            "as humming eager": Route("eager", {"model": source, "quantization": "humming"}),
            "moe_backend eager": Route("eager", {"model": source, **by_humming}),
        },
        "opt-in graphs": {"nothing said graphs": Route("graphs", {"model": source})},
        "two ranks by expert": {
            "by expert eager": Route("eager", {"model": packed, "enable_expert_parallel": True, **two}, same_bits=False)
        },
        "two ranks by slice": {"by slice eager": Route("eager", {"model": tp2, **two}, same_bits=False)},
        # Its two processes meet while they start, so they are the only ones that can hold up each other.
        **{f"two ranks by data, {rank}": {f"by data eager, rank {rank}": data} for rank in range(2)},
    }


def start(work: Path, process: str, group: Routes, gpu: int, port: int) -> subprocess.Popen[bytes]:
    """Start a process that answers through some routes, one after the other; its log is beside its answers."""
    asked = json.dumps({name: {**route.options, **KINDS[route.kind]} for name, route in group.items()})
    environment = {
        **os.environ,
        **PROCESSES,
        "CHORD_VLLM": str(int(process.startswith("opt-in"))),
        "VLLM_CACHE_ROOT": str(work / f"{process} cache"),  # of what is compiled: some routes compile the same graph
        "OMP_NUM_THREADS": "1",
    }
    if not process.startswith("two ranks"):
        environment["CUDA_VISIBLE_DEVICES"] = str(gpu)
    if process.startswith("two ranks by data"):
        environment |= rank_variables(int(process[-1]), port)
    with (work / f"{process}.log").open("wb") as log:
        command = [sys.executable, "-m", "tests.vllm.routes", str(work), asked]
        return subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT)


def wait(work: Path, running: dict[str, subprocess.Popen[bytes]], until: float) -> None:
    """Until all have ended, or that time or SIGTERM ends them; says how each ended, and why if it failed."""

    def terminate(*_: Any) -> None:
        nonlocal until
        until = 0.0

    signal.signal(signal.SIGTERM, terminate)
    began = time.monotonic()
    left = dict(running)
    while left:
        for process, handle in list(left.items()):
            if time.monotonic() > until:
                handle.kill()
                handle.wait()
            if handle.poll() is None:
                continue
            del left[process]
            print(f"{process}: exit status {handle.returncode} after {time.monotonic() - began:.0f} s", flush=True)
            if handle.returncode:
                print(trouble(work / f"{process}.log"), flush=True)
        time.sleep(0.2)


def main(out: Path) -> int:
    """Run all routes; returns the number of requirements not met."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))
    began = time.monotonic()
    work = Path("/tmp/chord-tiny")
    shutil.rmtree(work, ignore_errors=True)
    source = model.write(work / "source")
    packed = convert(source, work / "packed")
    contiguous = convert(source, work / "contiguous", "--mode", "contiguous")
    tp2 = convert(source, work / "tp2", "--tp", "2")
    gpus = torch.cuda.device_count()
    refuse_cuda()
    groups = routes(str(source), str(packed), str(contiguous), str(tp2))
    groups = {process: group for process, group in groups.items() if gpus > 1 or not process.startswith("two ranks")}
    port = free_port()
    running = {process: start(work, process, group, gpus - 1, port) for process, group in groups.items()}
    wait(work, running, began + LIMIT_S)
    subprocess.run(["tar", "-C", work, "-czf", out / "tiny-logs.tgz", *(f"{p}.log" for p in groups)], check=True)
    chosen = {name: route for group in groups.values() for name, route in group.items()}
    answers = {name: torch.load(work / f"{name}.pt") for name in chosen if (work / f"{name}.pt").exists()}
    print(f"{len(answers)} of {len(chosen)} routes answered within {time.monotonic() - began:.0f} s")
    problems = [f"{name} did not answer" for name in chosen if name not in answers]
    problems += report(out, source, chosen, answers)
    print("\n".join(problems) or "all routes as required")
    return len(problems)


def report(out: Path, source: Path, chosen: dict[str, Route], answers: dict[str, dict[str, model.Answer]]) -> list[str]:
    """Print and save each route's distance from FP32; returns what is not as required."""
    rows, problems = {}, []
    for name, answer in answers.items():
        expected = model.reference(source, answer)
        gaps = torch.cat([(answer[key]["logprobs"] - expected[key]).abs().flatten() for key in expected])
        rows[name] = {"median": float(gaps.median()), "mean": float(gaps.mean()), "max": float(gaps.max())}
        print(f"{name:28}", *(f"{what} {value:.5f}" for what, value in rows[name].items()))
    for name, answer in answers.items():
        kind = chosen[name].kind
        default, first = rows.get(f"default {kind}"), answers.get(f"packed {kind}")
        if default and rows[name]["median"] > 1.25 * default["median"] + 1e-3:
            problems.append(f"{name} is farther from FP32 than the default backend")
        same = not first or all(torch.equal(answer[key]["logprobs"], first[key]["logprobs"]) for key in first)
        if chosen[name].same_bits and not same:
            problems.append(f"{name} differs from packed {kind}")
    (out / "tiny.json").write_text(json.dumps({"routes": rows, "problems": problems}, indent=1))
    return problems


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
