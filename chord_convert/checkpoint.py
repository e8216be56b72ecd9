"""A source checkpoint that passed validation: its geometry and where every tensor lies."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import PurePosixPath
from typing import Any, NamedTuple

from chord_convert.source.headers import TensorInfo
from chord_runtime.format.layout import INDEX

PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
KINDS = ("weight_packed", "weight_scale", "weight_shape")

_EXPERT = re.compile(r"((?:.*\.)?layers\.)(0|[1-9]\d{0,5})\.mlp\.experts\.(0|[1-9]\d{0,5})\.(\w+)\.([\w.]+)", re.ASCII)
# Copied beside the weights: configuration, tokenizer, chat template, remote code, licence, model card.
_SIDE_SUFFIXES = frozenset({".json", ".jinja", ".md", ".model", ".py", ".tiktoken", ".txt"})
_SIDE_NAMES = re.compile(r"(LICEN[CS]E|NOTICE|COPYING|THIRD_PARTY|USE_POLICY)", re.IGNORECASE)
# Written anew for the output, or true of the source's quantization only.
_NOT_COPIED = frozenset({"config.json", INDEX, "hf_quant_config.json", "quant_config.json", "quantize_config.json"})


class ExpertName(NamedTuple):
    """A routed expert's tensor name, taken apart: ``{prefix}{layer}.mlp.experts.{expert}.{projection}.{kind}``."""

    prefix: str
    layer: int
    expert: int
    projection: str
    kind: str


def parse_expert(name: str) -> ExpertName | None:
    """Take a routed expert's tensor name apart, or None when ``name`` is no such name."""
    match = _EXPERT.fullmatch(name)
    if match is None:
        return None
    return ExpertName(match[1], int(match[2]), int(match[3]), match[4], match[5])


def side_files(files: Iterable[str]) -> tuple[str, ...]:
    """Which of a checkpoint's files travel with the weights: those at the top, and Python files wherever they are."""
    chosen = []
    for file in sorted(files):
        path = PurePosixPath(file)
        wanted = path.suffix in _SIDE_SUFFIXES or _SIDE_NAMES.match(path.name)
        if wanted and file not in _NOT_COPIED and (len(path.parts) == 1 or path.suffix == ".py"):
            chosen.append(file)
    return tuple(chosen)


@dataclass(frozen=True)
class Checkpoint:
    """What the planner and the packer need to know. Every tensor named by these fields exists with the right shape.

    ``prefix`` is all of a name before the layer number, ``layers`` the MoE layers' numbers, ``hidden`` and
    ``intermediate`` the model's and an expert's width in elements, ``tensors`` every tensor of the checkpoint.
    ``block_paths`` says where in ``config`` the quantization block stands (more than once only if equal), as keys from
    the top, the last being quantization_config or its older name compression_config. ``side_files`` are to be copied.
    """

    prefix: str
    layers: tuple[int, ...]
    num_experts: int
    hidden: int
    intermediate: int
    top_k: int
    tensors: Mapping[str, TensorInfo]
    config: Mapping[str, Any]
    block_paths: tuple[tuple[str, ...], ...]
    side_files: tuple[str, ...]

    def expert(self, layer: int, expert: int, projection: str, kind: str = "weight_packed") -> TensorInfo:
        """The tensor of a routed expert: ``projection`` from PROJECTIONS, ``kind`` from KINDS."""
        return self.tensors[f"{self.prefix}{layer}.mlp.experts.{expert}.{projection}.{kind}"]

    def shape(self, projection: str) -> tuple[int, int]:
        """(out, in) of a projection in elements: N and K."""
        down = projection == "down_proj"
        return (self.hidden, self.intermediate) if down else (self.intermediate, self.hidden)

    @cached_property
    def other_tensors(self) -> tuple[str, ...]:
        """Names of all tensors that pass through unchanged, in the order in which they lie in the files."""
        names = (name for name in self.tensors if parse_expert(name) is None)
        return tuple(sorted(names, key=lambda name: (self.tensors[name].file, self.tensors[name].start)))
