"""What the validation rules look at: everything read from a source once, before any rule runs."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import PurePosixPath
from typing import Any

from chord_convert.checkpoint import ExpertName, parse_expert
from chord_convert.report import Problem
from chord_convert.source.headers import TensorInfo, Tensors

BLOCK = "quantization_config"
# Where loaders look for the block of the language model, in this order; compression_config is its older name.
PLACES: tuple[tuple[str, ...], ...] = (
    ("text_config", BLOCK),
    (BLOCK,),
    ("text_config", "compression_config"),
    ("compression_config",),
)


@dataclass(frozen=True)
class Facts:
    """A checkpoint as found. ``headers`` lacks files whose header is broken or that were not to be read.

    ``weight_map`` (tensor name → file) is None without a usable index, ``hf_quant`` without hf_quant_config.json.
    """

    files: frozenset[str]
    config: Mapping[str, Any]
    hf_quant: Mapping[str, Any] | None
    weight_map: Mapping[str, str] | None
    total_size: Any
    headers: Mapping[str, Tensors]
    broken: frozenset[str]
    tensors: Mapping[str, TensorInfo] = field(default_factory=dict)

    @cached_property
    def text(self) -> Mapping[str, Any]:
        """The part of the config that describes the language model."""
        nested = self.config.get("text_config")
        return nested if isinstance(nested, dict) else self.config

    @cached_property
    def text_key(self) -> str:
        """How messages call keys of :attr:`text`."""
        return "text_config." if self.text is not self.config else ""

    @cached_property
    def blocks(self) -> dict[tuple[str, ...], Any]:
        """Every non-null quantization block in the config, by the keys that lead to it."""
        return dict(_find_blocks(self.config, ()))

    @cached_property
    def block(self) -> Mapping[str, Any] | None:
        """The quantization block that describes the language model; None when there is none, or not an object."""
        block = next((self.blocks[path] for path in PLACES if path in self.blocks), None)
        return block if isinstance(block, dict) else None

    @cached_property
    def block_key(self) -> str:
        """How messages call :attr:`block`."""
        return ".".join(next((path for path in PLACES if path in self.blocks), (BLOCK,)))

    @cached_property
    def shards(self) -> list[str]:
        """The safetensors files at the top of the checkpoint."""
        return [file for file in sorted(self.files) if file.endswith(".safetensors") and "/" not in file]

    @cached_property
    def names(self) -> frozenset[str]:
        """Tensors that exist, or that the index puts into a file that cannot be read: never to be called missing."""
        unreadable = {name for name, file in (self.weight_map or {}).items() if file not in self.headers}
        return frozenset(self.tensors) | unreadable

    @cached_property
    def experts(self) -> dict[str, ExpertName]:
        """Names of the routed experts' tensors, taken apart."""
        parsed = ((name, parse_expert(name)) for name in self.tensors)
        return {name: expert for name, expert in parsed if expert is not None}

    @cached_property
    def expert_names(self) -> list[ExpertName]:
        """The same for :attr:`names`: with those that the index puts into a file that cannot be read."""
        unread = (parse_expert(name) for name in self.names - self.tensors.keys())
        return [*self.experts.values(), *(expert for expert in unread if expert is not None)]

    @cached_property
    def prefix(self) -> str | None:
        """What stands before the layer number in the experts' names: the commonest, when there are several."""
        counts = Counter(expert.prefix for expert in self.expert_names)
        return counts.most_common(1)[0][0] if counts else None

    @cached_property
    def experts_of_layer(self) -> dict[int, set[int]]:
        """Numbers of the experts of each layer of which any tensor is known, under :attr:`prefix`."""
        found: dict[int, set[int]] = defaultdict(set)
        for expert in self.expert_names:
            if expert.prefix == self.prefix:
                found[expert.layer].add(expert.expert)
        return dict(found)

    @cached_property
    def expert_dtypes(self) -> dict[str, set[str]]:
        """Dtypes that occur among the routed experts' tensors, by kind (``weight_packed``, ``weight_scale``, …)."""
        dtypes: dict[str, set[str]] = defaultdict(set)
        for name, expert in self.experts.items():
            dtypes[expert.kind].add(self.tensors[name].dtype)
        return dict(dtypes)

    def has_suffix(self, *suffixes: str) -> list[str]:
        """Files anywhere whose name ends in one of ``suffixes``."""
        return [file for file in sorted(self.files) if PurePosixPath(file).suffix in suffixes]

    def number(self, key: str) -> int | None:
        """A positive whole number of the language model's config, None when it is missing or something else."""
        value = self.text.get(key)
        return value if type(value) is int and value > 0 else None

    @cached_property
    def moe_layers(self) -> list[int] | None:
        """Numbers of the layers that must have routed experts, None when the config does not tell."""
        layers = self.number("num_hidden_layers")
        first, every = (self.text.get(key) for key in ("first_k_dense_replace", "moe_layer_freq"))
        first, every = 0 if first is None else first, 1 if every is None else every
        # A model has tens of layers: a number beyond is a config to distrust, not a list to build.
        if layers is None or layers > 10_000 or type(first) is not int or type(every) is not int or every < 1:
            return None
        return [layer for layer in range(layers) if layer >= first and layer % every == 0]


Rule = Callable[[Facts], Iterator[Problem]]


def _find_blocks(node: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    if not isinstance(node, dict):
        return
    for key, value in node.items():
        if key in (BLOCK, "compression_config") and value is not None:
            yield (*path, key), value
        elif len(path) < 4:
            yield from _find_blocks(value, (*path, key))


def without_nulls(value: Any) -> Any:
    """The same JSON without null keys: newer compressed-tensors leave them out, so missing means null."""
    if isinstance(value, dict):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [without_nulls(item) for item in value]
    return value
