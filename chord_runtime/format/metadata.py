"""What a packed directory says of itself: the metadata of every shard, the manifest, and the block in config.json.

All three are JSON, described by ``schemas/*.schema.json``, and validated by them whenever they are read.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import xxhash
from jsonschema.exceptions import best_match

from chord_runtime.errors import ChordError, FormatError, UnreadableError, UsageError, advice
from chord_runtime.format.block import FORMAT_VERSION, GROUP_SIZE
from chord_runtime.format.layout import (
    ALL_MODES,
    MANIFEST,
    PROGRESS,
    ExpertShape,
    Mode,
    ParallelLayout,
    Placement,
    Projection,
    row_order,
)
from chord_runtime.resources import validator
from chord_runtime.version import VERSION

SHARD_KEY = "chord"
"""Key of the shard metadata in a safetensors ``__metadata__``."""

CHECKSUMS_KEY = "chord_checksums"
"""Key of a JSON object tensor name → XXH3-128 (hex) of its bytes, in the same place."""

_EDITED = "it was altered, or another tool wrote it: fetch it again, or convert into another directory"


@dataclass(frozen=True)
class Source:
    """Where the weights came from. ``commit`` is empty for a directory without one."""

    repo: str
    commit: str
    files: Mapping[str, str] = field(default_factory=dict)
    """File name → "sha256:…" of the file where the Hub states it, else "header-sha256:…" and size of what was read."""


@dataclass(frozen=True)
class Packing:
    """Everything that decides the bytes of the packed experts."""

    modes: tuple[Mode, ...]
    layout: ParallelLayout
    shape: ExpertShape
    layers: tuple[int, ...]
    """Numbers of the layers with routed experts."""
    prefix: str
    """Tensor name prefix up to and including ``layers.``"""

    def to_json(self) -> dict[str, Any]:
        """The JSON object shared by shard metadata and manifest."""
        return {
            "format_version": FORMAT_VERSION,
            "modes": [mode.value for mode in self.modes],
            "ep_size": self.layout.ep_size,
            "tp_size": self.layout.tp_size,
            "placement": self.layout.placement.value,
            "num_experts": self.shape.num_experts,
            "hidden_size": self.shape.hidden,
            "intermediate_size": self.shape.intermediate,
            "layers": list(self.layers),
            "prefix": self.prefix,
            "group_size": GROUP_SIZE,
            "activation_order": None,
            "shapes": {p.name.lower(): list(self.shape.packed(p, self.layout.tp_size)) for p in Projection},
            "row_order": {p.name.lower(): row_order(p).value for p in Projection},
        }

    @classmethod
    def from_config(cls, config: Mapping[str, Any], where: str = "quantization_config in config.json") -> Packing:
        """From config.json's ``quantization_config``; raises FormatError for one that Chord did not write."""
        _check_version(config.get("format_version"), where)
        _check_schema(config, "packed-config", where)
        return cls.from_json(config, where)

    @classmethod
    def from_json(cls, data: Mapping[str, Any], where: str = "the packing") -> Packing:
        """Inverse of ``to_json`` for an object that its schema has accepted; raises FormatError naming ``where``."""
        packing = cls(
            modes=tuple(Mode(mode) for mode in data["modes"]),
            layout=ParallelLayout(data["ep_size"], data["tp_size"], Placement(data["placement"])),
            shape=ExpertShape(data["num_experts"], data["hidden_size"], data["intermediate_size"]),
            layers=tuple(data["layers"]),
            prefix=data["prefix"],
        )
        try:
            packing.layout.check(packing.shape.num_experts, packing.shape.hidden, packing.shape.intermediate)
        except UsageError as error:
            raise FormatError(f"{where}: {error}; {_EDITED}") from None
        if packing.to_json() != {key: data[key] for key in packing.to_json()}:
            raise FormatError(
                f"{where}: the shapes or row orders recorded do not follow from the sizes recorded; {_EDITED}"
            )
        return packing


@dataclass(frozen=True)
class ShardMetadata:
    """The ``chord`` entry in the ``__metadata__`` of one experts file."""

    packing: Packing
    layer: int
    ep_rank: int
    tp_rank: int
    experts: tuple[int, ...]
    """Global ids of the experts in this file."""
    source: Source

    def to_string(self) -> str:
        """Compact JSON with sorted keys: the same shard gives the same bytes."""
        return dumps(
            {
                "packing": self.packing.to_json(),
                "layer": self.layer,
                "ep_rank": self.ep_rank,
                "tp_rank": self.tp_rank,
                "experts": list(self.experts),
                "source": {"repo": self.source.repo, "commit": self.source.commit},
            }
        )

    @classmethod
    def from_string(cls, text: str, where: str) -> ShardMetadata:
        """Parse and validate; raises FormatError naming ``where``."""
        data = checked(text, "shard", where)
        return cls(
            packing=Packing.from_json(data["packing"], where),
            layer=data["layer"],
            ep_rank=data["ep_rank"],
            tp_rank=data["tp_rank"],
            experts=tuple(data["experts"]),
            source=Source(data["source"]["repo"], data["source"]["commit"]),
        )


@dataclass(frozen=True)
class FileRecord:
    """One file of a packed directory."""

    size: int
    checksum: str
    """XXH3-128 of a safetensors file's header bytes (length prefix included), or of any other file's bytes."""


@dataclass(frozen=True)
class Manifest:
    """``chord-manifest.json``: written last, so its presence means that the directory is complete."""

    packing: Packing
    ep_ranks: tuple[int, ...]
    """Ranks whose experts are here; all of them unless only some were asked for."""
    experts_only: bool
    source: Source
    files: Mapping[str, FileRecord]
    tool_version: str = VERSION

    def to_json(self) -> dict[str, Any]:
        """The JSON object, with ``checksum``: XXH3-128 (hex) of the rest of it as compact JSON with sorted keys."""
        data: dict[str, Any] = {
            "packing": self.packing.to_json(),
            "ep_ranks": list(self.ep_ranks),
            "experts_of_rank": {
                str(rank): list(self.packing.layout.experts_of(rank, self.packing.shape.num_experts))
                for rank in self.ep_ranks
            },
            "experts_only": self.experts_only,
            "source": {"repo": self.source.repo, "commit": self.source.commit, "files": dict(self.source.files)},
            "files": {name: {"size": f.size, "checksum": f.checksum} for name, f in self.files.items()},
            "tool_version": self.tool_version,
        }
        return {**data, "checksum": xxhash.xxh3_128_hexdigest(dumps(data).encode())}

    def to_string(self) -> str:
        """Indented JSON with sorted keys, ending in a newline."""
        return json.dumps(self.to_json(), indent=1, sort_keys=True) + "\n"

    @classmethod
    def from_string(cls, text: str | bytes, where: str) -> Manifest:
        """Parse and validate; raises FormatError naming ``where``."""
        data = checked(text, "manifest", where)
        manifest = cls(
            packing=Packing.from_json(data["packing"], where),
            ep_ranks=tuple(data["ep_ranks"]),
            experts_only=data["experts_only"],
            source=Source(data["source"]["repo"], data["source"]["commit"], data["source"]["files"]),
            files={name: FileRecord(f["size"], f["checksum"]) for name, f in data["files"].items()},
            tool_version=data["tool_version"],
        )
        try:
            written = manifest.to_json()
        except UsageError as error:
            raise FormatError(f"{where}: {error}; {_EDITED}") from None
        if different := [key for key in written if written[key] != data[key]]:
            raise FormatError(f"{where}: {', '.join(different)} do not follow from the rest; {_EDITED}")
        return manifest

    @classmethod
    def read(cls, directory: Path) -> Manifest:
        """The manifest of a finished directory; raises FormatError if there is none, or one that was altered."""
        path = directory / MANIFEST
        try:
            return cls.from_string(path.read_bytes(), str(path))
        except (FileNotFoundError, NotADirectoryError):
            if not directory.is_dir():
                raise FormatError(
                    f"{directory} is not a directory; supported: one that chord-convert has made: check the path"
                ) from None
            if begun := _begun(directory / PROGRESS):
                raise FormatError(
                    f"{directory} is unfinished: its conversion was interrupted, or still runs. The same command "
                    f"goes on from the files that are finished; it was begun as: {begun} -o {directory}"
                ) from None
            raise FormatError(
                f"{directory} has no {MANIFEST}: it is not a packed directory, or its conversion has not finished; "
                "run chord-convert again with the same options to finish it"
            ) from None
        except OSError as error:
            helps = advice(error, "check its permissions and the disk")
            kind = FormatError if isinstance(error, IsADirectoryError) else UnreadableError
            raise kind(f"{path} cannot be read: {error.strerror}; {helps}") from None


def _begun(progress: Path) -> str | None:
    """The command that an unfinished directory's record tells of; None without a record that can be understood."""
    try:
        data = json.loads(progress.read_bytes())
        packing, ranks = Packing.from_json(data["packing"], str(progress)), tuple(map(int, data["ep_ranks"]))
        repo, commit = data["source"]["repo"], data["source"]["commit"]
        experts_only = bool(data["experts_only"])
    except (OSError, ValueError, LookupError, TypeError, ChordError):
        return None
    layout = packing.layout
    words = ["chord-convert", str(repo), f"--ep {layout.ep_size} --tp {layout.tp_size}"]
    words += [f"--placement {layout.placement.value}"] * (layout.placement is not Placement.LINEAR)
    words += [f"--mode {mode.value}" for mode in packing.modes if packing.modes != ALL_MODES]
    words += [f"--ranks {','.join(map(str, ranks))}"] * (len(ranks) < layout.ep_size)
    words += ["--experts-only"] * experts_only
    words += [f"--revision {commit}"] * bool(commit)
    return " ".join(words)


def quantization_config(packing: Packing) -> dict[str, Any]:
    """The ``quantization_config`` of a packed checkpoint's config.json."""
    return {"quant_method": "chord", **packing.to_json()}


def dumps(data: Any) -> str:
    """Compact JSON with sorted keys."""
    return json.dumps(data, separators=(",", ":"), sort_keys=True)


def checked(text: str | bytes, schema_name: str, where: str) -> dict[str, Any]:
    """Parse JSON and hold it against a schema and this format version; raises FormatError naming ``where``."""
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{where} is not JSON ({error}); {_EDITED}") from None
    packing = data.get("packing") if isinstance(data, dict) else None
    if isinstance(packing, dict):
        _check_version(packing.get("format_version"), where)
    _check_schema(data, schema_name, where)
    assert isinstance(data, dict)
    return data


def _check_version(version: object, where: str) -> None:
    if version is not None and version != FORMAT_VERSION:
        raise FormatError(
            f"{where} is packed format version {version}; this Chord reads version {FORMAT_VERSION}: "
            "install the matching chord-moe or convert again into another directory"
        )


def _check_schema(data: Any, schema_name: str, where: str) -> None:
    error = best_match(validator(schema_name).iter_errors(data))
    if error is not None:
        place = "/".join(str(part) for part in error.absolute_path) or "the top level"
        found = error.message if len(error.message) <= 200 else f"{error.message[:200]}…"
        raise FormatError(f"{where}: {found} at {place}; {_EDITED}")
