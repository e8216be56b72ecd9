"""What a conversion writes, held against its source, the schemas and the libraries that will read it."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from chord_convert.against import compare
from chord_runtime.errors import ScaleError
from chord_runtime.format.layout import INDEX, MANIFEST, Mode, Placement, Projection
from chord_runtime.format.metadata import Manifest
from chord_runtime.format.packing import deinterleave, dequantize
from chord_runtime.packed_dir import PackedDir
from chord_runtime.resources import schema
from chord_runtime.verify import verify
from tests.checkpoints import dequantize as original
from tests.checkpoints import write_checkpoint
from tests.convert.helpers import options, run, snapshot


@pytest.mark.parametrize(
    ("ep", "tp", "placement"),
    [
        (1, 1, Placement.LINEAR),
        (4, 1, Placement.LINEAR),
        (4, 1, Placement.ROUND_ROBIN),
        (1, 4, Placement.LINEAR),
        (3, 2, Placement.ROUND_ROBIN),
    ],
)
def test_unpacking_gives_back_the_source(
    nested_model: Path, tmp_path: Path, ep: int, tp: int, placement: Placement
) -> None:
    run(nested_model, tmp_path / "out", options(ep, tp, placement))
    assert verify(tmp_path / "out").findings == ()
    result = compare(tmp_path / "out", str(nested_model))
    assert result.findings == ()
    assert result.tensors == 2 * 12 * 2 * tp + len(load_shared(tmp_path / "out"))


def load_shared(directory: Path) -> dict[str, torch.Tensor]:
    return {k: v for name in PackedDir(directory).shared_files() for k, v in load_file(directory / name).items()}


def test_weights_equal_those_of_compressed_tensors(packed: Path, model: Path) -> None:
    """By way of the index and the safetensors library alone, as any reader would."""
    weight_map = json.loads((packed / INDEX).read_text())["weight_map"]
    shapes = {Projection.W13: (256, 256), Projection.W2: (256, 128)}
    source = {k: v for file in model.glob("*.safetensors") for k, v in load_file(file).items()}
    for expert in (0, 7):
        name = f"model.layers.2.mlp.experts.{expert}"
        rows = {}
        for projection, (n, k) in shapes.items():
            key = f"{name}.{projection.value}.weight_packed"
            with safe_open(packed / weight_map[key], "pt") as file:
                rows[projection] = dequantize(file.get_tensor(key), n, k)
        gate, up = deinterleave(rows[Projection.W13])
        for module, found in (("gate_proj", gate), ("up_proj", up), ("down_proj", rows[Projection.W2])):
            kinds = ("weight_packed", "weight_scale", "weight_shape")
            assert torch.equal(found, original({kind: source[f"{name}.{module}.{kind}"] for kind in kinds}))


def test_other_tensors_are_the_same(packed: Path, model: Path) -> None:
    source = {k: v for file in model.glob("*.safetensors") for k, v in load_file(file).items() if ".experts." not in k}
    shared = load_shared(packed)
    assert shared.keys() == source.keys()
    assert all(torch.equal(shared[k], v) and shared[k].dtype == v.dtype for k, v in source.items())
    assert shared["model.layers.1.mlp.gate.e_score_correction_bias"].dtype == torch.float32


def test_index_names_every_tensor_of_every_file(packed: Path) -> None:
    index = json.loads((packed / INDEX).read_text())
    found = {}
    for file in packed.glob("*.safetensors"):
        with safe_open(file, "pt") as opened:
            found.update(dict.fromkeys(opened.keys(), file.name))
            assert opened.metadata()["format"] == "pt"
    assert index["weight_map"] == found
    sizes = [t.nbytes for file in packed.glob("*.safetensors") for t in load_file(file).values()]
    assert index["metadata"]["total_size"] == sum(sizes)


def test_data_begin_at_whole_pages(packed: Path) -> None:
    for file in packed.glob("*.safetensors"):
        assert (8 + int.from_bytes(file.read_bytes()[:8], "little")) % 4096 == 0


@pytest.mark.parametrize("nested", [False, True])
def test_config_carries_one_block_where_the_source_had_it(tmp_path: Path, nested: bool) -> None:
    model = write_checkpoint(tmp_path / "model", nested=nested)
    before = json.loads((model / "config.json").read_text())
    holder = before["text_config"] if nested else before
    holder["compression_config"] = None
    (model / "config.json").write_text(json.dumps(before))
    run(model, tmp_path / "out", options(2, modes=(Mode.MASKED,)))
    after = json.loads((tmp_path / "out" / "config.json").read_text())
    place = after["text_config"] if nested else after
    jsonschema.validate(place["quantization_config"], schema("packed-config"), cls=jsonschema.Draft202012Validator)
    assert place["quantization_config"]["modes"] == ["masked"]
    assert "compression_config" not in json.dumps(after)
    assert json.dumps(after).count("quantization_config") == 1
    del place["quantization_config"], holder["quantization_config"], holder["compression_config"]
    assert after == before


def test_config_with_two_equal_blocks_gets_two(tmp_path: Path) -> None:
    model = write_checkpoint(tmp_path / "model", nested=True)
    config = json.loads((model / "config.json").read_text())
    config["quantization_config"] = config["text_config"]["quantization_config"]
    (model / "config.json").write_text(json.dumps(config))
    run(model, tmp_path / "out")
    after = json.loads((tmp_path / "out" / "config.json").read_text())
    assert after["quantization_config"] == after["text_config"]["quantization_config"]
    assert after["quantization_config"]["quant_method"] == "chord"


def test_side_files_travel_and_other_weights_do_not(model: Path, tmp_path: Path) -> None:
    copy = tmp_path / "model"
    copy.mkdir()
    for file in model.iterdir():
        if file.is_file():
            (copy / file.name).symlink_to(file)
    for name in ("pytorch_model.bin", "consolidated.pth", "x.gguf"):
        (copy / name).write_bytes(b"weights")
    (copy / "remote").mkdir()
    (copy / "remote" / "code.py").write_text("x = 1\n")
    run(copy, tmp_path / "out")
    names = snapshot(tmp_path / "out").keys()
    wanted = {"LICENSE", "README.md", "tokenizer.json", "chat_template.jinja", "generation_config.json"}
    assert wanted | {"modeling_deepseek.py", "remote/code.py"} <= names
    assert not [name for name in names if name.endswith((".bin", ".pth", ".gguf", ".tmp")) or "lock" in name]
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == (model / "tokenizer.json").read_bytes()


def test_manifest_records_everything(packed: Path, model: Path) -> None:
    manifest = Manifest.read(packed)
    assert manifest.files.keys() == snapshot(packed).keys() - {MANIFEST}
    assert all((packed / name).stat().st_size == record.size for name, record in manifest.files.items())
    assert manifest.source.repo == "model"
    assert manifest.source.files.keys() == {"config.json", *(file.name for file in model.glob("*.safetensors"))}
    assert str(model) not in (packed / MANIFEST).read_text()


def test_the_same_bytes_with_any_number_of_workers(model: Path, packed: Path, tmp_path: Path) -> None:
    for workers in (1, 5):
        run(model, tmp_path / f"{workers}", workers=workers)
        assert snapshot(tmp_path / f"{workers}") == snapshot(packed)


def test_an_experts_bytes_do_not_depend_on_ep(model: Path, packed: Path, tmp_path: Path) -> None:
    run(model, tmp_path / "out", options(8, placement=Placement.ROUND_ROBIN))
    one = {k: v for file in packed.glob("experts-*") for k, v in load_file(file).items()}
    eight = {k: v for file in (tmp_path / "out").glob("experts-*") for k, v in load_file(file).items()}
    assert one.keys() == eight.keys()
    assert all(torch.equal(one[name], eight[name]) for name in one)


def test_asked_ranks_only(model: Path, packed: Path, tmp_path: Path) -> None:
    run(model, tmp_path / "out", options(2, ranks=(1,), experts_only=True))
    files = {path.name for path in (tmp_path / "out").glob("*.safetensors")}
    assert files == {f"experts-layer{layer:03d}-ep001of002-tp00of01-00.safetensors" for layer in (1, 2)}
    assert verify(tmp_path / "out").findings == ()
    assert compare(tmp_path / "out", str(model)).findings == ()
    assert Manifest.read(tmp_path / "out").ep_ranks == (1,)


def test_weight_shape_may_be_int64(tmp_path: Path) -> None:
    model = write_checkpoint(tmp_path / "model", shape_dtype=torch.int64, full_range=True)
    run(model, tmp_path / "out")
    assert compare(tmp_path / "out", str(model)).findings == ()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 2.0**30])
def test_a_scale_that_cannot_be_stored_is_refused(tmp_path: Path, value: float) -> None:
    from safetensors.torch import save_file

    model = write_checkpoint(tmp_path / "model")
    file = sorted(model.glob("model-*"))[1]
    tensors = load_file(file)
    name = "model.layers.1.mlp.experts.3.up_proj.weight_scale"
    tensors[name][5, 2] = value
    save_file(tensors, file)
    with pytest.raises(ScaleError, match=rf"experts\.3\.up_proj\.weight_scale.*up scale \[5, 2\] is {value}"):
        run(model, tmp_path / "out")
    assert not (tmp_path / "out" / MANIFEST).exists()
    assert not list((tmp_path / "out").glob("*.tmp"))


def test_without_the_native_packer(model: Path, packed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("chord_runtime.format.native.library", lambda: None)
    run(model, tmp_path / "out")
    assert snapshot(tmp_path / "out") == snapshot(packed)
