"""A directory of many ranks: what is where is read from file names, once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from chord_runtime import packed_dir
from chord_runtime.commands.inspect import summarize
from chord_runtime.format.layout import ALL_MODES, MANIFEST, ExpertShape, ParallelLayout, experts_file
from chord_runtime.format.metadata import FileRecord, Manifest, Packing, Source
from chord_runtime.packed_dir import PackedDir
from chord_runtime.verify import verify

EP, LAYERS = 96, 8


@pytest.fixture
def many(tmp_path: Path) -> Path:
    """A manifest of many files, none of which is there."""
    packing = Packing(ALL_MODES, ParallelLayout(EP), ExpertShape(EP, 256, 128), tuple(range(LAYERS)), "model.layers.")
    names = [experts_file(layer, rank, packing.layout) for layer in packing.layers for rank in range(EP)]
    files = dict.fromkeys(["shared-00000.safetensors", *names], FileRecord(10, "0" * 32))
    (tmp_path / MANIFEST).write_text(Manifest(packing, tuple(range(EP)), False, Source("a", ""), files).to_string())
    return tmp_path


@pytest.fixture
def parsed(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Names parsed so far."""
    names: list[str] = []
    parse = packed_dir.parse_experts_file

    def counting(name: str) -> tuple[int, int, int] | None:
        names.append(name)
        return parse(name)

    monkeypatch.setattr(packed_dir, "parse_experts_file", counting)
    yield names


def test_each_name_is_parsed_once(many: Path, parsed: list[str]) -> None:
    packed = PackedDir(many)
    for layer in range(LAYERS):
        for rank in range(EP):
            assert packed.experts_files(layer, rank, 0) == [experts_file(layer, rank, ParallelLayout(EP))]
    assert packed.experts_files(2) == packed.experts_files()[2 * EP : 3 * EP]
    assert packed.experts_files(ep_rank=5) == packed.experts_files()[5::EP]
    assert packed.shared_files() == ["shared-00000.safetensors"]
    assert summarize(packed)["expert_bytes"] == 10 * EP * LAYERS
    assert len(parsed) == len(set(parsed)) == 1 + EP * LAYERS


def test_every_missing_file_is_a_finding(many: Path) -> None:
    findings = verify(many).findings
    assert {finding.file for finding in findings} == PackedDir(many).manifest.files.keys()
