"""How a problem with a checkpoint is written down: one line that says where, what, what is supported, what next."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing wrong with a checkpoint.

    ``rule`` is the short stable name of the rule that found it, ``file`` and ``key`` say where (either may be empty),
    ``found`` and ``supported`` are phrases, ``next_step`` is a sentence in the imperative. ``more`` counts problems
    of the same kind that are not written out.
    """

    rule: str
    file: str
    key: str
    found: str
    supported: str
    next_step: str
    more: int = 0

    def __str__(self) -> str:
        where = ": ".join(part for part in (self.file, self.key) if part)
        rest = f" (and {self.more} more like it)" if self.more else ""
        line = f"found {self.found}; supported: {self.supported}. {self.next_step}{rest}"
        text = f"{where}: {line}" if where else line
        return text if text.isprintable() else "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)

    def as_dict(self) -> dict[str, str | int]:
        """The fields by name, for ``--json``."""
        return {name: getattr(self, name) for name in self.__slots__}


def show(value: Any, limit: int = 80) -> str:
    """``value`` as one short line of JSON that is safe to print: control characters escaped, the middle cut out."""
    try:
        text = json.dumps(value)
    except (TypeError, ValueError, RecursionError):
        text = ascii(value)
    return text if len(text) <= limit else f"{text[: limit - 20]}…{text[-19:]}"


def name(text: str, limit: int = 160) -> str:
    """A file or tensor name, made safe to print on one line."""
    plain = text.isprintable() and len(text) <= limit
    return text if plain else show(text, limit)
