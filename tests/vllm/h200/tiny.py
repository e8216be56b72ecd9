"""The small model in vLLM on a GPU, every route, eager and with CUDA graphs, against the default backend: tiny.py OUT.

Activations are BF16 here, so two correct implementations differ, and now and then a token is routed to another expert.
What is required: Chord is as near to Transformers in FP32 as the default backend is, and its routes agree bit for bit.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from tests.vllm import model
from tests.vllm.h200.slice import convert

COMMON = {"dtype": "bfloat16", "gpu_memory_utilization": 0.1}
KINDS: dict[str, dict[str, Any]] = {
    "eager": {**COMMON, "enforce_eager": True},
    "graphs": {**COMMON, "enforce_eager": False},
}


def routes(source: str, packed: str, contiguous: str) -> dict[str, dict[str, dict[str, Any]]]:
    """CHORD_VLLM → route → vLLM arguments. Graphs take long to start, so they run the routes that differ in them."""
    eager, graphs = KINDS["eager"], KINDS["graphs"]
    return {
        "0": {
            "default eager": {"model": source, **eager},
            "packed eager": {"model": packed, **eager},
            "own loader eager": {"model": packed, "load_format": "chord", **eager},
            "contiguous eager": {"model": contiguous, **eager},
            "by name eager": {"model": source, "quantization": "chord", **eager},
            "batched eager": {"model": packed, "batched": True, **eager},
            "default graphs": {"model": source, **graphs},
            "packed graphs": {"model": packed, **graphs},
            "contiguous graphs": {"model": contiguous, **graphs},
        },
        "1": {
            "nothing said eager": {"model": source, **eager},
            "as humming eager": {"model": source, "quantization": "humming", **eager},
            "moe_backend eager": {"model": source, "kernel_config": {"moe_backend": "humming"}, **eager},
            "nothing said graphs": {"model": source, **graphs},
        },
    }


def main(out: Path) -> int:
    """Run all routes; returns the number of requirements not met."""
    work = Path("/tmp/chord-tiny")
    source = model.write(work / "source")
    packed = convert(source, work / "packed")
    contiguous = convert(source, work / "contiguous", "--mode", "contiguous")
    answers: dict[str, dict[str, model.Answer]] = {}
    for opt_in, group in routes(str(source), str(packed), str(contiguous)).items():
        command = [sys.executable, "-m", "tests.vllm.routes", str(work), json.dumps(group)]
        environment = {**os.environ, "CHORD_VLLM": opt_in, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
        subprocess.run(command, env=environment, check=True)
        answers |= {name: torch.load(work / f"{name}.pt") for name in group}
    return report(out, source, answers)


def report(out: Path, source: Path, answers: dict[str, dict[str, model.Answer]]) -> int:
    """Print and save each route's distance from FP32, and what is not as required."""
    rows, problems = {}, []
    for name, answer in answers.items():
        expected = model.reference(source, answer)
        gaps = torch.cat([(answer[key]["logprobs"] - expected[key]).abs().flatten() for key in expected])
        rows[name] = {"mean": float(gaps.mean()), "p99": float(gaps.quantile(0.99)), "max": float(gaps.max())}
        print(f"{name:24} mean {rows[name]['mean']:.5f}  p99 {rows[name]['p99']:.4f}  max {rows[name]['max']:.4f}")
    for kind in KINDS:
        first = answers[f"packed {kind}"]
        for name in [n for n in answers if n.endswith(kind) and not n.startswith("default")]:
            if rows[name]["mean"] > 1.2 * rows[f"default {kind}"]["mean"] + 1e-3:
                problems.append(f"{name} is farther from FP32 than the default backend")
            same = all(torch.equal(answers[name][key]["logprobs"], first[key]["logprobs"]) for key in first)
            if not same and not name.startswith("batched"):  # its weights and sum are the dispatcher's, in BF16
                problems.append(f"{name} differs from packed {kind}")
    (out / "tiny.json").write_text(json.dumps({"routes": rows, "problems": problems}, indent=1))
    print("\n".join(problems) or "all routes as required")
    return len(problems)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
