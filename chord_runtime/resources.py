"""Files that travel with the package: CUDA sources and JSON Schemas, in a checkout and in an installed wheel alike."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

_PACKAGE = Path(__file__).resolve().parent


def _folder(name: str) -> Path:
    checkout = _PACKAGE.parent / name
    return checkout if (_PACKAGE.parent / "pyproject.toml").is_file() else _PACKAGE / name


def csrc_dir() -> Path:
    """The folder that holds ``chord/*.cuh`` and ``kernels/*.cu``."""
    return _folder("csrc")


@cache
def schema(name: str) -> dict[str, Any]:
    """The JSON Schema ``schemas/{name}.schema.json``, parsed."""
    parsed: dict[str, Any] = json.loads((_folder("schemas") / f"{name}.schema.json").read_text())
    return parsed
