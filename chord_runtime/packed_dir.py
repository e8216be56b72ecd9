"""A finished packed directory: its manifest, and its files' headers held against it."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from chord_runtime.errors import FormatError
from chord_runtime.format.block import packed_bytes
from chord_runtime.format.files import mend
from chord_runtime.format.layout import MANIFEST, Projection, parse_experts_file, tensor_name
from chord_runtime.format.metadata import Manifest, ShardMetadata
from chord_runtime.format.shard import ShardHeader, StoredTensor, read_shard_header

SHARD_SUFFIX = ".safetensors"


@dataclass(frozen=True)
class ExpertsFile:
    """One experts file: its header, and what its metadata says of it."""

    name: str
    header: ShardHeader
    metadata: ShardMetadata

    def tensor(self, expert: int, projection: Projection) -> StoredTensor:
        """Where a packed weight lies in the file. ``expert`` is a global id."""
        packing, shard = self.metadata.packing, self.metadata
        name = tensor_name(packing.prefix, shard.layer, expert, projection, shard.tp_rank, packing.layout.tp_size)
        return self.header.tensors[name]


class PackedDir:
    """A packed directory whose conversion has finished.

    Raises FormatError if it has not, and from its methods if a file is missing or not the one the manifest records.
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self.manifest = Manifest.read(self.path)
        self._shared: list[str] = []
        self._experts: defaultdict[tuple[int, ...], list[str]] = defaultdict(list)
        for name in self.shards():
            place = parse_experts_file(name)
            (self._shared if place is None else self._experts[place]).append(name)
        packing = self.manifest.packing
        self._places = packing.layers, self.manifest.ep_ranks, range(packing.layout.tp_size)
        if stray := self._experts.keys() - set(product(*self._places)):
            raise FormatError(
                f"{self.path / MANIFEST} lists {self._experts[min(stray)][0]}, which is of no layer and rank that it "
                f"says are here ({len(stray)} such): it was altered; fetch it again, or convert into another directory"
            )

    def shards(self) -> list[str]:
        """Names of all safetensors files, sorted."""
        return sorted(name for name in self.manifest.files if name.endswith(SHARD_SUFFIX))

    def experts_files(
        self, layer: int | None = None, ep_rank: int | None = None, tp_rank: int | None = None
    ) -> list[str]:
        """Names of experts files, by name alone: those of a layer, of a rank that they were grouped for, or all."""
        wanted = zip((layer, ep_rank, tp_rank), self._places, strict=True)
        places = product(*(every if one is None else (one,) for one, every in wanted))
        return [name for place in places for name in self._experts.get(place, ())]

    def shared_files(self) -> list[str]:
        """Names of files with the tensors that every rank reads."""
        return self._shared

    def header(self, name: str) -> ShardHeader:
        """The header of one safetensors file, held against the manifest."""
        recorded = self.manifest.files.get(name)
        if recorded is None:
            raise FormatError(f"{self.path / name} is not a file that the manifest lists")
        header = read_shard_header(self.path / name)
        if header.size != recorded.size:
            raise FormatError(
                f"{self.path / name}: found {header.size} bytes, the manifest says {recorded.size}: "
                f"{mend(self.path / name)}"
            )
        if header.checksum != recorded.checksum:
            raise FormatError(
                f"{self.path / name}: the header is not the one that the manifest records; "
                f"the file was altered or is from another conversion: {mend(self.path / name)}"
            )
        return header

    def open_experts(self, name: str) -> ExpertsFile:
        """One experts file's header and metadata, consistent with its name and the manifest."""
        header = self.header(name)
        where = str(self.path / name)
        if header.shard is None:
            raise FormatError(f"{where} has no Chord metadata: it is not an experts file")
        shard = ShardMetadata.from_string(header.shard, where)
        if shard.packing != self.manifest.packing:
            raise FormatError(f"{where} was packed with other options than the manifest says: files were mixed")
        if parse_experts_file(name) != (shard.layer, shard.ep_rank, shard.tp_rank):
            raise FormatError(
                f"{where} holds layer {shard.layer}, ep rank {shard.ep_rank}, tp rank {shard.tp_rank}: it was renamed"
            )
        file = ExpertsFile(name, header, shard)
        self._check_tensors(file)
        return file

    def _check_tensors(self, file: ExpertsFile) -> None:
        packing = self.manifest.packing
        for expert in file.metadata.experts:
            for projection in Projection:
                size = packed_bytes(*packing.shape.packed(projection, packing.layout.tp_size))
                try:
                    tensor = file.tensor(expert, projection)
                except KeyError as missing:
                    raise FormatError(f"{self.path / file.name}: no tensor {missing} in the header") from None
                if (tensor.dtype, tensor.shape) != ("U8", (size,)):
                    raise FormatError(
                        f"{self.path / file.name}: {projection.name.lower()} of expert {expert} is "
                        f"{tensor.dtype} {list(tensor.shape)}, U8 [{size}] follows from its shape"
                    )
