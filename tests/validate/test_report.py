"""Many problems: all found in one run, those alike collapsed, nothing that a file contains can spoil the lines."""

from __future__ import annotations

import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from chord_convert.report import Problem, name, show
from chord_convert.source import strict_json
from chord_convert.validate import collapse, validate
from chord_convert.validate_facts import without_nulls
from chord_runtime.errors import CheckpointError
from chord_runtime.resources import schema
from tests.checkpoints import quantization_block
from tests.source.memory import MemorySource
from tests.validate.editing import EXPERT, Editor


def problem(rule: str, found: str, key: str = "k", more: int = 0) -> Problem:
    return Problem(rule, "f", key, found, "s", "Do.", more)


def test_one_line() -> None:
    line = str(Problem("r", "config.json", "a.b", "3", "4", "Do this."))
    assert line == "config.json: a.b: found 3; supported: 4. Do this."
    assert str(Problem("r", "", "", "3", "4", "Do.", 7)) == "found 3; supported: 4. Do. (and 7 more like it)"


def test_problems_alike_are_collapsed() -> None:
    many = [problem("dtype", "F16", str(number)) for number in range(100)] + [
        problem("dtype", "F32"),
        problem("x", "y"),
    ]
    kept = collapse(many)
    assert [(p.rule, p.found, p.more) for p in kept] == [
        ("dtype", "F16", 0),
        ("dtype", "F16", 0),
        ("dtype", "F16", 97),
        ("dtype", "F32", 0),
        ("x", "y", 0),
    ]
    assert collapse([problem("x", "y")] * 5) == [problem("x", "y", more=4)]
    assert sum(1 + p.more for p in kept) == len(many)


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 40), st.integers(0, 5))))
def test_collapsing_loses_no_count(spec: list[tuple[str, int, int]]) -> None:
    kept = collapse(problem(rule, str(found), more=more) for rule, found, more in spec)
    assert sum(1 + p.more for p in kept) == sum(1 + more for _, _, more in spec)
    assert len(kept) <= 3 * 12 * 3


def test_every_problem_in_one_run(flat: Editor) -> None:
    flat.block(format="int-quantized", kv_cache_scheme={"num_bits": 8})
    flat.weights(group_size=128, symmetric=False)
    flat.group(targets=["MoE"])
    flat.config(hidden_act="gelu", top_k=5)

    def work(tensors: dict[str, torch.Tensor]) -> None:
        del tensors[f"{EXPERT}.weight_scale"]
        tensors["model.layers.2.mlp.experts.0.up_proj.weight_packed"] = torch.zeros(2, 2)

    flat.tensors(work)
    (flat.path / "model-00001-of-000004.safetensors").write_bytes(b"broken")
    report = flat.validate()
    assert [p.rule for p in report.problems] == [
        "header", "format", "group-size", "symmetric", "targets", "kv-cache", "activation", "missing-expert", "dtype",
        "shape",
    ]  # fmt: skip
    with pytest.raises(CheckpointError, match="flat cannot be converted") as caught:
        report.require()
    assert str(caught.value).count("\n") == len(report.problems)


def test_an_unreadable_shard_does_not_make_its_experts_missing(flat: Editor) -> None:
    (flat.path / "model-00002-of-000004.safetensors").write_bytes(b"broken")
    assert [p.rule for p in flat.validate().problems] == ["header"]


def test_thousands_of_problems_stay_short(flat: Editor) -> None:
    flat.rename(lambda n: n.replace(".weight_scale", ".weight_scale_2") if ".experts." in n else n)
    lines = [str(p) for p in flat.validate().problems]
    assert len(lines) <= 6
    assert any("(and 21 more like it)" in line for line in lines)


@pytest.mark.parametrize(
    "config",
    [
        {"num_hidden_layers": 10**9, "n_routed_experts": 10**9},
        {"num_hidden_layers": 9_000, "n_routed_experts": 10**12, "first_k_dense_replace": -(10**12)},
        {"num_hidden_layers": 10**400},
        {"hidden_size": 10**300, "moe_intermediate_size": 10**300},
    ],
    ids=["layers", "experts", "digits", "sizes"],
)
@pytest.mark.timeout(20)
def test_absurd_numbers_end_quickly(flat: Editor, config: dict[str, int]) -> None:
    flat.config(**config)
    lines = [str(p) for p in flat.validate().problems]
    assert lines
    assert max(map(len, lines)) < 1500


def test_names_cannot_break_lines(flat: Editor) -> None:
    evil = "model.layers.1.mlp.experts.0.up_proj.weight_packed\n::error::\x1b[31mowned"
    flat.tensors(lambda tensors: tensors.update({evil: torch.zeros(1)}))
    lines = [str(p) for p in flat.validate().problems]
    assert lines
    assert all(line.isprintable() for line in lines)
    assert name("a\nb") == '"a\\nb"'
    assert len(name("x" * 10_000)) <= 160
    assert len(show({"a": "x" * 10_000})) <= 80
    assert show({1, 2}) == "{1, 2}"


def test_the_schema_accepts_what_is_accepted_and_is_a_schema() -> None:
    document = schema("source-quantization")
    Draft202012Validator.check_schema(document)
    assert Draft202012Validator(document).is_valid(without_nulls(quantization_block()))
    for key in ("format", "config_groups", "quant_method", "quantization_status"):
        block = without_nulls(quantization_block())
        del block[key]
        assert not Draft202012Validator(document).is_valid(block)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)
KEYS = [
    "quantization_config", "text_config", "quantization", "hidden_size", "moe_intermediate_size", "n_routed_experts",
    "num_experts_per_tok", "num_hidden_layers", "first_k_dense_replace", "moe_layer_freq", "model_type", "hidden_act",
]  # fmt: skip
BLOCK_KEYS = ["quant_method", "format", "config_groups", "ignore", "kv_cache_scheme", "quantization_status", "version"]


@settings(max_examples=300, deadline=None)
@given(
    st.dictionaries(st.sampled_from(KEYS), json_values, max_size=4),
    st.dictionaries(st.sampled_from(BLOCK_KEYS), json_values, max_size=3),
    st.dictionaries(st.sampled_from(["targets", "weights", "format", "input_activations"]), json_values, max_size=2),
    st.dictionaries(st.sampled_from(["num_bits", "group_size", "actorder", "zp_dtype"]), json_values, max_size=2),
    st.sampled_from([None, "weight_map", "metadata"]),
    json_values,
)
def test_any_json_gives_lines_and_no_crash(
    config: dict[str, object],
    block: dict[str, object],
    group: dict[str, object],
    weights: dict[str, object],
    index_key: str | None,
    value: object,
) -> None:
    base = quantization_block()
    base["config_groups"]["group_0"]["weights"].update(weights)
    base["config_groups"]["group_0"].update(group)
    base.update(block)
    files = {"config.json": json.dumps({"quantization_config": base, **config}).encode(), "a.safetensors": b"broken"}
    if index_key is not None:
        files["model.safetensors.index.json"] = json.dumps({"weight_map": {}, index_key: value}).encode()
    report = validate(MemorySource(files), workers=1)
    assert report.checkpoint is None
    assert all(str(p).isprintable() for p in report.problems)


@given(st.binary(max_size=40))
def test_strict_json_raises_value_errors_only(raw: bytes) -> None:
    try:
        parsed = strict_json.parse(raw)
    except ValueError as error:
        assert str(error)
    else:
        assert json.loads(raw) == parsed
