"""Shard metadata, manifest and config block: read back as written, and refused when altered."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from chord_runtime.errors import FormatError
from chord_runtime.format.layout import ALL_MODES, ExpertShape, Mode, ParallelLayout, Placement
from chord_runtime.format.metadata import FileRecord, Manifest, Packing, ShardMetadata, Source, quantization_config
from chord_runtime.resources import schema

PACKING = Packing(
    modes=(Mode.MASKED,),
    layout=ParallelLayout(4, 2, Placement.ROUND_ROBIN),
    shape=ExpertShape(8, 256, 128),
    layers=(1, 2),
    prefix="model.layers.",
)
SHARD = ShardMetadata(PACKING, layer=2, ep_rank=1, tp_rank=0, experts=(1, 5), source=Source("a/b", "c" * 40))
MANIFEST = Manifest(
    PACKING,
    ep_ranks=(0, 1),
    experts_only=False,
    source=Source("a/b", "c" * 40, {"model-1.safetensors": "sha256:" + "0" * 64}),
    files={"experts.safetensors": FileRecord(10, "0" * 32)},
)


def test_what_is_written_is_read_back() -> None:
    assert ShardMetadata.from_string(SHARD.to_string(), "here") == SHARD
    assert Manifest.from_string(MANIFEST.to_string(), "here") == MANIFEST
    assert Packing.from_json(PACKING.to_json()) == PACKING


def test_every_changed_bit_of_a_manifest_is_found() -> None:
    written = MANIFEST.to_string().encode()
    for bit in range(0, 8 * len(written), 7):  # 7 and 8 have no common factor: every bit of a byte in turn
        changed = bytearray(written)
        changed[bit // 8] ^= 1 << bit % 8
        with pytest.raises(FormatError, match="that file"):
            Manifest.from_string(bytes(changed), "that file")


def test_a_long_value_is_not_told_whole() -> None:
    data = {**MANIFEST.to_json(), "files": list(range(10_000))}
    with pytest.raises(FormatError) as raised:
        Manifest.from_string(json.dumps(data), "that file")
    assert len(str(raised.value)) < 500


def test_the_same_metadata_gives_the_same_bytes() -> None:
    again = replace(MANIFEST, files=dict(reversed(list(MANIFEST.files.items()))))
    assert again.to_string() == MANIFEST.to_string()


@pytest.mark.parametrize("modes", [ALL_MODES, (Mode.CONTIGUOUS,)])
def test_the_config_block_satisfies_its_schema(modes: tuple[Mode, ...]) -> None:
    block = quantization_config(replace(PACKING, modes=modes))
    assert block["quant_method"] == "chord"
    jsonschema.validate(json.loads(json.dumps(block)), schema("packed-config"), cls=jsonschema.Draft202012Validator)


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("packing", "format_version"), 2, "packed format version 2; this Chord reads version 1"),
        (("packing", "modes"), ["sideways"], "sideways"),
        (("packing", "modes"), [], "modes"),
        (("packing", "group_size"), 128, "group_size"),
        (("packing", "shapes", "w13"), [256, 256], "shapes or row orders recorded do not follow"),
        (("packing", "row_order", "w2"), "gate_up_8", "row_order"),
        (("packing", "prefix"), None, "prefix"),
        (("layer",), -1, "layer"),
        (("experts",), ["1"], "experts"),
        (("source", "repo"), 7, "repo"),
    ],
)
def test_altered_metadata_is_refused_by_place(path: tuple[str, ...], value: object, message: str) -> None:
    data: Any = json.loads(SHARD.to_string())
    inner = data
    for key in path[:-1]:
        inner = inner[key]
    assert inner[path[-1]] != value
    inner[path[-1]] = value
    with pytest.raises(FormatError, match=message):
        ShardMetadata.from_string(json.dumps(data), "that file")


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '"x"', "{}", '{"packing": 3}', '{"packing": {}}'])
def test_what_is_not_metadata_at_all_is_refused(text: str) -> None:
    for kind in (ShardMetadata, Manifest):
        with pytest.raises(FormatError, match="that file"):
            kind.from_string(text, "that file")


def test_a_directory_without_a_manifest_is_unfinished(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="has not finished; run chord-convert again"):
        Manifest.read(tmp_path)
    (tmp_path / "chord-manifest.json").write_text(MANIFEST.to_string())
    assert Manifest.read(tmp_path) == MANIFEST
