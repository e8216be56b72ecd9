"""Measure: make each case's tensors, check Chord against the reference, time it alone, then all contenders in turns."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol, TypeVar

import torch

from chord_runtime.bench import humming
from chord_runtime.bench.cases import Case, Stage
from chord_runtime.bench.contenders import Contender
from chord_runtime.bench.problem import Problem, make_problem, make_weights
from chord_runtime.bench.results import OURS, Measurement
from chord_runtime.bench.timing import Timer, Timing
from chord_runtime.errors import ChordError
from chord_runtime.format.layout import Mode
from chord_runtime.version import VERSION

Progress = Callable[[Case, Measurement], None]


@dataclass(frozen=True)
class Needed:
    """One of Chord's kernels, by what selection asks."""

    mode: Mode
    n: int
    k: int
    experts: int
    rows: float
    """Of an expert, on average."""
    output: str
    """``plain``, ``gate_up`` or ``swiglu``."""


def compile_kernels(needed: Iterable[Needed]) -> None:
    """Compile at once, in parallel, for the current device: one by one this is most of a short run's time."""
    from chord_runtime.cuda import select
    from chord_runtime.cuda.compile import arch_of
    from chord_runtime.cuda.warmup import warm_up

    arch, sms = arch_of(torch.cuda.get_device_capability()), torch.cuda.get_device_properties().multi_processor_count
    outputs = {"plain": select.PLAIN, "gate_up": select.GATE_UP, "swiglu": select.SWIGLU}
    work = {}
    for kernel in dict.fromkeys(needed):
        mode = kernel.mode.value
        tile = select.choose(mode, kernel.n, kernel.k, kernel.experts, kernel.rows, arch, sms)
        name, defines = select.instantiation(mode, tile, outputs[kernel.output], arch)
        work[name, tuple(sorted(defines.items()))] = name, defines, arch
    for _ in warm_up(work.values()):
        pass  # each tells its own failure when it is called


def compile_ahead(cases: Sequence[Case], contenders: Sequence[Contender]) -> None:
    """Compile what these cases need; what fails here is told where it is called."""
    outputs = {Stage.GATE_UP: "gate_up", Stage.DOWN: "plain"}
    compile_kernels(
        Needed(case.scenario.mode, case.n, case.k, case.scenario.experts, case.rows, outputs[case.stage])
        for case in cases
    )
    for contender in contenders:
        with suppress(Exception):
            contender.compile_ahead([case for case in cases if contender.takes(case)])


def measure(
    cases: Sequence[Case],
    contenders: Sequence[Contender],
    timer: Timer,
    device: str,
    budget_ms: float,
    progress: Progress,
) -> dict[str, Measurement]:
    """Measure every case; cases that share a weight shape run together.

    A contender that fails at a point is left out there and its reason kept; Chord failing its check is such a failure.
    """
    return measure_groups(
        cases,
        _shape,
        lambda case: make_weights(case, device),
        lambda case, weights: _measure_one(make_problem(case, weights, device), contenders, timer, budget_ms),
        progress,
    )


class Keyed(Protocol):
    """A point to measure."""

    @property
    def key(self) -> str:
        """Its name in results."""


AnyCase = TypeVar("AnyCase", bound=Keyed)
Shared = TypeVar("Shared")


def measure_groups(
    cases: Sequence[AnyCase],
    group: Callable[[AnyCase], object],
    make: Callable[[AnyCase], Shared],
    measure_one: Callable[[AnyCase, Shared], Measurement],
    progress: Callable[[AnyCase, Measurement], None],
) -> dict[str, Measurement]:
    """Measure every case; those of one group share what ``make`` makes, of which one is held at a time.

    What cannot be made or measured is a failure of that point. ``progress`` is called after each.
    """
    points = {}
    for each in dict.fromkeys(map(group, cases)):
        shared: Shared | None = None
        for case in (case for case in cases if group(case) == each):
            torch.cuda.empty_cache()  # of what the point before used
            started = time.perf_counter()
            try:
                shared = shared or make(case)
                point = measure_one(case, shared)
            except Exception as failure:  # its tensors do not fit, for one
                point = _not_made(failure)
            points[case.key] = replace(point, seconds=time.perf_counter() - started)
            progress(case, points[case.key])
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
        "humming-kernels": humming.version() or "not installed",
        "python": platform.python_version(),
    }


def _measure_one(problem: Problem, contenders: Sequence[Contender], timer: Timer, budget_ms: float) -> Measurement:
    failures: dict[str, str] = {}
    calls: dict[str, Callable[[], object]] = {}
    timings: dict[str, Timing] = {}
    error = alone_us = None
    try:
        error = problem.check()
        alone_us = timer.alone(problem.call)
        calls[OURS] = problem.call
    except Exception as failure:
        failures[OURS] = reason(failure)
    for contender in contenders:
        if contender.takes(problem.case):
            calls |= tried(contender.name, partial(contender.call, problem), failures)
    try:
        timings = timer.measure(calls, budget_ms) if calls else {}
    except Exception as failure:  # for want of memory, for one
        failures["turns"] = reason(failure)
    return Measurement(problem.routing.active, error, timings, failures, alone_us)


def tried(
    name: str, make: Callable[[], Callable[[], object]], failures: dict[str, str]
) -> dict[str, Callable[[], object]]:
    """A contender's call by its name, tried once; nothing if it fails, in whatever way, and why in ``failures``."""
    try:
        call = make()
        call()
    except Exception as failure:
        failures[name] = reason(failure)
        return {}
    return {name: call}


def _not_made(failure: Exception) -> Measurement:
    """A point of which nothing could be measured."""
    return Measurement(0, None, {}, {OURS: reason(failure)})


def reason(failure: Exception) -> str:
    """What a failure is told as."""
    return (str(failure) if isinstance(failure, ChordError) else f"{type(failure).__name__}: {failure}")[:300]


def _shape(case: Case) -> tuple[int, int, int]:
    return case.scenario.experts, case.n, case.k
