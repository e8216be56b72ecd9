"""What must be accepted, and what is only worth a warning."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from chord_convert.checkpoint import KINDS, PROJECTIONS, parse_expert
from tests.checkpoints import write_checkpoint
from tests.validate.editing import EXPERT, INDEX, Editor

SMALL: dict[str, Any] = {"experts": 4, "hidden": 128, "intermediate": 64}


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"nested": True},
        {"shards": 1},
        {"shards": 7, "nested": True},
        {"shape_dtype": torch.int64},
        {"prefix": "language_model.model.layers."},
        {"prefix": "layers."},
        {"experts": 3},
        {"experts": 9, "top_k": 9},
        {"full_range": True},
        {"layers": 2},
        {"hidden": 384, "intermediate": 192},
    ],
    ids=str,
)
def test_genuine_checkpoints(tmp_path: Path, options: dict[str, Any]) -> None:
    options = {**SMALL, **options}
    report = Editor(write_checkpoint(tmp_path / "model", **options)).validate(scales=True)
    assert report.problems == []
    assert report.warnings == []
    found = report.require()
    assert (found.num_experts, found.hidden, found.intermediate) == (
        options["experts"],
        options["hidden"],
        options["intermediate"],
    )
    assert found.layers == tuple(range(1, options.get("layers", 3)))
    assert found.top_k == options.get("top_k", 2)
    nested = options.get("nested", False)
    assert found.prefix == options.get("prefix", "language_model.model.layers." if nested else "model.layers.")
    assert found.block_paths == ((("text_config",) if nested else ()) + ("quantization_config",),)


def test_what_the_checkpoint_tells(flat: Editor) -> None:
    found = flat.validate().require()
    for layer in found.layers:
        for expert in range(found.num_experts):
            for projection in PROJECTIONS:
                n, k = found.shape(projection)
                assert found.expert(layer, expert, projection).shape == (n, k // 8)
                assert found.expert(layer, expert, projection, "weight_scale").shape == (n, k // 32)
    routed = len(found.layers) * found.num_experts * len(PROJECTIONS) * len(KINDS)
    assert len(found.other_tensors) == len(found.tensors) - routed
    assert not any(".mlp.experts." in name for name in found.other_tensors)
    places = [(found.tensors[name].file, found.tensors[name].start) for name in found.other_tensors]
    assert places == sorted(places)
    assert set(found.side_files) == {
        "LICENSE",
        "README.md",
        "THIRD_PARTY_NOTICES.md",
        "chat_template.jinja",
        "configuration_deepseek.py",
        "generation_config.json",
        "modeling_deepseek.py",
        "tokenization_kimi.py",
        "tokenizer.json",
        "tokenizer_config.json",
    }


def test_layers_that_the_config_leaves_to_its_defaults(flat: Editor) -> None:
    flat.config(moe_layer_freq=None)
    assert flat.validate().require().layers == (1, 2)
    flat.config(moe_layer_freq=2, first_k_dense_replace=...)
    assert [problem.rule for problem in flat.validate().problems] == ["surplus-layer", "missing-expert"]


def test_a_single_file_needs_no_index(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path / "model", shards=1, **SMALL)
    (path / INDEX).unlink()
    (path / "model-00001-of-000001.safetensors").rename(path / "model.safetensors")
    assert Editor(path).validate().problems == []


def test_missing_keys_mean_null(flat: Editor) -> None:
    """Newer compressed-tensors leave null keys out; some write new ones that do not matter."""
    flat.block(kv_cache_scheme=..., global_compression_ratio=1.5, version="0.20.1", sparsity_config={})
    flat.group(input_activations=..., output_activations=..., format="pack-quantized")
    flat.weights(actorder=..., block_structure=..., observer=..., observer_kwargs=..., dynamic=...)
    assert flat.validate().problems == []


@pytest.mark.parametrize("actorder", [None, False, "weight", "static"])
def test_activation_orders_that_leave_columns_in_place(flat: Editor, actorder: Any) -> None:
    flat.weights(actorder=actorder, scale_dtype=None, zp_dtype="torch.int8")
    assert flat.validate().problems == []


def test_the_longer_ignore_list(flat: Editor) -> None:
    flat.json(
        "config.json",
        lambda c: c["quantization_config"]["ignore"].extend(["re:vision_tower.*", "re:mm_projector.*", "any.name"]),
    )
    assert flat.validate().problems == []


def test_ignore_patterns_are_anchored(flat: Editor) -> None:
    """``re:`` entries match from the beginning, as re.match does: this one names no expert."""
    flat.json("config.json", lambda c: c["quantization_config"]["ignore"].append("re:mlp.experts"))
    assert flat.validate().problems == []


def test_the_same_block_twice(nested: Editor) -> None:
    def work(config: dict[str, Any]) -> None:
        block = dict(config["text_config"]["quantization_config"])
        del block["kv_cache_scheme"]  # null there
        config["quantization_config"] = block

    nested.json("config.json", work)
    found = nested.validate().require()
    assert set(found.block_paths) == {("quantization_config",), ("text_config", "quantization_config")}


def test_the_blocks_older_name(flat: Editor) -> None:
    flat.json("config.json", lambda config: config.update(compression_config=config.pop("quantization_config")))
    assert flat.validate().require().block_paths == (("compression_config",),)


def test_other_files_do_not_disturb(flat: Editor) -> None:
    (flat.path / "sub").mkdir()
    (flat.path / "sub" / "eagle.safetensors").write_bytes(b"not looked at")
    (flat.path / "imatrix.gguf").write_bytes(b"")
    (flat.path / "training.bin").write_bytes(b"")
    assert flat.validate().problems == []


def test_warnings(flat: Editor) -> None:
    flat.json(INDEX, lambda index: index["metadata"].update(total_size=5))
    flat.tensors(lambda tensors: tensors.pop("lm_head.weight"))
    flat.json(INDEX, lambda index: index["metadata"].update(total_size=5))
    report = flat.validate()
    assert report.problems == []
    assert [(warning.rule, warning.key) for warning in report.warnings] == [
        ("total-size", "metadata.total_size"),
        ("incomplete-model", "lm_head.weight"),
    ]
    flat.config(tie_word_embeddings=True)
    assert [warning.rule for warning in flat.validate().warnings] == ["total-size"]


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (float("nan"), "is nan"),
        (float("inf"), "is inf"),
        (2.0**27, "is 134217728"),
        (2.0**-95, "is 2.52"),
        (-(2.0**30), "is -1073741824"),
    ],
)
def test_scales_are_read_on_demand(flat: Editor, value: float, said: str) -> None:
    def work(tensors: dict[str, torch.Tensor]) -> None:
        tensors[f"{EXPERT}.weight_scale"][3, 1] = value

    flat.tensors(work)
    assert flat.validate().problems == []
    (problem,) = flat.validate(scales=True).problems
    assert (problem.rule, problem.key) == ("scale-value", f"{EXPERT}.weight_scale")
    assert problem.file == "model-00002-of-000004.safetensors"
    assert "[3, 1]" in problem.found
    assert said in problem.found
    assert "2^-94" in problem.supported


@pytest.mark.parametrize("value", [0.0, 2.0**-94, 2.0**26, -0.5])
def test_scales_in_range(flat: Editor, value: float) -> None:
    flat.tensors(lambda tensors: tensors[f"{EXPERT}.weight_scale"].fill_(value))
    assert flat.validate(scales=True).problems == []


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_recorded_shapes_are_read_with_the_scales(flat: Editor, dtype: torch.dtype) -> None:
    flat.tensors(lambda tensors: tensors.update({f"{EXPERT}.weight_shape": torch.tensor([64, 127], dtype=dtype)}))
    assert flat.validate().problems == []
    (problem,) = flat.validate(scales=True).problems
    assert (problem.rule, problem.key, problem.found) == ("recorded-shape", f"{EXPERT}.weight_shape", "[64, 127]")


@pytest.mark.parametrize(
    ("name", "parsed"),
    [
        ("model.layers.1.mlp.experts.2.up_proj.weight_packed", ("model.layers.", 1, 2, "up_proj", "weight_packed")),
        ("layers.0.mlp.experts.0.down_proj.weight", ("layers.", 0, 0, "down_proj", "weight")),
        ("a.layers.3.b.layers.60.mlp.experts.383.x.y.z", ("a.layers.3.b.layers.", 60, 383, "x", "y.z")),
        ("model.layers.01.mlp.experts.2.up_proj.weight_packed", None),
        ("model.layers.1.mlp.experts.2.up_proj", None),
        ("model.layers.1.mlp.shared_experts.up_proj.weight", None),
        ("model.layers.1.mlp.experts.9999999.up_proj.weight", None),
        ("model.layers.\u0661.mlp.experts.2.up_proj.weight", None),
    ],
)
def test_names(name: str, parsed: tuple[object, ...] | None) -> None:
    assert parse_expert(name) == parsed
