"""Files of a run: saved results are checked in full when they are read, and files are written whole or not at all."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

from jsonschema import Draft202012Validator
from jsonschema.exceptions import best_match

from chord_runtime import output
from chord_runtime.errors import OutputError, UsageError
from chord_runtime.output import output_error

_POSITIVE = {"type": "number", "exclusiveMinimum": 0, "maximum": 1e15}  # the maximum keeps infinity out
_COUNT = {"type": "integer", "minimum": 0}
_TEXTS = {"type": "object", "additionalProperties": {"type": "string"}}


def _record(optional: Mapping[str, Any] | None = None, **required: Any) -> dict[str, Any]:
    """Schema of an object with these fields and no others."""
    fields = {**required, **(optional or {})}
    return {"type": "object", "properties": fields, "required": list(required), "additionalProperties": False}


_TIMING = _record(us=_POSITIVE, low=_POSITIVE, high=_POSITIVE, host_us=_POSITIVE, rounds=_COUNT)
_POINT = _record(
    {
        "failures": _TEXTS,
        "alone_us": {**_POSITIVE, "type": ["number", "null"]},
        "seconds": {"type": "number", "minimum": 0, "maximum": 1e15},
    },
    active=_COUNT,
    error={"type": ["number", "null"], "minimum": 0, "maximum": 1e15},
    timings={"type": "object", "additionalProperties": _TIMING},
)
_RESULTS = {
    "format": {},
    "machine": {**_TEXTS, "required": ["device"]},
    "method": _TEXTS,
    "points": {"type": "object", "additionalProperties": _POINT},
}
_CEILINGS = _record(
    copy_tbps=_POSITIVE,
    read_tbps=_POSITIVE,
    dense_tflops={"type": "object", "minProperties": 1, "additionalProperties": _POSITIVE},
)
_SCHEMAS = {1: _record(**_RESULTS, ceilings=_CEILINGS), "layer-1": _record(**_RESULTS)}
"""By format: 1 is the three operations, layer-1 whole layers."""


def load_json(path: Path, format: int | str) -> dict[str, Any]:
    """Read saved results of a format; every time and rate in them is finite and above 0.

    Raises:
        UsageError: the file cannot be read, is of another format, or holds what no run saves.
    """
    try:
        data: dict[str, Any] = json.loads(path.read_text(), parse_constant=_refuse)
        found = data.get("format") if isinstance(data, dict) else None
        if found != format and found in _SCHEMAS:
            need = "needs --layer" if isinstance(found, str) else "is shown without --layer"
            raise UsageError(f"{path} has results of format {found!r}, not {format!r}; it {need}")
        if found != format:
            raise ValueError(f"its format is {found!r}, not {format!r}")
        json.dumps(data, ensure_ascii=False).encode()  # half a surrogate pair could not be printed
        error = best_match(Draft202012Validator(_SCHEMAS[format]).iter_errors(data))
    except FileNotFoundError as failure:
        raise UsageError(f"{path} does not exist: check the path, or make it with `chord bench --save`") from failure
    except (OSError, ValueError, TypeError, RecursionError) as failure:
        raise UsageError(
            f"{path} is not a file of bench results ({str(failure)[:200]}): name one that `chord bench --save` has made"
        ) from failure
    if error is not None:
        raise UsageError(f"{path} holds what no run saves: {error.message[:200]} at {error.json_path}; measure again")
    return data


def target(path: Path) -> Path:
    """The regular file that writing to ``path`` makes or replaces, links followed.

    Raises:
        OutputError: it cannot be written: not a regular file, or in a folder that cannot be made or written.
    """
    found = Path(os.path.realpath(path))
    try:
        with suppress(FileNotFoundError):
            if not stat.S_ISREG(found.stat().st_mode):
                raise OutputError(f"{path} cannot be written: it is not a regular file; name one, or a new one")
        folder = next(parent for parent in found.parents if parent.exists())
        with TemporaryFile(dir=folder):
            pass  # permissions do not tell all: root may write anything, but not to a read-only file system
    except OSError as error:
        raise output_error(path, error) from error
    return found


def write(contents: Mapping[Path, bytes]) -> None:
    """Write files, each whole or not at all; links stay links.

    Raises:
        OutputError: one cannot be written.
    """
    output.write({target(path): data for path, data in contents.items()}, f".{os.getpid()}.tmp")


def write_json(path: Path, data: object) -> None:
    """Write as JSON.

    Raises:
        OutputError: it cannot be written.
    """
    write({path: (json.dumps(data, indent=1) + "\n").encode()})


def _refuse(constant: str) -> float:
    raise ValueError(f"{constant} is not a time or a rate")
