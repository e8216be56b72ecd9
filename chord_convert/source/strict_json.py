"""JSON as checkpoints carry it, read strictly: a key written twice or NaN is an error, never a silent choice."""

from __future__ import annotations

import json
from typing import Any

from chord_convert.report import show


def parse(raw: bytes | bytearray | memoryview) -> Any:
    """Parse UTF-8 JSON.

    Raises:
        ValueError: not UTF-8, not JSON, a key twice in one object, NaN or Infinity, a number too long to be meant,
            or nesting too deep. The text says which, and where when the parser knows.
    """
    try:
        text = str(raw, "utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"bytes that are not UTF-8 at offset {error.start}") from None
    try:
        return json.loads(text, object_pairs_hook=_object, parse_constant=_constant)
    except json.JSONDecodeError as error:
        raise ValueError(f"text that is not JSON ({error.msg} at offset {error.pos})") from None
    except ValueError as error:
        if "digits" in str(error):
            raise ValueError("a number of more digits than are read") from None
        raise
    except RecursionError:
        raise ValueError("JSON nested too deeply") from None


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    parsed = dict(pairs)
    if len(parsed) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise ValueError(f"the key {show(key)} twice in one object")
            seen.add(key)
    return parsed


def _constant(text: str) -> Any:
    raise ValueError(f"{text}, which is not JSON")
