"""The last step: everything beside the weights, and the manifest that makes a directory complete."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import xxhash

from chord_convert.checkpoint import Checkpoint
from chord_convert.plan import Plan
from chord_convert.resume import release
from chord_convert.source.base import Source
from chord_convert.source.headers import header_length
from chord_runtime.format.layout import INDEX, MANIFEST
from chord_runtime.format.metadata import FileRecord, Manifest, quantization_config
from chord_runtime.format.metadata import Source as Provenance
from chord_runtime.format.shard import read_shard_header
from chord_runtime.output import write

_STALE = ("quantization_config", "compression_config")


def provenance(source: Source, plan: Plan) -> Provenance:
    """Where the weights come from: repository, commit, and the hash of each file that the plan reads.

    Where the source does not know a file's own hash, that of its header and its size stand for it.
    """
    files = {file: _file_hash(source, file) for file in (*plan.source_files, "config.json")}
    return Provenance(source.identity.name, source.identity.commit or "", files)


def _file_hash(source: Source, file: str) -> str:
    info = source.files()[file]
    if info.sha256 is not None:
        return f"sha256:{info.sha256}"
    if not file.endswith(".safetensors"):
        return f"sha256:{hashlib.sha256(source.read_bytes(file)).hexdigest()}"
    length = 8 + header_length(bytes(source.read(file, 0, 8)), file, info.size)
    return f"header-sha256:{hashlib.sha256(source.read(file, 0, length)).hexdigest()} size:{info.size}"


def file_names(plan: Plan, checkpoint: Checkpoint) -> frozenset[str]:
    """Every file of the finished directory."""
    outputs = (output.name for output in plan.outputs)
    return frozenset((*outputs, *checkpoint.side_files, "config.json", INDEX, MANIFEST))


def finish(directory: Path, plan: Plan, checkpoint: Checkpoint, source: Source, origin: Provenance) -> Manifest:
    """Write side files, config.json, index and, last, the manifest. All planned weights must be there.

    Raises SourceError or OutputError.
    """
    small: dict[str, bytes] = {name: source.read_bytes(name) for name in checkpoint.side_files}
    small["config.json"] = packed_config(checkpoint, quantization_config(plan.packing))
    records: dict[str, FileRecord] = {}
    weight_map: dict[str, str] = {}
    total = 0
    for output in plan.outputs:
        header = read_shard_header(directory / output.name)
        records[output.name] = FileRecord(header.size, header.checksum)
        weight_map.update(dict.fromkeys(header.tensors, output.name))
        total += sum(tensor.nbytes for tensor in output.layout.tensors)
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    small[INDEX] = (json.dumps(index, indent=2) + "\n").encode()
    write({directory / name: data for name, data in small.items()})
    records |= {name: FileRecord(len(data), xxhash.xxh3_128_hexdigest(data)) for name, data in small.items()}
    manifest = Manifest(plan.packing, plan.ranks, plan.experts_only, origin, records)
    write({directory / MANIFEST: manifest.to_string().encode()})
    release(directory, file_names(plan, checkpoint))
    return manifest


def packed_config(checkpoint: Checkpoint, block: Mapping[str, Any]) -> bytes:
    """The source's config.json with ``block`` where its quantization block stood, and no other such block left."""
    config = _without_blocks(checkpoint.config)
    for path in checkpoint.block_paths:
        place = config
        for key in path[:-1]:
            place = place[key]
        place["quantization_config"] = dict(block)
    return (json.dumps(config, indent=2, ensure_ascii=False) + "\n").encode()


def _without_blocks(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_blocks(item) for key, item in value.items() if key not in _STALE}
    return [_without_blocks(item) for item in value] if isinstance(value, list) else value
