"""From a packed directory and a rank to packed layers on a device: the bytes of that rank's experts, as they are."""

from __future__ import annotations

import ctypes
import operator
import os
import time
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from chord_runtime.errors import FormatError, UsageError
from chord_runtime.format.block import packed_bytes
from chord_runtime.format.files import DataFile, mend
from chord_runtime.format.layout import ParallelLayout, Placement, Projection, row_order, tensor_name
from chord_runtime.format.metadata import Packing
from chord_runtime.format.shard import StoredTensor, checksum
from chord_runtime.layer import PackedLayer
from chord_runtime.ops.weight import PackedWeight
from chord_runtime.packed_dir import PackedDir

_RUN_BYTES = 16 << 20
"""Tensors that follow each other in a file are read by one call, up to about this much."""


@dataclass(frozen=True)
class LoadReport:
    """What a load read: files opened, bytes of their headers and of tensors, and how long it took."""

    files: int
    header_bytes: int
    data_bytes: int
    seconds: float

    def __str__(self) -> str:
        rate = self.data_bytes / self.seconds / 1e9 if self.seconds else 0.0
        return (
            f"{self.data_bytes + self.header_bytes:,} bytes from {self.files} files "
            f"in {self.seconds:.2f} s ({rate:.2f} GB/s)"
        )


class _NoLayer(UsageError, KeyError):
    __str__ = Exception.__str__  # a KeyError shows the repr


@dataclass(frozen=True)
class PackedLayers(Mapping[int, PackedLayer]):
    """One rank's layers of packed experts by layer number."""

    layers: Mapping[int, PackedLayer]
    packing: Packing
    """How the directory was packed."""
    layout: ParallelLayout
    """How it was loaded: EP size and placement may differ from the directory's."""
    ep_rank: int
    tp_rank: int
    report: LoadReport

    def __getitem__(self, layer: int) -> PackedLayer:
        if layer not in self.layers:
            raise _NoLayer(f"layer {layer!r} is not here: loaded are {', '.join(map(str, self.layers)) or 'none'}")
        return self.layers[layer]

    def __iter__(self) -> Iterator[int]:
        return iter(self.layers)

    def __len__(self) -> int:
        return len(self.layers)


def load(
    directory: str | os.PathLike[str],
    ep_rank: int = 0,
    ep_size: int | None = None,
    tp_rank: int = 0,
    *,
    placement: Placement | str | None = None,
    device: torch.device | str = "cpu",
    layers: Iterable[int] | None = None,
    verify: bool = False,
    workers: int = 4,
) -> PackedLayers:
    """Read one rank's experts, and nothing else, into tensors ready to multiply by.

    Args:
        directory: made by ``chord-convert``.
        ep_rank: rank of ``ep_size`` whose experts are wanted.
        ep_size: any size that divides the experts; by default the recorded one. An expert's bytes do not depend on it.
        tp_rank: rank of the recorded TP size.
        placement: which experts a rank holds; by default as recorded.
        device: where the tensors go. For CUDA they pass through two pinned buffers a worker.
        layers: layer numbers; by default all. One that is named twice is loaded once.
        verify: also compare every tensor with its checksum.
        workers: layers read at once.

    Raises:
        FormatError: the directory is unfinished, altered, of another format version, or lacks experts of this rank.
        UsageError: ranks, sizes, layers or a device that cannot be.
    """
    began = time.perf_counter()
    target, workers = _device(device), _integer("workers", workers)
    ep_rank, tp_rank = _integer("ep_rank", ep_rank), _integer("tp_rank", tp_rank)
    opened = PackedDir(_path(directory))
    packing = opened.manifest.packing
    recorded = packing.layout
    layout = ParallelLayout(
        recorded.ep_size if ep_size is None else _integer("ep_size", ep_size),
        recorded.tp_size,
        recorded.placement if placement is None else _placement(placement),
    )
    layout.check(packing.shape.num_experts, packing.shape.hidden, packing.shape.intermediate)
    if not 0 <= tp_rank < layout.tp_size:
        raise UsageError(
            f"tp rank {tp_rank}: {opened.path} was packed for --tp {layout.tp_size}, so ranks are "
            f"0..{layout.tp_size - 1}; another TP size has other bytes: convert again for it, into another directory"
        )
    numbers = packing.layers if layers is None else _layers(layers)
    if unknown := sorted(set(numbers) - set(packing.layers)):
        raise UsageError(f"layers {unknown} are not in {opened.path}: it has experts in layers {list(packing.layers)}")
    experts = tuple(layout.experts_of(ep_rank, packing.shape.num_experts))
    reader = _Reader(opened, _owners(opened, experts), experts, tp_rank, verify)
    with ThreadPoolExecutor(max(1, min(workers, len(numbers))), thread_name_prefix="load") as pool:
        reads = [pool.submit(reader.layer, number, target) for number in numbers]
        try:
            results = [read.result() for read in reads]
        except BaseException:  # one error, or Ctrl-C, is enough: do not read what is left
            pool.shutdown(cancel_futures=True)
            raise
    report = LoadReport(
        files=sum(result.files for result in results),
        header_bytes=sum(result.header_bytes for result in results),
        data_bytes=sum(result.data_bytes for result in results),
        seconds=time.perf_counter() - began,
    )
    found = {number: result.layer for number, result in zip(numbers, results, strict=True)}
    return PackedLayers(found, packing, layout, ep_rank, tp_rank, report)


def _path(directory: Any) -> Path:
    try:
        return Path(directory)
    except TypeError:
        raise UsageError(f"directory must be a path; found {directory!r}: pass what chord-convert has made") from None


def _placement(name: Placement | str) -> Placement:
    try:
        return Placement(name)
    except ValueError:
        known = ", ".join(placement.value for placement in Placement)
        raise UsageError(f"placement {name!r}: supported are {known}") from None


def _integer(name: str, value: object) -> int:
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise UsageError(f"{name} must be an integer; found {value!r}") from None


def _layers(layers: Iterable[int]) -> tuple[int, ...]:
    if not isinstance(layers, Iterable):
        raise UsageError(f"layers must be several numbers, as in layers=[{layers!r}]; found {layers!r}")
    return tuple(dict.fromkeys(_integer("a layer", layer) for layer in layers))


def _device(name: torch.device | str) -> torch.device:
    try:
        device = torch.device(name)
    except (RuntimeError, TypeError) as error:
        raise UsageError(f"device {name!r}: {str(error).splitlines()[0]}") from None
    if device.type not in ("cpu", "cuda"):
        raise UsageError(f"device {name!r}: supported are cpu and cuda")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise UsageError(
            f"device {name!r}: PyTorch sees {torch.cuda.device_count()} CUDA devices here; `chord doctor` says what is "
            "missing, and device='cpu' runs the reference"
        )
    return device


def _owners(opened: PackedDir, experts: tuple[int, ...]) -> list[int]:
    """The ranks, of those that the files are grouped for, whose files hold ``experts``."""
    manifest = opened.manifest
    recorded, total = manifest.packing.layout, manifest.packing.shape.num_experts
    wanted = set(experts)
    owners = [rank for rank in range(recorded.ep_size) if not wanted.isdisjoint(recorded.experts_of(rank, total))]
    if missing := [rank for rank in owners if rank not in manifest.ep_ranks]:
        together = ",".join(str(rank) for rank in sorted({*manifest.ep_ranks, *owners}))
        raise FormatError(
            f"{opened.path} holds the experts of ranks {list(manifest.ep_ranks)} of {recorded.ep_size} only; those "
            f"asked for are also of ranks {missing}: run chord-convert again with --ranks {together}, which adds them, "
            f"or load with ep_size={recorded.ep_size} and one of the ranks that are here"
        )
    return owners


@dataclass(frozen=True)
class _Loaded:
    layer: PackedLayer
    files: int
    header_bytes: int
    data_bytes: int


@dataclass(frozen=True)
class Wanted:
    """A tensor to read: where it lies and the row of the destination that it fills."""

    name: str
    stored: StoredTensor
    destination: Tensor


@dataclass(frozen=True)
class _Reader:
    opened: PackedDir
    owners: list[int]
    experts: tuple[int, ...]
    tp_rank: int
    verify: bool

    def layer(self, number: int, device: torch.device) -> _Loaded:
        """Read one layer: one allocation a projection, filled from every file that holds one of its experts."""
        packing = self.opened.manifest.packing
        shapes = {p: packing.shape.packed(p, packing.layout.tp_size) for p in Projection}
        data = {
            p: torch.empty(len(self.experts), packed_bytes(*shapes[p]), dtype=torch.uint8, device=device)
            for p in Projection
        }
        wanted = {
            tensor_name(packing.prefix, number, expert, p, self.tp_rank, packing.layout.tp_size): data[p][row]
            for row, expert in enumerate(self.experts)
            for p in Projection
        }
        names = [name for rank in self.owners for name in self.opened.experts_files(number, rank, self.tp_rank)]
        headers = 0
        for name in names:
            header = self.opened.open_experts(name).header
            headers += len(header.raw)
            found = [Wanted(key, header.tensors[key], wanted.pop(key)) for key in header.tensors if key in wanted]
            read_tensors(self.opened.path / name, found, self.verify)
        if wanted:
            raise FormatError(
                f"{self.opened.path}: no file of layer {number} holds {min(wanted)} ({len(wanted)} tensors are "
                "missing): the manifest was altered; fetch it again, or convert into another directory"
            )
        w13, w2 = (PackedWeight(data[p], *shapes[p], row_order(p), packing.modes) for p in Projection)
        layer = PackedLayer(w13, w2, self.experts, packing.shape.num_experts)
        return _Loaded(layer, len(names), headers, sum(tensor.numel() for tensor in data.values()))


def read_tensors(path: Path, wanted: list[Wanted], verify: bool) -> None:
    """Read tensors of one file into one device's memory, those that follow each other by one call."""
    if not wanted:
        return
    device = wanted[0].destination.device
    if device.type != "cuda":
        _read(path, wanted, None, verify)
        return
    with torch.cuda.device(device):  # a new thread is on device 0, and pinning memory there would open it
        _read(path, wanted, _Stage(), verify)


def _read(path: Path, wanted: list[Wanted], stage: _Stage | None, verify: bool) -> None:
    try:
        with DataFile(path) as file:
            for run in _runs(sorted(wanted, key=lambda item: item.stored.start)):
                tensors = [item.destination for item in run]
                host = tensors if stage is None else stage.take([tensor.numel() for tensor in tensors])
                views = [_bytes(tensor) for tensor in host]
                file.read(run[0].stored.start, views)
                if verify:
                    _verify(path, run, views)
                if stage is not None:
                    stage.give(host, tensors)
    finally:
        if stage is not None:
            stage.wait()


def _verify(path: Path, run: list[Wanted], views: list[memoryview]) -> None:
    for item, view in zip(run, views, strict=True):
        if checksum(view) != item.stored.checksum:
            raise FormatError(
                f"{path}: the bytes of {item.name} do not match their checksum: the file is damaged; {mend(path)}"
            )


class _Stage:
    """Two pinned buffers in turn: one is filled from the file while the other is copied to the device."""

    def __init__(self) -> None:
        self._buffers = [torch.empty(0, dtype=torch.uint8)] * 2
        self._copied: list[torch.cuda.Event | None] = [None, None]
        self._turn = 0

    def take(self, sizes: list[int]) -> list[Tensor]:
        """Host tensors of these sizes, side by side in the next buffer, once its last copy is done."""
        self._turn ^= 1
        copied = self._copied[self._turn]
        if copied is not None:
            copied.synchronize()
        if self._buffers[self._turn].numel() < sum(sizes):
            self._buffers[self._turn] = torch.empty(sum(sizes), dtype=torch.uint8, pin_memory=True)
        return list(self._buffers[self._turn][: sum(sizes)].split_with_sizes(sizes))

    def give(self, host: list[Tensor], tensors: list[Tensor]) -> None:
        """Copy what was read to the device."""
        for source, tensor in zip(host, tensors, strict=True):
            tensor.copy_(source, non_blocking=True)
        self._copied[self._turn] = torch.cuda.current_stream(tensors[0].device).record_event()

    def wait(self) -> None:
        """Until everything given has arrived."""
        for copied in self._copied:
            if copied is not None:
                copied.synchronize()


def _runs(wanted: list[Wanted]) -> Iterator[list[Wanted]]:
    """Groups of tensors that follow each other without a gap, each about ``_RUN_BYTES`` at most."""
    run: list[Wanted] = []
    for item in wanted:
        if run and (item.stored.start != run[-1].stored.stop or item.stored.stop - run[0].stored.start > _RUN_BYTES):
            yield run
            run = []
        run.append(item)
    if run:
        yield run


def _bytes(tensor: Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor."""
    return memoryview((ctypes.c_ubyte * tensor.numel()).from_address(tensor.data_ptr())).cast("B")
