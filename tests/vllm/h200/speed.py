"""Chord against vLLM's default backend on a slice of Kimi K2, in turns: speed.py OUT.

Both engines start at the same time, with empty caches, and stay up on one GPU; they take turns at every point, so that
clocks and temperature are shared. The default serves the INT4 checkpoint, Chord the directory that chord-convert made
of it.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from statistics import median
from typing import Any

import torch

from tests.vllm.h200 import engine
from tests.vllm.h200 import slice as kimi
from tests.vllm.h200.engine import Engine, Prompts

PREFILL = ((1, 1024), (1, 2048), (1, 4096), (2, 4096), (4, 4096), (16, 2048))
"""(prompts, tokens of each)."""
DECODE = (1, 8, 32, 64, 128)
REPEATS = 5
SHORT, LONG = 8, 72
"""Tokens generated; a decode step is the difference divided by their distance."""
START_LIMIT_S = 300


def prompts(number: int, length: int) -> Prompts:
    """Random text."""
    generator = torch.Generator().manual_seed(number * length)
    return [{"prompt_token_ids": torch.randint(0, 250, (length,), generator=generator).tolist()} for _ in range(number)]


def measure(engines: list[Engine], results: dict[str, dict[str, float]]) -> None:
    """Put seconds of every point into ``results``: median of ``REPEATS``, engines in turns."""
    for number, length in PREFILL:
        asked = prompts(number, length)
        for one in engines:
            one.call(engine.generate, asked, 1)
        turns = [{one.name: one.call(engine.generate, asked, 1) for one in engines} for _ in range(REPEATS)]
        results[f"prefill {number}x{length}"] = {one.name: median(turn[one.name] for turn in turns) for one in engines}
    for batch in DECODE:
        asked = prompts(batch, 32)
        for one in engines:
            one.call(engine.generate, asked, SHORT)
        turns = [{one.name: _difference(one, asked) for one in engines} for _ in range(REPEATS)]
        step = {one.name: median(turn[one.name] for turn in turns) / (LONG - SHORT) for one in engines}
        results[f"decode batch {batch}"] = step


def _difference(one: Engine, asked: Prompts) -> float:
    longer: float = one.call(engine.generate, asked, LONG)
    return longer - one.call(engine.generate, asked, SHORT)  # type: ignore[no-any-return]


def repeatable(one: Engine) -> bool:
    """Whether decoding in CUDA graphs gives the same tokens and the same log-probabilities twice, bit for bit."""
    asked = prompts(32, 64)
    first, second = (one.call(engine.answers, asked, 32, 5) for _ in range(2))
    return bool(first == second)


def files(directory: Path) -> int:
    """Bytes of a model's tensors."""
    return sum(file.stat().st_size for file in directory.glob("*.safetensors"))


def main(out: Path) -> None:
    """Start, measure, print and save."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))  # what was measured is saved even so
    work = Path(os.environ.get("CHORD_WORK", "/tmp/chord-speed"))
    source, packed = kimi.prepare(work)
    report: dict[str, Any] = {
        "gpu": torch.cuda.get_device_name(),
        "file_bytes": {"default": files(source), "chord": files(packed)},
    }
    engines = [
        Engine("default", source, work / "default"),
        Engine("chord", packed, work / "chord", load_format="chord"),
    ]
    try:
        for one in engines:
            report[one.name] = one.result(START_LIMIT_S)
            print(one.name, report[one.name], flush=True)
        report["points"] = {}
        measure(engines, report["points"])
        for one in engines:
            report[one.name] |= {"peak_bytes": one.call(engine.peak), "repeatable": repeatable(one)}
        report["read"] = re.findall(r"Chord read this rank's .*", engines[1].log.read_text())
    finally:
        (out / "speed.json").write_text(json.dumps(report, indent=1))  # what there is, if it was interrupted
        logs = ["default/default.log", "chord/chord.log"]
        subprocess.run(["tar", "-C", work, "-czf", out / "speed-logs.tgz", *logs], check=False)
        for one in engines:
            one.stop()
    show(report)


def show(report: dict[str, Any]) -> None:
    """Print the tables."""
    print(f"{'point':20} {'default':>12} {'chord':>12} {'faster by':>10}")
    for point, seconds in report["points"].items():
        gain = seconds["default"] / seconds["chord"] - 1
        print(f"{point:20} {seconds['default'] * 1e3:9.3f} ms {seconds['chord'] * 1e3:9.3f} ms {gain:9.1%}")
    for name in ("default", "chord"):
        print(name, report[name], "bytes of files:", report["file_bytes"][name])
    print(*report["read"], sep="\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
