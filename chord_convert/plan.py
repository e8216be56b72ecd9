"""What goes where: from a valid checkpoint and options to the list of files to write. Pure: no disk, no network.

The work divides by (layer, ep rank): one task writes the rank's experts of one layer for all tp ranks, because a
tp slice of down is a few bytes of every row: slice by slice, the whole tensor would be read once for each. A task
writes at most ``MAX_FILE_BYTES`` in all; a larger one is split by experts into parts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from chord_convert.checkpoint import PROJECTIONS, Checkpoint
from chord_convert.source.base import Identity
from chord_convert.source.headers import TensorInfo
from chord_runtime.errors import UsageError
from chord_runtime.format.block import packed_bytes
from chord_runtime.format.layout import (
    ALL_MODES,
    MAX_FILE_BYTES,
    ExpertShape,
    Mode,
    ParallelLayout,
    Projection,
    experts_file,
    shared_file,
    tensor_name,
)
from chord_runtime.format.metadata import Packing, ShardMetadata
from chord_runtime.format.metadata import Source as Provenance
from chord_runtime.format.shard import ShardLayout, TensorSpec
from chord_runtime.units import human

# A tensor's entries in a header, at most; keeps files with their header below the limit.
_ENTRY_BYTES = 1024


@dataclass(frozen=True)
class Options:
    """What was asked for. ``ranks`` are the ep ranks to write, None for all of them."""

    layout: ParallelLayout
    modes: tuple[Mode, ...] = ALL_MODES
    ranks: tuple[int, ...] | None = None
    experts_only: bool = False


@dataclass(frozen=True, slots=True)
class SourceWeight:
    """A quantized module of the source: int32 [N, K/8] words and bfloat16 [N, K/32] scales."""

    words: TensorInfo
    scale: TensorInfo


@dataclass(frozen=True, slots=True)
class SourceExpert:
    """The three modules of one expert."""

    gate: SourceWeight
    up: SourceWeight
    down: SourceWeight

    def tensors(self) -> Iterator[TensorInfo]:
        """The six tensors."""
        for weight in (self.gate, self.up, self.down):
            yield from (weight.words, weight.scale)


@dataclass(frozen=True)
class OutputFile:
    """A file of the packed directory, and what will be in it."""

    name: str
    layout: ShardLayout


@dataclass(frozen=True)
class ExpertsTask:
    """Pack experts of one layer and ep rank; ``outputs`` has one file for each tp rank."""

    experts: tuple[SourceExpert, ...]
    outputs: tuple[OutputFile, ...]


@dataclass(frozen=True)
class SharedTask:
    """Copy tensors that every rank reads, bit for bit, into the one file of ``outputs``."""

    tensors: tuple[TensorInfo, ...]
    outputs: tuple[OutputFile, ...]


Task = ExpertsTask | SharedTask


@dataclass(frozen=True)
class Plan:
    """Everything a conversion writes, in order."""

    packing: Packing
    ranks: tuple[int, ...]
    experts_only: bool
    identity: Identity
    tasks: tuple[Task, ...]
    source_files: tuple[str, ...]
    """Files with weights that the tasks read."""
    read_bytes: int
    """Bytes of those files that are needed."""

    @property
    def outputs(self) -> Iterator[OutputFile]:
        """All files of all tasks."""
        return (output for task in self.tasks for output in task.outputs)

    @property
    def write_bytes(self) -> int:
        """Size of all output files in bytes."""
        return sum(output.layout.size for output in self.outputs)

    def to_json(self) -> dict[str, Any]:
        """The plan for machines."""
        return {
            "source": {"repo": self.identity.name, "commit": self.identity.commit or ""},
            "packing": self.packing.to_json(),
            "ep_ranks": list(self.ranks),
            "experts_only": self.experts_only,
            "files": {output.name: output.layout.size for output in self.outputs},
            "read_bytes": self.read_bytes,
            "write_bytes": self.write_bytes,
        }

    def lines(self) -> list[str]:
        """The plan for people."""
        packing, layout, shape = self.packing, self.packing.layout, self.packing.shape
        experts = [o.layout.size for task in self.tasks if isinstance(task, ExpertsTask) for o in task.outputs]
        shared = [o.layout.size for task in self.tasks if isinstance(task, SharedTask) for o in task.outputs]
        held = shape.num_experts // layout.ep_size
        commit = f" at {self.identity.commit}" if self.identity.commit else ""
        shapes = ", ".join(
            f"{p.name.lower()} [{', '.join(map(str, shape.packed(p, layout.tp_size)))}]" for p in Projection
        )
        lines = [
            f"source    {self.identity.name}{commit}",
            f"experts   {len(packing.layers)} layers × {shape.num_experts} experts, "
            f"hidden {shape.hidden}, intermediate {shape.intermediate}, {packing.prefix}",
            f"modes     {', '.join(mode.value for mode in packing.modes)}",
            f"parallel  ep {layout.ep_size} × tp {layout.tp_size}, {layout.placement.value}: "
            f"{held} experts a rank, {shapes}; N % 128 = 0 and K % 64 = 0 hold for every mode",
        ]
        if len(self.ranks) < layout.ep_size:
            lines.append(f"ranks     {', '.join(map(str, self.ranks))} of {layout.ep_size}")
        lines.append(f"files     {len(experts)} with experts, {human(sum(experts))}, largest {human(max(experts))}")
        if shared:
            lines.append(f"          {len(shared)} with all other tensors, {human(sum(shared))}, bit for bit")
        lines.append(f"reads     {human(self.read_bytes)} from {len(self.source_files)} files")
        return lines


def make_plan(checkpoint: Checkpoint, identity: Identity, options: Options) -> Plan:
    """Plan a conversion. Raises UsageError for parallel sizes or ranks that do not fit."""
    shape = ExpertShape(checkpoint.num_experts, checkpoint.hidden, checkpoint.intermediate)
    options.layout.check(shape.num_experts, shape.hidden, shape.intermediate)
    ranks = _ranks(options)
    packing = Packing(options.modes, options.layout, shape, tuple(checkpoint.layers), checkpoint.prefix)
    provenance = Provenance(identity.name, identity.commit or "")
    tasks: list[Task] = [
        task
        for layer in packing.layers
        for rank in ranks
        for task in _experts_tasks(checkpoint, packing, provenance, layer, rank)
    ]
    if not options.experts_only:
        # First, because these files are the largest: none of them is left to a single worker at the end.
        tasks = [*_shared_tasks([checkpoint.tensors[name] for name in checkpoint.other_tensors]), *tasks]
    read = [tensor for task in tasks for tensor in source_tensors(task)]
    return Plan(
        packing=packing,
        ranks=ranks,
        experts_only=options.experts_only,
        identity=identity,
        tasks=tuple(tasks),
        source_files=tuple(sorted({tensor.file for tensor in read})),
        read_bytes=sum(tensor.nbytes for tensor in read),
    )


def _ranks(options: Options) -> tuple[int, ...]:
    size = options.layout.ep_size
    if options.ranks is None:
        return tuple(range(size))
    wrong = [rank for rank in options.ranks if not 0 <= rank < size]
    if wrong or not options.ranks:
        raise UsageError(f"--ranks {','.join(map(str, wrong))}: with --ep {size} ranks are 0..{size - 1}")
    return tuple(sorted(set(options.ranks)))


def _experts_tasks(
    checkpoint: Checkpoint, packing: Packing, provenance: Provenance, layer: int, rank: int
) -> Iterator[ExpertsTask]:
    layout, shape = packing.layout, packing.shape
    held = layout.experts_of(rank, shape.num_experts)
    expert_bytes = layout.tp_size * sum(packed_bytes(*shape.packed(p, layout.tp_size)) for p in Projection)
    fitting = max(1, MAX_FILE_BYTES // (expert_bytes + len(Projection) * layout.tp_size * _ENTRY_BYTES))
    parts = -(-len(held) // fitting)
    for part in range(parts):
        experts = held[len(held) * part // parts : len(held) * (part + 1) // parts]
        outputs = []
        for tp_rank in range(layout.tp_size):
            metadata = ShardMetadata(packing, layer, rank, tp_rank, tuple(experts), provenance).to_string()
            specs = tuple(_packed_spec(packing, layer, expert, p, tp_rank) for expert in experts for p in Projection)
            outputs.append(OutputFile(experts_file(layer, rank, layout, tp_rank, part), ShardLayout(specs, metadata)))
        sources = tuple(source_expert(checkpoint, layer, expert) for expert in experts)
        yield ExpertsTask(sources, tuple(outputs))


def _packed_spec(packing: Packing, layer: int, expert: int, projection: Projection, tp_rank: int) -> TensorSpec:
    tp_size = packing.layout.tp_size
    size = packed_bytes(*packing.shape.packed(projection, tp_size))
    return TensorSpec(tensor_name(packing.prefix, layer, expert, projection, tp_rank, tp_size), "U8", (size,), size)


def source_expert(checkpoint: Checkpoint, layer: int, expert: int) -> SourceExpert:
    """Where the three modules of an expert lie."""
    weights = (
        SourceWeight(
            checkpoint.expert(layer, expert, projection), checkpoint.expert(layer, expert, projection, "weight_scale")
        )
        for projection in PROJECTIONS
    )
    return SourceExpert(*weights)


def _shared_tasks(tensors: list[TensorInfo]) -> Iterator[SharedTask]:
    groups: list[list[TensorInfo]] = []
    size = MAX_FILE_BYTES
    for tensor in tensors:
        size += tensor.nbytes + _ENTRY_BYTES
        if size > MAX_FILE_BYTES:
            groups.append([])
            size = tensor.nbytes + _ENTRY_BYTES
        groups[-1].append(tensor)
    for number, group in enumerate(groups):
        specs = tuple(TensorSpec(tensor.name, tensor.dtype, tensor.shape, tensor.nbytes) for tensor in group)
        yield SharedTask(tuple(group), (OutputFile(shared_file(number), ShardLayout(specs)),))


def source_tensors(task: Task) -> Iterator[TensorInfo]:
    """What a task reads."""
    if isinstance(task, SharedTask):
        yield from task.tensors
        return
    for expert in task.experts:
        yield from expert.tensors()
