"""``--load-format chord``: every rank opens only the files with its own experts and reads them straight into place."""

from __future__ import annotations

import copy
import json
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from huggingface_hub import snapshot_download
from safetensors import safe_open
from torch import Tensor, nn
from vllm.config import ModelConfig
from vllm.config.load import LoadConfig
from vllm.logger import init_logger
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

from chord_runtime.errors import FormatError
from chord_runtime.format.layout import INDEX, Projection, tensor_name
from chord_runtime.format.metadata import Packing
from chord_runtime.integrations.vllm.config import layer_number
from chord_runtime.integrations.vllm.method import PackedExpertsMethod
from chord_runtime.loader import Wanted, read_tensors
from chord_runtime.packed_dir import PackedDir

logger = init_logger("vllm.chord")

SHARED_FILES = ("*.json", "shared-*.safetensors")
"""What every rank needs of a packed directory."""

THREADS = 8
"""Readers of a rank: enough to keep a local NVMe drive or a parallel file system busy."""

Targets = dict[str, Tensor]
"""Tensor name → where its bytes go: one expert's row of a parameter."""


class ChordModelLoader(DefaultModelLoader):
    """Shared tensors through the model's own loading, experts by positional reads of this rank's files."""

    def __init__(self, load_config: LoadConfig) -> None:
        as_safetensors = copy.copy(load_config)
        as_safetensors.load_format = "safetensors"
        super().__init__(as_safetensors)

    def download_model(self, model_config: ModelConfig) -> None:
        """Fetch what every rank needs; which experts this one needs is known once the model is built."""
        self._directory(model_config, SHARED_FILES)

    def get_all_weights(self, model_config: ModelConfig, model: nn.Module) -> Iterator[tuple[str, Tensor]]:
        """All tensors but the experts'. vLLM's own reader insists on every file of the index, other ranks' too."""
        self.counter_before_loading_weights = time.perf_counter()
        packed = PackedDir(self._directory(model_config, SHARED_FILES))
        for name in packed.shared_files():
            with safe_open(packed.path / name, framework="pt") as file:
                for key in file.keys():  # noqa: SIM118 - not a dict
                    yield key, file.get_tensor(key)

    def _directory(self, model_config: ModelConfig, files: Iterable[str]) -> Path:
        """A local directory as it is, or the Hub's snapshot with at least these files."""
        if Path(model_config.model).is_dir():
            return Path(model_config.model)
        return Path(
            snapshot_download(
                model_config.model,
                revision=model_config.revision,
                cache_dir=self.load_config.download_dir,
                allow_patterns=list(files),
            )
        )

    def load_weights(self, model: nn.Module, model_config: ModelConfig) -> None:
        """Load a packed directory; raises FormatError for another one, or one whose files are not this rank's."""
        layers = dict(_packed_layers(model))
        if not layers:
            raise FormatError(
                f"--load-format chord reads packed directories and {model_config.model} is not one: "
                "convert it with chord-convert, or start without --load-format"
            )
        directory = self._directory(model_config, SHARED_FILES)
        super().load_weights(model, model_config)
        started = time.perf_counter()
        files = _files_of(layers, directory)
        packed = PackedDir(self._directory(model_config, files))
        with ThreadPoolExecutor(THREADS, thread_name_prefix="chord-load") as pool:
            reads = [pool.submit(_read_file, packed, name, files[name]) for name in sorted(files)]
            total = sum(read.result() for read in reads)
        for method in layers.values():
            method.all_loaded()
        seconds = time.perf_counter() - started
        logger.info(
            "Chord read this rank's experts: %d bytes in %.2f s (%.2f GB/s) from %d of %d experts files, %d layers",
            total, seconds, total / 1e9 / seconds, len(files), len(packed.experts_files()), len(layers),
        )  # fmt: skip


def _packed_layers(model: nn.Module) -> Iterator[tuple[RoutedExperts, PackedExpertsMethod]]:
    for module in model.modules():
        if isinstance(module, RoutedExperts) and isinstance(module.quant_method, PackedExpertsMethod):
            yield module, module.quant_method


def _files_of(layers: dict[RoutedExperts, PackedExpertsMethod], directory: Path) -> dict[str, Targets]:
    """The experts files that this rank needs, and where their tensors go; names alone decide."""
    try:
        index: dict[str, str] = json.loads((directory / INDEX).read_text())["weight_map"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise FormatError(f"{directory / INDEX} cannot be used ({error!r}): fetch or convert it again") from None
    files: dict[str, Targets] = defaultdict(dict)
    for layer, method in layers.items():
        for name, target in _targets(layer, method, method.packing).items():
            if name not in index:
                raise FormatError(
                    f"{directory} has no {name}: it holds other ranks only (see chord inspect); "
                    "convert or fetch the ranks of this deployment"
                )
            files[index[name]][name] = target
    return dict(files)


def _targets(layer: RoutedExperts, method: PackedExpertsMethod, packing: Packing) -> Targets:
    """Row of this rank's parameters for each of its tensors of one layer."""
    number, tp_size = layer_number(layer.layer_name), packing.layout.tp_size
    return {
        tensor_name(packing.prefix, number, expert, which, method.moe.tp_rank, tp_size): rows[local]
        for which in Projection
        for rows in [method.parameter(layer, which).data]
        for expert, local in enumerate(method.local_ids)
        if local >= 0
    }


def _read_file(packed: PackedDir, file_name: str, targets: Targets) -> int:
    """Read the tensors named in ``targets`` into place; returns the bytes read."""
    stored = packed.open_experts(file_name).header.tensors
    missing = targets.keys() - stored.keys()
    if missing:
        raise FormatError(f"{packed.path / file_name} has no {min(missing)}: fetch or convert it again")
    wanted = [Wanted(name, stored[name], target) for name, target in targets.items()]
    read_tensors(packed.path / file_name, wanted, verify=False)
    return sum(target.nbytes for target in targets.values())
