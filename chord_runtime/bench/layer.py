"""``chord bench --layer``: a whole MoE layer, from the router's choice to the combined tokens, beside Humming's.

The layer is what a server calls: the choices are sorted, gate_up and SwiGLU, down, and the weighted sum over each
token's experts. Every contender is captured in a CUDA graph, as servers do at decode, so that what is compared is the
device's work and not Python; where one cannot be captured, all of that point run eagerly and the table says so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from chord_runtime import routing
from chord_runtime.bench.cases import TOP_K, matches
from chord_runtime.bench.files import load_json, write_json
from chord_runtime.bench.problem import MAX_ERROR, random_experts
from chord_runtime.bench.report import table
from chord_runtime.bench.results import OURS, Measurement, check_same, geometric_mean, measurement
from chord_runtime.bench.run import Needed, compile_kernels, measure_groups, reason, tried
from chord_runtime.bench.timing import Timer, Timing
from chord_runtime.errors import KernelError, UsageError
from chord_runtime.format.block import packed_bytes
from chord_runtime.format.layout import Mode, RowOrder
from chord_runtime.layer import PackedLayer, moe_layer
from chord_runtime.ops import reference
from chord_runtime.ops.route import capacity
from chord_runtime.ops.validate import RUN_ROWS

CONTIGUOUS = "chord contiguous"
TOKENS = tuple(2**power for power in range(15))  # 1 … 16384
FORMAT = "layer-1"


@dataclass(frozen=True)
class LayerScenario:
    """A rank's share of a Kimi K2 layer. Tokens are those of the whole batch: each chooses 8 of all experts."""

    name: str
    title: str
    experts: int
    """Experts on the rank."""
    total: int
    hidden: int
    intermediate: int
    """Of this rank."""


SCENARIOS = (
    LayerScenario("ep8", "Layer, EP8: 48 of 384 experts", 48, 384, 7168, 2048),
    LayerScenario("tp8", "Layer, TP8: an eighth of 384 experts", 384, 384, 7168, 256),
)


@dataclass(frozen=True)
class LayerCase:
    """One scenario at one number of tokens."""

    scenario: LayerScenario
    tokens: int

    @property
    def key(self) -> str:
        """Its name in files and filters: ``ep8/64``."""
        return f"{self.scenario.name}/{self.tokens}"

    @property
    def choices(self) -> int:
        """Experts chosen, on all ranks."""
        return self.tokens * min(TOP_K, self.scenario.total)

    @property
    def rows(self) -> float:
        """Rows that an expert has on average, as far as the host knows."""
        return self.choices / self.scenario.total


@dataclass(frozen=True)
class LayerProblem:
    """One case's tensors, the same for every contender."""

    case: LayerCase
    layer: PackedLayer
    x: Tensor
    """bfloat16 [tokens, hidden]."""
    topk_ids: Tensor
    """int32 [tokens, 8], global."""
    topk_weights: Tensor
    """float32 [tokens, 8]."""

    @property
    def expert_map(self) -> Tensor | None:
        """int32 [total] → local expert or −1; None where the rank holds all."""
        scenario = self.case.scenario
        return None if scenario.experts == scenario.total else self.layer.expert_map

    @property
    def counts(self) -> Tensor:
        """int64 [experts]: rows of each of the rank's experts."""
        local = self.layer.expert_map[self.topk_ids.long()].view(-1)
        return local[local >= 0].bincount(minlength=self.case.scenario.experts)


class LayerContender(Protocol):
    """A peer: named in reports; what it sets up for a scenario, it keeps for the next case."""

    name: str

    def compile_ahead(self, cases: Sequence[LayerCase]) -> None:
        """Compile what these cases need, at once rather than one by one. May fail: ``call`` then fails too."""

    def call(self, problem: LayerProblem) -> Callable[[], object]:
        """A function that does the layer once."""


def choose(patterns: Iterable[str] = (), *, quick: bool = False) -> list[LayerCase]:
    """The cases whose key matches one of the patterns (``ep8``, ``*/64``); all without. ``quick``: every fourth.

    Raises:
        UsageError: a pattern that matches nothing.
    """
    points = TOKENS[::4] if quick else TOKENS
    cases = [LayerCase(scenario, tokens) for scenario in SCENARIOS for tokens in points]
    patterns = list(patterns)
    for pattern in patterns:
        if not any(matches(case.key, pattern) for case in cases):
            raise UsageError(
                f"no layer point matches {pattern!r}; points are SCENARIO/TOKENS with SCENARIO ep8 or tp8 and TOKENS "
                f"{', '.join(map(str, points))}"
            )
    return [case for case in cases if not patterns or any(matches(case.key, pattern) for pattern in patterns)]


def make_layer(scenario: LayerScenario, device: str) -> PackedLayer:
    """Random experts: uniform codes, normal scales."""
    experts, hidden, intermediate = scenario.experts, scenario.hidden, scenario.intermediate
    w13 = random_experts(experts, 2 * intermediate, hidden, RowOrder.GATE_UP_8, device)
    w2 = random_experts(experts, hidden, intermediate, RowOrder.PLAIN, device)
    return PackedLayer(w13, w2, tuple(range(scenario.experts)), scenario.total)


def make_problem(case: LayerCase, layer: PackedLayer, device: str) -> LayerProblem:
    """Normal activations, the top-8 of normal scores with the token count as seed, weights that add up to 1."""
    scenario = case.scenario
    torch.manual_seed(case.tokens)
    scores = torch.randn((case.tokens, scenario.total), device=device)
    weights, ids = scores.softmax(-1).topk(min(TOP_K, scenario.total))
    x = torch.randn((case.tokens, scenario.hidden), device=device).bfloat16()
    return LayerProblem(case, layer, x, ids.int(), weights / weights.sum(-1, keepdim=True))


def check(problem: LayerProblem, modes: Sequence[Mode]) -> float:
    """Run Chord once in each mode and compare with the reference; returns the relative error.

    Raises:
        KernelError: a wrong value, or modes that differ in a bit.
    """
    arguments = problem.x, problem.layer, problem.topk_ids, problem.topk_weights
    found = [moe_layer(*arguments, mode=mode, out=torch.full_like(problem.x, float("nan"))) for mode in modes]
    wanted = _reference(problem).float()
    key = problem.case.key
    if not all(torch.equal(found[0], other) for other in found):
        raise KernelError(f"{key}: {' and '.join(mode.value for mode in modes)} differ")
    error = float((found[0].float() - wanted).norm() / wanted.norm().clamp(min=1e-30))
    # Three roundings to BF16, of the hidden row, the weighted row and the sum, may each fall the other way.
    if not error <= 3 * MAX_ERROR:
        raise KernelError(f"{key}: relative error {error:.2e} against the reference, over {3 * MAX_ERROR:.0e}")
    return error


def compile_ahead(cases: Sequence[LayerCase], peers: Sequence[LayerContender]) -> None:
    """Compile at once what these cases need on the current device; what fails here is told where it is called."""
    kernels = []
    for case in cases:
        scenario = case.scenario
        experts, hidden, intermediate = scenario.experts, scenario.hidden, scenario.intermediate
        padded = capacity(case.choices, experts, RUN_ROWS) // experts
        for mode, rows in ((Mode.INDEXED, case.rows), (Mode.CONTIGUOUS, padded)):
            kernels.append(Needed(mode, 2 * intermediate, hidden, experts, rows, "swiglu"))
            kernels.append(Needed(mode, hidden, intermediate, experts, rows, "plain"))
    compile_kernels(kernels)
    for peer in peers:
        with suppress(Exception):
            peer.compile_ahead(cases)


def measure(
    cases: Sequence[LayerCase],
    peers: Sequence[LayerContender],
    timer: Timer,
    device: str,
    budget_ms: float,
    progress: Callable[[LayerCase, Measurement], None],
) -> dict[str, Measurement]:
    """Measure every case; a contender that fails at a point is left out there and its reason kept."""
    return measure_groups(
        cases,
        lambda case: case.scenario,
        lambda case: make_layer(case.scenario, device),
        lambda case, layer: _measure_one(make_problem(case, layer, device), peers, timer, budget_ms),
        progress,
    )


def _measure_one(problem: LayerProblem, peers: Sequence[LayerContender], timer: Timer, budget_ms: float) -> Measurement:
    failures: dict[str, str] = {}
    calls: dict[str, Callable[[], object]] = {}
    timings: dict[str, Timing] = {}
    error = None
    try:
        error = check(problem, (Mode.INDEXED, Mode.CONTIGUOUS))
        calls = {OURS: _ours(problem, None), CONTIGUOUS: _ours(problem, Mode.CONTIGUOUS)}
    except Exception as failure:
        failures[OURS] = reason(failure)
    for peer in peers:
        calls |= tried(peer.name, partial(peer.call, problem), failures)
    try:
        captured = {name: _captured(call) for name, call in calls.items()} if problem.x.is_cuda else calls
    except Exception as failure:  # what cannot be captured is its author's affair; all are then timed the same way
        failures["CUDA graph"] = f"all eager here: {reason(failure)}"
        captured = calls
    try:
        timings = timer.measure(captured, budget_ms) if captured else {}
    except Exception as failure:  # for want of memory, for one
        failures["turns"] = reason(failure)
    return Measurement(int((problem.counts > 0).sum()), error, timings, failures)


def _ours(problem: LayerProblem, mode: Mode | None) -> Callable[[], object]:
    out = torch.empty_like(problem.x)
    arguments = problem.x, problem.layer, problem.topk_ids, problem.topk_weights
    return lambda: moe_layer(*arguments, mode=mode, out=out)


def _captured(call: Callable[[], object]) -> Callable[[], object]:
    """The call as a CUDA graph."""
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = call()

    def replay() -> object:
        graph.replay()
        return result

    return replay


def _reference(problem: LayerProblem) -> Tensor:
    """The layer by the reference operators, which round where the kernels do."""
    layer, top_k = problem.layer, problem.topk_ids.shape[1]
    block = routing.block_rows(problem.topk_ids.numel(), layer.num_experts)
    route = routing.indexed(problem.topk_ids, layer.w13.num_experts, block, layer.expert_map)
    buffers = route.sorted_ids, route.expert_ids, route.num_tokens_padded
    rows = problem.topk_ids.numel()
    hidden = problem.x.new_zeros((rows, layer.w2.k))
    down = problem.x.new_zeros((rows, layer.w2.n))
    weights = problem.topk_weights
    reference.indexed(
        problem.x, layer.w13.data, *buffers, top_k, block, None, hidden, layer.w13.n, layer.w13.interleaved, True
    )
    reference.indexed(hidden, layer.w2.data, *buffers, 1, block, weights, down, layer.w2.n, False, False)
    total = torch.zeros(problem.x.shape, dtype=torch.float32, device=problem.x.device)
    for choice in down.view(-1, top_k, layer.w2.n).unbind(1):
        total += choice
    return total.to(problem.x.dtype)


@dataclass(frozen=True)
class LayerResults:
    """A whole run."""

    machine: dict[str, str]
    method: dict[str, str]
    points: dict[str, Measurement]

    def merged(self, other: LayerResults) -> LayerResults:
        """The points of both, the other's where both have one; raises UsageError if they were measured differently."""
        check_same(self.machine | self.method, other.machine | other.method)
        return replace(other, points=self.points | other.points)

    def save(self, path: Path) -> None:
        """Write as JSON, whole or not at all; raises OutputError if it cannot be written."""
        write_json(path, {"format": FORMAT, **asdict(self)})

    @classmethod
    def load(cls, path: Path) -> LayerResults:
        """Read what ``save`` wrote; raises UsageError for anything else."""
        data = load_json(path, FORMAT)
        points = {key: measurement(point) for key, point in data["points"].items()}
        return cls(data["machine"], data["method"], points)

    def speedup(self, key: str) -> float | None:
        """Time of the fastest peer over Chord's; None where either is missing."""
        timings = self.points[key].timings
        peers = [timing.us for name, timing in timings.items() if name not in (OURS, CONTIGUOUS)]
        return min(peers) / timings[OURS].us if peers and OURS in timings else None


def report(results: LayerResults) -> str:
    """Machine, a table for each scenario, the summary, and what failed."""
    took = f"{sum(point.seconds for point in results.points.values()):.0f} s"
    facts = {**results.machine, **results.method, "points": f"{len(results.points)}, measured in {took}"}
    parts = ["\n".join(f"{name}: {value}" for name, value in facts.items())]
    for scenario in SCENARIOS:
        keys = [key for tokens in TOKENS if (key := LayerCase(scenario, tokens).key) in results.points]
        if keys:
            parts.append(f"### {scenario.title}\n\n{_table(results, scenario, keys)}")
    speedups = {key: found for key in results.points if (found := results.speedup(key))}
    if speedups:
        least = min(speedups, key=lambda key: speedups[key])
        mean = geometric_mean(speedups.values())
        parts.append(
            f"speed-up over the fastest peer: geometric mean {mean:.2f} × of {len(speedups)} points, least "
            f"{speedups[least]:.2f} × at {least}"
        )
    lines = [f"- {key}: {name}: {why}" for key, point in results.points.items() for name, why in point.failures.items()]
    return "\n\n".join([*parts, *(["### Failures\n\n" + "\n".join(lines)] if lines else [])])


def _table(results: LayerResults, scenario: LayerScenario, keys: list[str]) -> str:
    peers = list(dict.fromkeys(n for key in keys for n in results.points[key].timings if n not in (OURS, CONTIGUOUS)))
    expert_bytes = packed_bytes(2 * scenario.intermediate, scenario.hidden)
    expert_bytes += packed_bytes(scenario.hidden, scenario.intermediate)
    rows = []
    for key in keys:
        point = results.points[key]
        ours, contiguous = (point.timings.get(name) for name in (OURS, CONTIGUOUS))
        speedup = results.speedup(key)
        rows.append(
            [
                key.partition("/")[2],
                f"{ours.us:.1f}" if ours else "failed",
                f"{ours.low:.1f}–{ours.high:.1f}" if ours else "",
                f"{point.active * expert_bytes / ours.us / 1e6:.2f}" if ours else "",
                f"{contiguous.us:.1f}" if contiguous else "",
                *(f"{point.timings[name].us:.1f}" if name in point.timings else "" for name in peers),
                f"{speedup:.2f} ×" if speedup else "",
            ]
        )
    header = ["tokens", f"{OURS} µs", "20–80 %", "TB/s", f"{CONTIGUOUS} µs", *(f"{name} µs" for name in peers)]
    return table([*header, "speed-up"], rows)
