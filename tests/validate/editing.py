"""Changes a checkpoint on disk, the way people and tools do."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from chord_convert.source import LocalSource
from chord_convert.validate import Report, validate

INDEX = "model.safetensors.index.json"
EXPERT = "model.layers.1.mlp.experts.2.up_proj"


class Editor:
    """A checkpoint directory that can be written to."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def json(self, file: str, change: Callable[[dict[str, Any]], object]) -> None:
        """Load ``file``, let ``change`` work on it, write it back."""
        parsed = json.loads((self.path / file).read_text())
        change(parsed)
        (self.path / file).write_text(json.dumps(parsed))

    def config(self, **changes: Any) -> None:
        """Set keys of config.json; ``...`` removes one."""
        self.json("config.json", lambda config: _set(config, changes))

    def block(self, **changes: Any) -> None:
        """Set keys of the quantization block."""
        self.json("config.json", lambda config: _set(_block(config), changes))

    def group(self, **changes: Any) -> None:
        """Set keys of the one config group."""
        self.json("config.json", lambda config: _set(_block(config)["config_groups"]["group_0"], changes))

    def weights(self, **changes: Any) -> None:
        """Set keys of the group's weights."""
        self.json("config.json", lambda config: _set(_block(config)["config_groups"]["group_0"]["weights"], changes))

    def shards(self) -> list[str]:
        """Names of the shards."""
        return sorted(path.name for path in self.path.glob("*.safetensors"))

    def tensors(self, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
        """Let ``change`` work on all tensors, and save each in the shard of its layer, with an index that says so."""
        files = {_layer(name): file for file in self.shards() for name in load_file(self.path / file)}
        tensors = {name: tensor for file in self.shards() for name, tensor in load_file(self.path / file).items()}
        change(tensors)
        weight_map = {name: files[_layer(name)] for name in tensors}
        for file in self.shards():
            here = {name: tensor.clone() for name, tensor in tensors.items() if weight_map[name] == file}
            save_file(here, self.path / file)
        total = sum(tensor.nbytes for tensor in tensors.values())
        text = json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map})
        (self.path / INDEX).write_text(text)

    def rename(self, change: Callable[[str], str]) -> None:
        """Rename tensors."""
        self.tensors(lambda tensors: _replace(tensors, {change(name): tensor for name, tensor in tensors.items()}))

    def convert_experts(self, change: Callable[[str], dict[str, torch.Tensor]]) -> None:
        """Replace the three tensors of every expert's projection by what ``change`` makes of its module name."""

        def work(tensors: dict[str, torch.Tensor]) -> None:
            for name in [name for name in tensors if name.endswith(".weight_packed")]:
                module = name.removesuffix(".weight_packed")
                for kind in ("packed", "scale", "shape"):
                    del tensors[f"{module}.weight_{kind}"]
                tensors.update({f"{module}.{kind}": tensor for kind, tensor in change(module).items()})

        self.tensors(work)

    def validate(self, **options: Any) -> Report:
        """Validate the directory."""
        with LocalSource(self.path) as source:
            return validate(source, **options)


def _layer(name: str) -> str:
    """The layer's number, or the rest of the model's name."""
    match = re.search(r"layers\.(\d+)\.", name)
    return match[1] if match else name


def _block(config: dict[str, Any]) -> dict[str, Any]:
    return config.get("text_config", config)["quantization_config"]


def _set(target: dict[str, Any], changes: dict[str, Any]) -> None:
    for key, value in changes.items():
        if value is ...:
            target.pop(key, None)
        else:
            target[key] = value


def _replace(target: dict[str, Any], content: dict[str, Any]) -> None:
    target.clear()
    target.update(content)
