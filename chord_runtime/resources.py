"""Files that travel with the package: CUDA sources and JSON Schemas, in a checkout and in an installed wheel alike."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jsonschema.protocols import Validator

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


@cache
def validator(name: str) -> Validator:
    """Checks values against ``schema(name)``; built once, for that costs many times a check. 4.0 is not an integer."""
    from jsonschema import Draft202012Validator, validators

    types = Draft202012Validator.TYPE_CHECKER.redefine("integer", lambda _, value: type(value) is int)
    strict = validators.extend(Draft202012Validator, type_checker=types)  # type: ignore[no-untyped-call]
    built: Validator = strict(schema(name))
    return built
