"""How Humming is called, held against a stand-in that multiplies with the weights it is told the shape of."""

from __future__ import annotations

import json
import sys
from enum import Enum
from types import ModuleType
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from chord_runtime.bench import humming, layer_peers
from chord_runtime.bench.cases import Case, Scenario, Stage
from chord_runtime.bench.contenders import Humming
from chord_runtime.bench.layer import LayerCase, LayerScenario, make_layer, make_problem
from chord_runtime.bench.problem import make_problem as make_one
from chord_runtime.bench.problem import make_weights
from chord_runtime.format.layout import Mode

SHAPES = {Stage.GATE_UP: (256, 128), Stage.DOWN: (128, 64)}


class GemmType(Enum):
    MASKED = "grouped_masked"
    CONTIGUOUS = "grouped_contiguous"
    INDEXED = "indexed"


class Layer:
    """Every routed row's result is its expert's number plus one, whatever the weights are."""

    made: ClassVar[list[Layer]] = []

    def __init__(self, **options: Any) -> None:
        self.options, self.calls = options, 0
        self.humming_config = self
        Layer.made.append(self)

    def to(self, device: object) -> Layer:
        return self

    def to_str(self) -> str:
        return f"{self.options['shape_n']}"

    def parameters(self) -> list[Tensor]:
        return []

    def transform(self) -> None:
        """Nothing to transform."""

    def __call__(
        self, *, inputs: Tensor, compute_config: str, tuning_config: str, top_k: int, **routing: Any
    ) -> Tensor:
        self.calls += 1
        out = torch.full((inputs.shape[0] * top_k, self.options["shape_n"]), float("nan"))
        kind, block = json.loads(compute_config)["gemm_type"], json.loads(tuning_config)["block_shape"][0]
        assert inputs.shape[1] == self.options["shape_k"]
        if kind != "indexed":
            return out
        used = int(routing["num_tokens_padded"])
        ids, experts = routing["sorted_ids"][:used], routing["expert_ids"].repeat_interleave(block)[:used]
        real = ids < out.shape[0]
        out[ids[real].long()] = (experts[real] + 1).float().unsqueeze(1)
        return out


@pytest.fixture(autouse=True)
def stand_in(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    prepared: list[str] = []

    class HummingKernel:
        @staticmethod
        def prepare_kernels(config: str, *, compute_config: str, tuning_config: str) -> None:
            prepared.append(f"{config} {json.loads(tuning_config)['rows']}")

    def process_input(
        inputs: Tensor, *, outputs: Tensor, activation_type: str, scatter_idx: Any = None, **_: Any
    ) -> None:
        assert activation_type == "binary_split"
        rows = slice(None) if scatter_idx is None else scatter_idx[scatter_idx >= 0].long()
        gate, up = inputs[rows].chunk(2, 1)
        outputs[rows] = torch.nn.functional.silu(gate) * up

    def heuristics(*, layer_config: Layer, shape_m: int, gemm_type: GemmType) -> dict[str, Any]:
        return {"block_shape": [8 if shape_m < 100 else 16, 1, 1], "rows": min(shape_m, 300)}

    contents: dict[str, dict[str, object]] = {
        "humming": {},
        "humming.layer": {"HummingLayer": Layer},
        "humming.testing": {"random_fill_tensor": lambda tensor: None},
        "humming.config": {"GemmType": GemmType},
        "humming.tune": {"get_heuristics_config": heuristics},
        "humming.kernel": {},
        "humming.kernel.humming": {"HummingKernel": HummingKernel},
        "humming.ops": {"process_input": process_input},
    }
    for name, values in contents.items():
        module = ModuleType(name)
        vars(module).update(values)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(layer_peers, "_multiprocessors", lambda: 132)
    monkeypatch.setattr(layer_peers.torch, "compile", lambda call, **_: call)
    Layer.made.clear()
    return prepared


@pytest.mark.parametrize("mode", list(Mode))
def test_one_layer_a_shape_and_the_kernel_of_the_rows(mode: Mode, stand_in: list[str]) -> None:
    points = (128, 256) if mode is Mode.CONTIGUOUS else (16, 48)
    scenario = Scenario("s", "s", mode, 16, SHAPES, points, "rows")
    cases = [Case(scenario, stage, point) for stage in SHAPES for point in points]
    peer = Humming()
    peer.compile_ahead(cases)
    assert [made.options["num_experts"] for made in Layer.made] == [16, 16]
    wanted = {f"{case.n} {min(case.routed, 300)}" for case in cases}
    assert sorted(stand_in) == sorted(wanted), "each once"
    for case in cases:
        problem = make_one(case, make_weights(case, "cpu"), "cpu")
        out = peer.call(problem)()
        assert isinstance(out, Tensor)
        if mode is Mode.INDEXED:
            assert problem.routing.topk_ids is not None
            assert torch.equal(out[:, 0], problem.routing.topk_ids.view(-1).float() + 1)
    assert [made.calls for made in Layer.made] == [2, 2]


@pytest.mark.parametrize("experts", [4, 16])
@pytest.mark.parametrize("tokens", [5, 70])
def test_a_whole_layer(experts: int, tokens: int, stand_in: list[str]) -> None:
    scenario = LayerScenario("ep8", "small", experts, 16, 256, 128)
    case = LayerCase(scenario, tokens)
    problem = make_problem(case, make_layer(scenario, "cpu"), "cpu")
    peer = layer_peers.Humming()
    peer.compile_ahead([case])
    assert len(stand_in) == 2
    found = peer.call(problem)()
    assert isinstance(found, Tensor)
    mine = problem.topk_ids < experts
    weights = torch.where(mine, problem.topk_weights * (problem.topk_ids + 1), 0).sum(1, keepdim=True)
    torch.testing.assert_close(found, weights.bfloat16().expand(tokens, 256), rtol=0.01, atol=0.01)


def test_version_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise humming.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(humming.metadata, "version", missing)
    assert humming.version() is None
