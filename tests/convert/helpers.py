"""What the converter's tests share."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from chord_convert.convert import Result, convert, prepare
from chord_convert.plan import Options, Plan
from chord_runtime.format.layout import ParallelLayout, Placement


def options(ep: int = 2, tp: int = 1, placement: Placement = Placement.LINEAR, **others: Any) -> Options:
    """Options by their parallel sizes."""
    return Options(ParallelLayout(ep, tp, placement), **others)


def plan_of(model: Path, chosen: Options) -> Plan:
    """The plan for a checkpoint directory."""
    prepared = prepare(str(model), chosen)
    prepared.source.close()
    return prepared.plan


def run(model: Path, output: Path, chosen: Options | None = None, **arguments: Any) -> Result:
    """A conversion in this process."""
    prepared = prepare(str(model), chosen or options())
    with prepared.source:
        return convert(prepared, output, **arguments)


def snapshot(directory: Path) -> dict[str, str]:
    """Every file by name, with the hash of its bytes."""
    return {
        str(path.relative_to(directory)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(directory.rglob("*"))
        if path.is_file()
    }
