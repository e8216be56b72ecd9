"""Chord against vLLM's default backend on a slice of Kimi K2, in turns: speed.py OUT [moe layers=4] [experts=48].

Both engines stay up on one GPU, each in its own process, and take turns at every point, so that clocks and temperature
are shared. The default serves the INT4 checkpoint, Chord the directory that chord-convert made of it.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch

from tests.vllm.h200 import slice as kimi

PREFILL = ((1, 1024), (1, 4096), (2, 4096), (4, 4096), (16, 2048))
"""(prompts, tokens of each)."""
DECODE = (1, 8, 32, 64, 128)
REPEATS = 5
SHORT, LONG = 8, 72
"""Tokens generated; a decode step is the difference divided by their distance."""


def start(name: str, model: Path, **options: Any) -> tuple[Any, dict[str, Any]]:
    """Start an engine; returns it and what its start cost."""
    from vllm import LLM

    began = time.perf_counter()
    llm = LLM(
        str(model),
        dtype="bfloat16",
        max_model_len=8192,
        max_num_seqs=128,
        max_num_batched_tokens=16384,
        enable_prefix_caching=False,
        gpu_memory_utilization=0.42,
        disable_log_stats=True,
        **options,
    )
    seconds = time.perf_counter() - began
    peak, reserved = llm.collective_rpc(_memory)[0]
    print(f"{name}: started in {seconds:.1f} s, peak memory {peak / 1e9:.2f} GB, reserved {reserved / 1e9:.2f} GB")
    return llm, {"start_s": seconds, "peak_bytes": peak, "reserved_bytes": reserved}


def _memory(worker: Any) -> tuple[int, int]:
    return torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()


def prompts(number: int, length: int) -> list[dict[str, list[int]]]:
    """Random text."""
    generator = torch.Generator().manual_seed(number * length)
    return [{"prompt_token_ids": torch.randint(0, 250, (length,), generator=generator).tolist()} for _ in range(number)]


def generate(llm: Any, asked: list[dict[str, list[int]]], tokens: int, **sampling: Any) -> tuple[float, Any]:
    """Seconds, and the answers."""
    from vllm import SamplingParams

    parameters = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False, **sampling)
    began = time.perf_counter()
    answers = llm.generate(asked, parameters, use_tqdm=False)
    return time.perf_counter() - began, answers


def measure(engines: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Seconds of every point, median of ``REPEATS``, engines in turns."""
    results: dict[str, dict[str, float]] = {}
    for number, length in PREFILL:
        asked = prompts(number, length)
        for llm in engines.values():
            generate(llm, asked, 1)
        turns = [{name: generate(llm, asked, 1)[0] for name, llm in engines.items()} for _ in range(REPEATS)]
        results[f"prefill {number}x{length}"] = {name: median(turn[name] for turn in turns) for name in engines}
    for batch in DECODE:
        asked = prompts(batch, 32)
        for llm in engines.values():
            generate(llm, asked, SHORT)
        turns = [
            {name: generate(llm, asked, LONG)[0] - generate(llm, asked, SHORT)[0] for name, llm in engines.items()}
            for _ in range(REPEATS)
        ]
        step = {name: median(turn[name] for turn in turns) / (LONG - SHORT) for name in engines}
        results[f"decode batch {batch}"] = step
    return results


def repeatable(llm: Any) -> bool:
    """Whether decoding in CUDA graphs gives the same tokens and the same log-probabilities twice, bit for bit."""
    asked = prompts(32, 64)
    first, second = (
        [
            [(token, [(key, value.logprob) for key, value in step.items()])
             for token, step in zip(answer.outputs[0].token_ids, answer.outputs[0].logprobs, strict=True)]
            for answer in generate(llm, asked, 32, logprobs=5)[1]
        ]
        for _ in range(2)
    )  # fmt: skip
    return first == second


def main(out: Path, moe_layers: int, experts: int) -> None:
    """Write, convert, start, measure, print and save."""
    work = Path(os.environ.get("CHORD_WORK", "/tmp/chord-speed"))
    source = kimi.write(work / "source", moe_layers, experts)
    began = time.perf_counter()
    packed = kimi.convert(source, work / "packed")
    report: dict[str, Any] = {
        "gpu": torch.cuda.get_device_name(),
        "moe_layers": moe_layers,
        "experts": experts,
        "convert_s": time.perf_counter() - began,
    }
    engines = {}
    for name, model, options in (("default", source, {}), ("chord", packed, {"load_format": "chord"})):
        engines[name], report[name] = start(name, model, **options)
    report["points"] = measure(engines)
    report["repeatable"] = {name: repeatable(llm) for name, llm in engines.items()}
    print(f"{'point':20} {'default':>12} {'chord':>12} {'faster by':>10}")
    for point, seconds in report["points"].items():
        gain = seconds["default"] / seconds["chord"] - 1
        print(f"{point:20} {seconds['default'] * 1e3:9.3f} ms {seconds['chord'] * 1e3:9.3f} ms {gain:9.1%}")
    print("decode repeated bit for bit:", report["repeatable"])
    (out / "speed.json").write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main(Path(sys.argv[1]), *(int(value) for value in (*sys.argv[2:], "4", "48")[:2]))
