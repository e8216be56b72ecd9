"""Measure: for each case make the tensors, check Chord against the reference, then time all contenders in turns."""

from __future__ import annotations

import platform
from collections.abc import Callable, Sequence
from importlib import metadata

import torch

from chord_runtime.bench.cases import Case
from chord_runtime.bench.contenders import Contender
from chord_runtime.bench.problem import Problem, Weights, make_problem, make_weights
from chord_runtime.bench.results import OURS, Measurement
from chord_runtime.bench.timing import Timer, Timing
from chord_runtime.errors import ChordError
from chord_runtime.version import VERSION

Progress = Callable[[Case, Measurement], None]


def measure(
    cases: Sequence[Case], peers: Sequence[Contender], timer: Timer, device: str, budget_ms: float, progress: Progress
) -> dict[str, Measurement]:
    """Measure every case; cases that share a weight shape run together, so that one set of weights is held at a time.

    A contender that fails at a point is left out there and its reason kept; Chord failing its check is such a failure.
    """
    points = {}
    shapes = dict.fromkeys(_shape(case) for case in cases)
    for shape in shapes:
        weights: Weights | None = None
        for case in (case for case in cases if _shape(case) == shape):
            if weights is None:
                weights = make_weights(case, device)
            problem = make_problem(case, weights, device)
            points[case.key] = _measure_one(problem, peers, timer, budget_ms)
            progress(case, points[case.key])
        del weights
        if device == "cuda":
            torch.cuda.empty_cache()
    return points


def machine() -> dict[str, str]:
    """The device and the versions that decide the figures."""
    from chord_runtime.cuda.compile import nvrtc_version

    properties = torch.cuda.get_device_properties(0)
    return {
        "device": f"{properties.name} ({properties.multi_processor_count} SMs, {properties.total_memory / 1e9:.0f} GB)",
        "chord-moe": VERSION,
        "torch": torch.__version__,
        "NVRTC": nvrtc_version().split("+")[0],
        "humming-kernels": _version("humming-kernels"),
        "python": platform.python_version(),
    }


def _measure_one(problem: Problem, peers: Sequence[Contender], timer: Timer, budget_ms: float) -> Measurement:
    failures: dict[str, str] = {}
    calls: dict[str, Callable[[], object]] = {}
    error = None
    try:
        error = problem.check()
        calls[OURS] = problem.call
    except ChordError as failure:
        failures[OURS] = str(failure)
    for peer in peers:
        call, failure_text = _prepare(peer, problem)
        if call is None:
            failures[peer.name] = failure_text
        else:
            calls[peer.name] = call
    timings: dict[str, Timing] = timer.measure(calls, budget_ms) if calls else {}
    return Measurement(problem.routing.active, error, timings, failures)


def _prepare(peer: Contender, problem: Problem) -> tuple[Callable[[], object] | None, str]:
    """The peer's call, tried once; or None and why not: it may fail in any way, and the others are still measured."""
    try:
        peer.prepare(problem.case)
        call = peer.call(problem)
        call()
    except Exception as failure:
        return None, f"{type(failure).__name__}: {failure}"[:300]
    return call, ""


def _shape(case: Case) -> tuple[int, int, int]:
    return case.scenario.experts, case.n, case.k


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"
