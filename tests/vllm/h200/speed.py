"""Chord against vLLM's default backend on a slice of Kimi K2, in turns: speed.py OUT.

Both engines start at the same time, with empty caches and their files in the page cache, and stay up on one GPU; they
take turns at every point, the first to go last in the next turn, so that clocks and temperature are shared. The default
serves the INT4 checkpoint, Chord the directory that chord-convert made of it. OUT/speed.json is written after every
point. CHORD_WORK (default /tmp/chord-speed) keeps the slice, which is made once; this process itself never touches a
GPU.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any

import torch

from tests.vllm.h200 import engine
from tests.vllm.h200.engine import Engine, Prompts

PREFILL = ((1, 1024), (1, 2048), (1, 4096), (2, 4096), (4, 4096), (16, 2048))
"""(prompts, tokens of each)."""
DECODE = (1, 8, 32, 64, 128)
REPEATS = 7
SHORT, LONG = 8, 72
"""Tokens generated; a decode step is the difference divided by their distance."""
START_LIMIT_S = 400
PREFILL_GAIN, DECODE_GAIN, DECODE_GAIN_FROM, START_GAIN_S = 0.05, 0.04, 32, 20
"""What is asked of Chord: more tokens/s of prefill; of decode from a batch on, and never fewer; seconds at start."""

Results = dict[str, dict[str, float]]
"""Point → engine → seconds."""


def prompts(number: int, length: int) -> Prompts:
    """Random text."""
    generator = torch.Generator().manual_seed(number * length)
    return [{"prompt_token_ids": torch.randint(0, 250, (length,), generator=generator).tolist()} for _ in range(number)]


def measure(engines: list[Engine], results: Results, save: Callable[[], None]) -> None:
    """Put seconds of every point into ``results``: median of ``REPEATS``, engines in turns. ``save`` after each."""
    for number, length in PREFILL:
        asked = prompts(number, length)
        for one in engines:
            one.call(engine.generate, asked, 1)
        turns = in_turns(engines, lambda one, asked=asked: one.call(engine.generate, asked, 1))
        results[f"prefill {number}x{length}"] = {name: median(seconds) for name, seconds in turns.items()}
        save()
    for batch in DECODE:
        asked = prompts(batch, 32)
        for one in engines:
            one.call(engine.generate, asked, SHORT)
        turns = in_turns(engines, lambda one, asked=asked: _difference(one, asked))
        results[f"decode batch {batch}"] = {name: median(taken) / (LONG - SHORT) for name, taken in turns.items()}
        save()


def in_turns(engines: list[Engine], seconds: Callable[[Engine], float]) -> dict[str, list[float]]:
    """``REPEATS`` results of each engine."""
    results: dict[str, list[float]] = {one.name: [] for one in engines}
    for turn in range(REPEATS):
        for one in engines[:: -1 if turn % 2 else 1]:
            results[one.name].append(seconds(one))
    return results


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


def prepare(work: Path) -> tuple[Path, Path]:
    """The checkpoint and the packed directory, made on the GPU by a process that ends before an engine starts.

    Then all is read once: chord-convert writes past the page cache, and both are to start from there.
    """
    subprocess.run([sys.executable, "-m", "tests.vllm.h200.slice", str(work)], check=True)
    source, packed = work / "source", work / "packed"
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(_read, [*source.glob("*.safetensors"), *packed.glob("*.safetensors")]))
    return source, packed


def _read(path: Path) -> None:
    with path.open("rb", buffering=0) as file:
        while file.read(1 << 24):
            pass


def main(out: Path) -> int:
    """Start, measure, print and save; returns the number of requirements not met."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))  # what was measured is saved even so
    work = Path(os.environ.get("CHORD_WORK", "/tmp/chord-speed"))
    source, packed = prepare(work)
    for name in ("default", "chord"):
        shutil.rmtree(work / name, ignore_errors=True)  # homes of an earlier run
    report: dict[str, Any] = {"file_bytes": {"default": files(source), "chord": files(packed)}, "points": {}}

    def save() -> None:
        (out / "speed.json").write_text(json.dumps(report, indent=1))

    engines = [
        Engine("default", source, work / "default"),
        Engine("chord", packed, work / "chord", load_format="chord"),
    ]
    try:
        up = [one for one in engines if started(one, report)]
        save()
        report |= up[0].call(engine.versions) if up else {}
        report["read"] = re.findall(r"Chord read this rank's .*", engines[1].log.read_text())
        measure(up, report["points"], save)
        for one in up:
            report[one.name] |= {"peak_bytes": one.call(engine.peak), "repeatable": repeatable(one)}
    finally:
        save()
        logs = ["default/default.log", "chord/chord.log"]
        subprocess.run(["tar", "-C", work, "-czf", out / "speed-logs.tgz", *logs], check=False)
        for one in engines:
            one.stop()
    report["problems"] = problems(report)
    save()
    show(report)
    return len(report["problems"])


def started(one: Engine, report: dict[str, Any]) -> bool:
    """Whether it started, and how, in the report; one that did not leaves the other to be measured alone."""
    try:
        report[one.name] = one.result(START_LIMIT_S)
    except RuntimeError as error:
        report[one.name] = {"error": str(error)}
    print(one.name, *(f"{key}: {value}" for key, value in report[one.name].items()), flush=True)
    return "error" not in report[one.name]


def problems(report: dict[str, Any]) -> list[str]:
    """What is not as required."""
    found = [f"{name} did not start" for name in ("default", "chord") if "error" in report[name]]
    if found:
        return found
    for point, seconds in report["points"].items():
        kind, _, size = point.rpartition(" ")
        least = PREFILL_GAIN if kind == "prefill" else DECODE_GAIN if int(size) >= DECODE_GAIN_FROM else 0.0
        gain = seconds["default"] / seconds["chord"] - 1
        if gain < least:
            found.append(f"{point}: {gain:.1%} more tokens/s, {least:.0%} are required")
    sooner = report["default"]["start_s"] - report["chord"]["start_s"]
    if sooner < START_GAIN_S:
        found.append(f"start: {sooner:.1f} s sooner, {START_GAIN_S} s are required")
    if not report["chord"]["repeatable"]:
        found.append("decoding in CUDA graphs does not repeat its bits")
    return found


def tokens(point: str) -> int:
    """Tokens that a point computes: of its prompts, or one of each sequence."""
    size = point.rpartition(" ")[2].split("x")
    return int(size[0]) * int(size[-1]) if len(size) > 1 else int(size[0])


def show(report: dict[str, Any]) -> None:
    """Print the tables."""
    print(*(report.get(key) for key in ("gpu", "torch", "vllm")))
    for point, seconds in report["points"].items():
        each = (f"{name} {took * 1e3:9.3f} ms {tokens(point) / took:11,.0f} tok/s" for name, took in seconds.items())
        gain = f"{seconds['default'] / seconds['chord'] - 1:8.1%}" if len(seconds) == 2 else ""
        print(f"{point:18}", *each, gain)
    for name in ("default", "chord"):
        print(name, report[name], "bytes of files:", report["file_bytes"][name])
    print(*report["read"], *report["problems"], sep="\n")


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
