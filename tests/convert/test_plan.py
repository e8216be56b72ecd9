"""Planning: every expert once, sizes exact, files below the limit, what does not fit refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chord_convert.checkpoint import KINDS, PROJECTIONS, Checkpoint
from chord_convert.plan import ExpertsTask, Plan, make_plan
from chord_convert.source.base import Identity
from chord_convert.source.headers import TensorInfo
from chord_runtime.errors import UsageError
from chord_runtime.format.layout import MAX_FILE_BYTES, Placement, parse_experts_file
from chord_runtime.format.metadata import ShardMetadata
from tests.convert.helpers import options, plan_of

IDENTITY = Identity("owner/model", "0" * 40, "owner/model")


def checkpoint(layers: tuple[int, ...], experts: int, hidden: int, intermediate: int, extra: int = 0) -> Checkpoint:
    """A checkpoint of that geometry that exists on paper only, with ``extra`` bytes of other tensors."""
    tensors: dict[str, TensorInfo] = {}
    end = 0

    def add(name: str, dtype: str, shape: tuple[int, ...], size: int) -> None:
        nonlocal end
        tensors[name] = TensorInfo(name, "model.safetensors", dtype, shape, end, end + size)
        end += size

    for layer in layers:
        for expert in range(experts):
            for projection in PROJECTIONS:
                n, k = (hidden, intermediate) if projection == "down_proj" else (intermediate, hidden)
                name = f"model.layers.{layer}.mlp.experts.{expert}.{projection}"
                for kind, dtype, shape, size in zip(
                    KINDS, ("I32", "BF16", "I32"), ((n, k // 8), (n, k // 32), (2,)), (n * k // 2, n * k // 16, 8),
                    strict=True,
                ):  # fmt: skip
                    add(f"{name}.{kind}", dtype, shape, size)
    number = 0
    while extra > 0:
        add(f"model.other.{number}", "U8", (min(extra, 10**9),), min(extra, 10**9))
        extra, number = extra - 10**9, number + 1
    return Checkpoint("model.layers.", layers, experts, hidden, intermediate, 8, tensors, {}, ((),), ())


def held(plan: Plan) -> dict[tuple[int, int], list[int]]:
    """Experts by (layer, tp rank), from the metadata of every file."""
    found: dict[tuple[int, int], list[int]] = {}
    for output in plan.outputs:
        if output.layout.metadata is not None:
            shard = ShardMetadata.from_string(output.layout.metadata, output.name)
            assert parse_experts_file(output.name) == (shard.layer, shard.ep_rank, shard.tp_rank)
            found.setdefault((shard.layer, shard.tp_rank), []).extend(shard.experts)
    return found


@settings(max_examples=25, deadline=None)
@given(
    layers=st.lists(st.integers(0, 90), min_size=1, max_size=3, unique=True),
    share=st.integers(1, 6),
    ep=st.sampled_from([1, 2, 3, 8]),
    tp=st.sampled_from([1, 2, 4]),
    blocks=st.integers(1, 3),
    placement=st.sampled_from(list(Placement)),
)
def test_every_expert_is_planned_once(
    layers: list[int], share: int, ep: int, tp: int, blocks: int, placement: Placement
) -> None:
    source = checkpoint(tuple(layers), share * ep, 256, 64 * tp * blocks)
    plan = make_plan(source, IDENTITY, options(ep, tp, placement))
    assert held(plan).keys() == {(layer, rank) for layer in layers for rank in range(tp)}
    for experts in held(plan).values():
        assert sorted(experts) == list(range(share * ep))
    names = [tensor.name for output in plan.outputs for tensor in output.layout.tensors]
    assert len(names) == len(set(names)) == len(layers) * share * ep * 2 * tp
    assert len({output.name for output in plan.outputs}) == len(list(plan.outputs))


def test_files_stay_below_the_limit_at_full_size() -> None:
    source = checkpoint((1, 2), 384, 7168, 2048, extra=9 * 10**9)
    for ep, tp in ((1, 1), (8, 1), (1, 8), (2, 4)):
        plan = make_plan(source, IDENTITY, options(ep, tp))
        assert max(output.layout.size for output in plan.outputs) <= MAX_FILE_BYTES
        for experts in held(plan).values():
            assert sorted(experts) == list(range(384))
        for task in plan.tasks:
            assert sum(output.layout.size for output in task.outputs) <= MAX_FILE_BYTES


def test_eight_ranks_of_a_full_model_have_one_file_a_layer() -> None:
    plan = make_plan(checkpoint((1,), 384, 7168, 2048), IDENTITY, options(8))
    sizes = [output.layout.size for output in plan.outputs]
    assert len(sizes) == 8
    assert 48 * 24_772_608 < min(sizes) == max(sizes) < 48 * 24_772_608 + 2**17


def test_only_asked_ranks_are_planned() -> None:
    plan = make_plan(checkpoint((1,), 8, 256, 128), IDENTITY, options(4, ranks=(3, 1, 3)))
    assert plan.ranks == (1, 3)
    assert [parse_experts_file(output.name) for output in plan.outputs] == [(1, 1, 0), (1, 3, 0)]
    assert plan.read_bytes == 4 * sum(t.nbytes for t in checkpoint((1,), 1, 256, 128).tensors.values()) - 4 * 3 * 8


@pytest.mark.parametrize(
    ("ep", "tp", "ranks", "message"),
    [
        (3, 1, None, r"ep size 3 does not divide 8 experts; sizes that do: \[1, 2, 4, 8\]"),
        (1, 3, None, r"tp size 3 does not cut intermediate size 256"),
        (1, 8, None, r"sizes that do: \[1, 2, 4\]"),
        (4, 1, (2, 4), r"--ranks 4: with --ep 4 ranks are 0..3"),
    ],
)
def test_what_does_not_fit_is_refused(ep: int, tp: int, ranks: tuple[int, ...] | None, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        make_plan(checkpoint((1,), 8, 256, 256), IDENTITY, options(ep, tp, ranks=ranks))


def test_plan_prints_and_serializes(model: Path) -> None:
    plan = plan_of(model, options(2, ranks=(1,)))
    text = "\n".join(plan.lines())
    assert "2 layers × 8 experts" in text
    assert "ranks     1 of 2" in text
    data = plan.to_json()
    assert data["write_bytes"] == sum(data["files"].values()) == plan.write_bytes
    assert sum(isinstance(task, ExpertsTask) for task in plan.tasks) == 2
