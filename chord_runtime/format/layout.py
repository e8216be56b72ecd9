"""Where an expert lives: modes, parallel layout, and the names of tensors and files in a packed directory."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum

from chord_runtime.errors import UsageError

MAX_FILE_BYTES = 4_500_000_000
"""No file is larger: GPU-direct loaders stage whole files in device memory."""

MANIFEST = "chord-manifest.json"
PROGRESS = "chord-progress.json"
INDEX = "model.safetensors.index.json"


class Mode(str, Enum):
    """How rows reach the experts; recorded with a weight and enforced at dispatch."""

    CONTIGUOUS = "contiguous"
    """Prefill: rows sorted by expert in runs of 128, ``m_indices`` names the expert of each row."""
    MASKED = "masked"
    """Decode: a fixed number of rows for each expert, of which ``masked_m`` are valid."""
    INDEXED = "indexed"
    """vLLM's routing: ``sorted_ids`` gathers rows in blocks, ``expert_ids`` names the expert of each block."""


ALL_MODES = tuple(Mode)


class RowOrder(str, Enum):
    """Order of a packed weight's rows."""

    PLAIN = "plain"
    GATE_UP_8 = "gate_up_8"
    """8 rows of gate, then the same 8 channels of up."""


class Placement(str, Enum):
    """Which experts an expert-parallel rank holds."""

    LINEAR = "linear"
    """Rank r holds experts r·E/ep … (r+1)·E/ep − 1."""
    ROUND_ROBIN = "round_robin"
    """Rank r holds experts r, r + ep, r + 2·ep …"""


class Projection(str, Enum):
    """The two packed weights of an expert. The value is the module name that its tensor is stored under."""

    W13 = "gate_proj"
    """gate and up, row order ``gate_up_8``: N = 2·intermediate, K = hidden."""
    W2 = "down_proj"
    """down, row order ``plain``: N = hidden, K = intermediate."""


@dataclass(frozen=True)
class ParallelLayout:
    """Expert-parallel and tensor-parallel sizes. Only ``tp_size`` changes an expert's bytes."""

    ep_size: int = 1
    tp_size: int = 1
    placement: Placement = Placement.LINEAR

    def check(self, num_experts: int, hidden: int, intermediate: int) -> None:
        """Raise UsageError unless experts divide by ``ep_size`` and a rank's slices are whole strips and blocks."""
        if self.ep_size < 1 or self.tp_size < 1:
            raise UsageError(f"ep={self.ep_size} tp={self.tp_size}: parallel sizes start at 1")
        if num_experts % self.ep_size:
            fits = [n for n in range(1, num_experts + 1) if num_experts % n == 0]
            raise UsageError(f"ep size {self.ep_size} does not divide {num_experts} experts; sizes that do: {fits}")
        if hidden % 128:
            raise UsageError(f"hidden size {hidden} is not a multiple of 128: these experts cannot be packed")
        if intermediate % (64 * self.tp_size):
            fits = [n for n in range(1, intermediate // 64 + 1) if intermediate % (64 * n) == 0]
            raise UsageError(
                f"tp size {self.tp_size} does not cut intermediate size {intermediate} into multiples of 64 "
                f"(whole blocks along K of down, whole strips of gate_up); sizes that do: {fits}"
            )

    def experts_of(self, ep_rank: int, num_experts: int) -> range:
        """Global ids of the experts that a rank holds, ascending."""
        if not 0 <= ep_rank < self.ep_size:
            raise UsageError(f"ep rank {ep_rank} is not one of 0..{self.ep_size - 1}")
        share = num_experts // self.ep_size
        if self.placement is Placement.LINEAR:
            return range(ep_rank * share, (ep_rank + 1) * share)
        return range(ep_rank, num_experts, self.ep_size)


@dataclass(frozen=True)
class ExpertShape:
    """Sizes of the routed experts: the whole ones, before tensor parallelism."""

    num_experts: int
    hidden: int
    intermediate: int

    def packed(self, projection: Projection, tp_size: int = 1) -> tuple[int, int]:
        """(N, K) of one rank's packed weight."""
        local = self.intermediate // tp_size
        return (2 * local, self.hidden) if projection is Projection.W13 else (self.hidden, local)


def row_order(projection: Projection) -> RowOrder:
    """The row order in which a projection is always packed."""
    return RowOrder.GATE_UP_8 if projection is Projection.W13 else RowOrder.PLAIN


def tensor_name(
    prefix: str, layer: int, expert: int, projection: Projection, tp_rank: int = 0, tp_size: int = 1
) -> str:
    """Name of a packed tensor, e.g. ``model.layers.3.mlp.experts.17.gate_proj.weight_packed``.

    ``prefix`` ends in ``layers.``. vLLM's loader maps ``gate_proj.weight_packed`` to ``w13_weight_packed`` and
    ``down_proj.weight_packed`` to ``w2_weight_packed``, and its EP filter reads the expert number from the name. With
    tensor parallelism the rank follows, so that names stay unique in the index.
    """
    suffix = f"_tp{tp_rank}" if tp_size > 1 else ""
    return f"{prefix}{layer}.mlp.experts.{expert}.{projection.value}.weight_packed{suffix}"


def experts_file(layer: int, ep_rank: int, layout: ParallelLayout, tp_rank: int = 0, part: int = 0) -> str:
    """Name of the file with one rank's experts of one layer; ``part`` counts files when one would be too large."""
    return (
        f"experts-layer{layer:03d}-ep{ep_rank:03d}of{layout.ep_size:03d}"
        f"-tp{tp_rank:02d}of{layout.tp_size:02d}-{part:02d}.safetensors"
    )


_EXPERTS_FILE = re.compile(r"experts-layer(\d+)-ep(\d+)of(\d+)-tp(\d+)of(\d+)-(\d+)\.safetensors")


def parse_experts_file(name: str) -> tuple[int, int, int] | None:
    """(layer, ep_rank, tp_rank) of an experts file name, None for any other file."""
    match = _EXPERTS_FILE.fullmatch(name)
    return (int(match[1]), int(match[2]), int(match[4])) if match else None


def shared_file(number: int) -> str:
    """Name of a file with tensors that every rank reads: all but the routed experts."""
    return f"shared-{number:05d}.safetensors"
