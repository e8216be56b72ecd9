"""Loading: any rank of any EP size, only its bytes, and nothing from a directory that is not as it was written."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

import chord_runtime as chord
from chord_runtime import loader
from chord_runtime.errors import FormatError, UsageError
from chord_runtime.format import shard
from chord_runtime.format.layout import MANIFEST, Placement
from chord_runtime.format.metadata import dumps
from chord_runtime.format.packing import pack_gate_up
from tests.checkpoints import write_checkpoint

EXPERTS, HIDDEN, INTERMEDIATE = 8, 256, 128


def convert(source: Path, out: Path, *options: str) -> Path:
    command = [str(Path(sys.executable).with_name("chord-convert")), str(source), "-o", str(out), *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return out


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("source") / "kimi", experts=EXPERTS, hidden=HIDDEN)


@pytest.fixture(scope="module")
def packed(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """EP4, all modes, with the tensors that are not experts."""
    return convert(source, tmp_path_factory.mktemp("packed") / "ep4", "--ep", "4")


@pytest.fixture
def copy(packed: Path, tmp_path: Path) -> Path:
    """A copy to damage."""
    return Path(shutil.copytree(packed, tmp_path / "copy"))


def expert_files(directory: Path) -> list[Path]:
    return sorted(directory.glob("experts-*.safetensors"))


def stored(directory: Path, layer: int, expert: int, projection: str) -> torch.Tensor:
    """A packed tensor as the safetensors library reads it."""
    name = f"model.layers.{layer}.mlp.experts.{expert}.{projection}.weight_packed"
    index = json.loads((directory / "model.safetensors.index.json").read_text())["weight_map"]
    with safe_open(directory / index[name], "pt") as file:
        tensor: torch.Tensor = file.get_tensor(name)
        return tensor


@pytest.mark.parametrize("ep_size", [None, 1, 2, 4, 8])
@pytest.mark.parametrize("placement", [None, "round_robin"])
def test_any_rank_of_any_ep_size_and_placement(packed: Path, ep_size: int | None, placement: str | None) -> None:
    seen: list[int] = []
    for rank in range(ep_size or 4):
        layers = chord.load(packed, rank, ep_size, placement=placement, verify=True)
        assert list(layers) == [1, 2] and len(layers) == 2
        for number, layer in layers.items():
            for row, expert in enumerate(layer.experts):
                assert torch.equal(layer.w13.data[row], stored(packed, number, expert, "gate_proj"))
                assert torch.equal(layer.w2.data[row], stored(packed, number, expert, "down_proj"))
            assert (layer.w13.n, layer.w13.k, layer.w2.n, layer.w2.k) == (256, HIDDEN, HIDDEN, INTERMEDIATE)
            assert layer.w13.row_order is chord.RowOrder.GATE_UP_8 and layer.w2.row_order is chord.RowOrder.PLAIN
            assert layer.num_experts == EXPERTS
        seen += layers[1].experts
        share = EXPERTS // (ep_size or 4)
        first = range(rank, EXPERTS, ep_size or 4) if placement else range(rank * share, (rank + 1) * share)
        assert layers[1].experts == tuple(first)
    assert sorted(seen) == list(range(EXPERTS))


def test_what_is_loaded_is_the_source(packed: Path, source: Path) -> None:
    index = json.loads((source / "model.safetensors.index.json").read_text())["weight_map"]

    def tensor(projection: str, kind: str) -> torch.Tensor:
        name = f"model.layers.2.mlp.experts.5.{projection}.{kind}"
        with safe_open(source / index[name], "pt") as file:
            found: torch.Tensor = file.get_tensor(name)
            return found

    parts = [tensor(p, kind) for p in ("gate_proj", "up_proj") for kind in ("weight_packed", "weight_scale")]
    layers = chord.load(packed, ep_size=1, layers=[2])
    assert list(layers) == [2]
    assert torch.equal(layers[2].w13.data[5], pack_gate_up(*parts))


def test_only_the_ranks_files_are_opened_and_only_its_bytes_read(packed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []
    read = 0
    os_open, os_preadv = os.open, os.preadv

    def counting_open(path: str, *rest: int) -> int:
        opened.append(Path(path).name)
        return os_open(path, *rest)

    def counting_preadv(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        nonlocal read
        count = os_preadv(descriptor, buffers, offset)
        read += count
        return count

    monkeypatch.setattr(os, "open", counting_open)
    monkeypatch.setattr(os, "preadv", counting_preadv)
    layers = chord.load(packed, 2)
    assert {name for name in opened if name.endswith(".safetensors")} == {
        f"experts-layer{layer:03d}-ep002of004-tp00of01-00.safetensors" for layer in (1, 2)
    }
    held = sum(weight.data.numel() for layer in layers.values() for weight in (layer.w13, layer.w2))
    assert read == held == layers.report.data_bytes
    files = [path for path in expert_files(packed) if "ep002" in path.name]
    assert layers.report.files == len(files)
    assert layers.report.data_bytes + layers.report.header_bytes == sum(path.stat().st_size for path in files)
    assert "bytes from 2 files" in str(layers.report) and "GB/s" in str(layers.report)
    # Half of a rank's experts: half of its file.
    half = chord.load(packed, 5, 8)
    assert half.report.data_bytes * 2 == held and half.report.files == 2


def test_reads_are_one_call_for_neighbours(packed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    preadv = os.preadv

    def counting(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        calls.append(len(buffers))
        return preadv(descriptor, buffers, offset)

    monkeypatch.setattr(os, "preadv", counting)
    chord.load(packed, 0)
    assert calls == [4, 4]  # two experts of two tensors, in each of two layers
    monkeypatch.setattr(loader, "_RUN_BYTES", 1)
    calls.clear()
    chord.load(packed, 0)
    assert calls == [1] * 8


def test_short_reads_are_continued(packed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = chord.load(packed, 1)
    preadv = os.preadv

    def short(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        return preadv(descriptor, [buffers[0][:1001]], offset)

    monkeypatch.setattr(os, "preadv", short)
    found = chord.load(packed, 1, verify=True)
    for number in expected:
        assert torch.equal(found[number].w13.data, expected[number].w13.data)
        assert torch.equal(found[number].w2.data, expected[number].w2.data)


def test_a_file_that_shrinks_while_it_is_read(packed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "preadv", lambda *_: 0)
    with pytest.raises(FormatError, match=r"ended at byte \d+: something shortened it"):
        chord.load(packed)


def test_an_io_error_names_the_file(packed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> int:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "preadv", fail)
    with pytest.raises(FormatError, match=r"experts-layer00\d-.* cannot be read: Input/output error; check the disk"):
        chord.load(packed)


def test_an_error_ends_the_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers that have not begun are not read any more."""
    source = write_checkpoint(tmp_path / "source", experts=2, layers=10)
    many = convert(source, tmp_path / "many", "--ep", "1", "--experts-only")
    read: list[Path] = []

    def fail(path: Path, *_: object) -> None:
        read.append(path)
        if len(read) > 1:
            time.sleep(1)  # the time that the first one's end takes to be seen
        raise FormatError("the first one")

    monkeypatch.setattr(loader, "read_tensors", fail)
    with pytest.raises(FormatError, match="the first one"):
        chord.load(many, workers=1)
    assert len(read) < 9 == len(expert_files(many))


def test_a_layer_named_twice_is_loaded_once(packed: Path) -> None:
    once, twice = chord.load(packed, layers=[1]), chord.load(packed, layers=iter([1, 1]))
    assert list(twice) == [1] and twice.report.data_bytes == once.report.data_bytes


def test_a_layer_that_is_not_there(packed: Path) -> None:
    rank = chord.load(packed, layers=[2])
    for kind in (UsageError, KeyError):
        with pytest.raises(kind, match=r"^layer 3 is not here: loaded are 2$"):
            rank[3]
    assert 3 not in rank and rank.get(3) is None


@pytest.mark.parametrize("directory", [None, 3])
def test_what_is_no_path(directory: object) -> None:
    with pytest.raises(UsageError, match=f"directory must be a path; found {directory}"):
        chord.load(directory)  # type: ignore[arg-type]


def truncate(directory: Path) -> None:
    os.truncate(expert_files(directory)[0], 100_000)


def lengthen(directory: Path) -> None:
    with expert_files(directory)[0].open("ab") as file:
        file.write(b"x")


def replace_by_directory(directory: Path) -> None:
    file = expert_files(directory)[0]
    file.unlink()
    file.mkdir()


def rename_tensor(directory: Path) -> None:
    path = expert_files(directory)[0]
    raw = path.read_bytes()
    path.write_bytes(raw.replace(b"experts.0.gate_proj", b"experts.9.gate_proj"))


def swap_layers(directory: Path) -> None:
    first, second = expert_files(directory)[0], expert_files(directory)[4]
    assert "layer001-ep000" in first.name and "layer002-ep000" in second.name
    a, b = first.read_bytes(), second.read_bytes()
    first.write_bytes(b)
    second.write_bytes(a)


def edit_manifest(change: Callable[[dict[str, object]], object], sign: bool = True) -> Callable[[Path], None]:
    """Edit and, as one who means it would, state the checksum anew."""

    def edit(directory: Path) -> None:
        path = directory / MANIFEST
        data = json.loads(path.read_text())
        checksum = data.pop("checksum")
        change(data)
        path.write_text(json.dumps({**data, "checksum": shard.checksum(dumps(data).encode()) if sign else checksum}))

    return edit


def drop_files(data: dict[str, object]) -> None:
    files = data["files"]
    assert isinstance(files, dict)
    del files["experts-layer001-ep000of004-tp00of01-00.safetensors"]


def change_version(data: dict[str, object]) -> None:
    packing = data["packing"]
    assert isinstance(packing, dict)
    packing["format_version"] = 2


def set_ranks(*ranks: int) -> Callable[[dict[str, object]], object]:
    return lambda data: data.update(ep_ranks=list(ranks))


def set_packing(**sizes: object) -> Callable[[dict[str, object]], object]:
    def change(data: dict[str, object]) -> None:
        packing = data["packing"]
        assert isinstance(packing, dict)
        packing.update(sizes)

    return change


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "unfinished": (lambda d: (d / MANIFEST).unlink(), "has no chord-manifest.json.*has not finished"),
    "not json": (lambda d: (d / MANIFEST).write_text("{"), "is not JSON"),
    "version": (edit_manifest(change_version), "packed format version 2; this Chord reads version 1"),
    "one character": (edit_manifest(lambda d: d.update(tool_version="9"), sign=False), "checksum do not follow"),
    "not text": (lambda d: (d / MANIFEST).write_bytes(b'{"a": "\xff"}'), f"{MANIFEST} is not JSON"),
    "nested": (lambda d: (d / MANIFEST).write_text("[" * 100_000), f"{MANIFEST} is not JSON"),
    "4.0": (edit_manifest(set_packing(ep_size=4.0)), "4.0 is not of type 'integer' at packing/ep_size"),
    "no end of experts": (edit_manifest(set_packing(num_experts=10**12)), "greater than the maximum of 65536"),
    "tp that cannot be": (edit_manifest(set_packing(tp_size=7)), f"{MANIFEST}: .*7 does not cut"),
    "ep that cannot be": (edit_manifest(set_packing(ep_size=3)), f"{MANIFEST}: .*3 does not divide"),
    "rank beyond": (edit_manifest(set_ranks(0, 1, 2, 3, 99)), f"{MANIFEST}: ep rank 99 is not one of 0..3"),
    "experts of rank": (edit_manifest(set_ranks(0, 1)), f"{MANIFEST}: experts_of_rank"),
    "ranks left out": (
        edit_manifest(lambda d: d.update(ep_ranks=[0], experts_of_rank={"0": [0, 1]})),
        f"{MANIFEST} lists experts-layer001-ep001.* of no layer and rank that it says",
    ),
    "file missing": (lambda d: expert_files(d)[0].unlink(), "cannot be read: No such file"),
    "directory for a file": (replace_by_directory, "cannot be read: Is a directory; delete .*run chord-convert again"),
    "file unlisted": (edit_manifest(drop_files), r"no file of layer 1 holds .*experts\.0\.down_proj.*4 tensors"),
    "truncated": (truncate, "truncated or altered"),
    "longer": (lengthen, "truncated or altered"),
    "empty": (lambda d: expert_files(d)[0].write_bytes(b""), "truncated or altered"),
    "renamed tensor": (rename_tensor, "not the one that the manifest records|not one Chord wrote"),
    "swapped layers": (swap_layers, "the manifest says|not the one that the manifest records"),
}


@pytest.mark.parametrize("what", DAMAGE)
def test_a_directory_that_is_not_as_written_is_refused(copy: Path, what: str) -> None:
    damage, message = DAMAGE[what]
    chord.load(copy)
    damage(copy)
    with pytest.raises(FormatError, match=message):
        chord.load(copy)


def test_a_changed_byte_is_found_when_asked(copy: Path) -> None:
    path = expert_files(copy)[1]
    with path.open("r+b") as file:
        file.seek(-5000, os.SEEK_END)
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ 1]))
    chord.load(copy, 1)
    chord.load(copy, 0, verify=True)
    with pytest.raises(
        FormatError,
        match=r"bytes of .*experts\.3\.\w+_proj.* not match their checksum.*delete .*ep001.* run chord-convert again",
    ):
        chord.load(copy, 1, verify=True)


def test_files_that_a_rank_does_not_need_may_be_missing(copy: Path) -> None:
    """Each rank's host may hold its own files only."""
    for path in copy.glob("*.safetensors"):
        if "ep003" not in path.name:
            path.unlink()
    assert chord.load(copy, 3)[1].experts == (6, 7)
    assert chord.load(copy, 7, 8)[1].experts == (7,)
    with pytest.raises(FormatError, match="cannot be read"):
        chord.load(copy, 2)


WRONG: dict[str, tuple[dict[str, object], str]] = {
    "rank": ({"ep_rank": 4}, r"ep rank 4 is not one of 0\.\.3"),
    "negative rank": ({"ep_rank": -1}, "ep rank -1"),
    "size": ({"ep_size": 3}, r"ep size 3 does not divide 8 experts; sizes that do: \[1, 2, 4, 8\]"),
    "tp rank": ({"tp_rank": 1}, r"packed for --tp 1, so ranks are 0\.\.0"),
    "layer": ({"layers": [0, 1, 7]}, r"layers \[0, 7\] are not in .*has experts in layers \[1, 2\]"),
    "rank as text": ({"ep_rank": "1"}, "ep_rank must be an integer; found '1'"),
    "tp rank as text": ({"tp_rank": None}, "tp_rank must be an integer; found None"),
    "size as a float": ({"ep_size": 2.0}, r"ep_size must be an integer; found 2\.0"),
    "workers": ({"workers": "4"}, "workers must be an integer; found '4'"),
    "one layer": ({"layers": 1}, r"layers must be several numbers, as in layers=\[1\]; found 1"),
    "layer as text": ({"layers": "1"}, "a layer must be an integer; found '1'"),
    "no device": ({"device": "bogus"}, "device 'bogus': Expected one of"),
    "device without memory": ({"device": "meta"}, "device 'meta': supported are cpu and cuda"),
    "device that is not there": ({"device": "cuda:99"}, "device 'cuda:99': PyTorch sees .*chord doctor"),
    "placement": ({"placement": "random"}, "placement 'random': supported are linear, round_robin"),
}


@pytest.mark.parametrize("what", WRONG)
def test_wrong_ranks_are_refused(packed: Path, what: str) -> None:
    arguments, message = WRONG[what]
    with pytest.raises(UsageError, match=message):
        chord.load(packed, **arguments)  # type: ignore[arg-type]


def test_ranks_that_were_not_converted_are_named(source: Path, tmp_path: Path) -> None:
    part = convert(source, tmp_path / "part", "--ep", "4", "--ranks", "0,3", "--experts-only")
    assert chord.load(part, 3)[2].experts == (6, 7)
    with pytest.raises(
        FormatError,
        match=r"ranks \[0, 3\] of 4 only.*also of ranks \[1\]: run chord-convert again with --ranks 0,1,3, ",
    ):
        chord.load(part, 1)
    with pytest.raises(FormatError, match=r"also of ranks \[1\]"):
        chord.load(part, 0, 2)
    with pytest.raises(FormatError, match=r"also of ranks \[1, 2\]"):
        chord.load(part, 0, 1)
    convert(source, part, "--ep", "4", "--ranks", "0,1,3", "--experts-only")
    assert chord.load(part, 0, 2)[1].experts == (0, 1, 2, 3)


def test_modes_travel_with_the_weights(source: Path, tmp_path: Path) -> None:
    masked = convert(source, tmp_path / "masked", "--ep", "2", "--mode", "masked", "--experts-only")
    layer = chord.load(masked)[1]
    assert layer.w13.modes == layer.w2.modes == (chord.Mode.MASKED,)
    with pytest.raises(chord.ChordError, match="contiguous was called on a weight packed for masked"):
        chord.contiguous(torch.zeros(128, HIDDEN).bfloat16(), layer.w13, torch.zeros(128, dtype=torch.int32))


def test_tensor_parallel_ranks_add_up(source: Path, packed: Path, tmp_path: Path) -> None:
    cut = convert(source, tmp_path / "tp2", "--ep", "2", "--tp", "2", "--placement", "round_robin")
    x = torch.randn(9, HIDDEN, generator=torch.Generator().manual_seed(0)).bfloat16()
    ids, weights = torch.tensor([[0, 1], [2, 3], [4, 5]] * 3, dtype=torch.int32), torch.rand(9, 2)
    expected = chord.moe_layer(x, chord.load(packed, ep_size=1)[1], ids, weights).float()
    total = torch.zeros_like(expected)
    for ep_rank in range(2):
        for tp_rank in range(2):
            layers = chord.load(cut, ep_rank, tp_rank=tp_rank, verify=True)
            assert layers.layout.placement is Placement.ROUND_ROBIN and layers.tp_rank == tp_rank
            assert layers[1].experts == tuple(range(ep_rank, EXPERTS, 2))
            assert (layers[1].w13.n, layers[1].w2.k) == (INTERMEDIATE, INTERMEDIATE // 2)
            total += chord.moe_layer(x, layers[1], ids, weights).float()
    assert float((total - expected).norm() / expected.norm()) < 2**-7
    with pytest.raises(UsageError, match=r"tp rank 2: .* packed for --tp 2"):
        chord.load(cut, tp_rank=2)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_loading_to_a_gpu(packed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = chord.load(packed, ep_size=1)
    for run_bytes in (loader._RUN_BYTES, 100_000):
        monkeypatch.setattr(loader, "_RUN_BYTES", run_bytes)
        found = chord.load(packed, ep_size=1, device="cuda", verify=True)
        for number in expected:
            assert found[number].w13.data.is_cuda and found[number].expert_map.is_cuda
            assert torch.equal(found[number].w13.data.cpu(), expected[number].w13.data)
            assert torch.equal(found[number].w2.data.cpu(), expected[number].w2.data)
