"""Dividing the work among processes that know only their number: ``--part i/n``, or what their launcher has set."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

from chord_convert.resume import Part
from chord_runtime.errors import UsageError

_LAUNCHERS = (
    ("RANK", "WORLD_SIZE"),  # torchrun
    ("SLURM_PROCID", "SLURM_NTASKS"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("JOB_COMPLETION_INDEX", "JOB_COMPLETIONS"),  # Kubernetes sets the index; the job's template sets the number
)


def parse_part(text: str, environment: Mapping[str, str] = os.environ) -> Part:
    """``i/n`` with i in 0..n−1, or ``auto`` for the launcher's variables. Raises UsageError."""
    if text == "auto":
        for index, size in _LAUNCHERS:
            if index in environment and size in environment:
                return _part(environment[index], environment[size], f"{index}, {size}")
        names = "; ".join(" and ".join(pair) for pair in _LAUNCHERS)
        raise UsageError(f"--part auto: no launcher has set any of {names}; say --part i/n")
    index, _, size = text.partition("/")
    return _part(index, size, "--part")


def _part(index: str, size: str, where: str) -> Part:
    if not (re.fullmatch(r"\d+", index) and re.fullmatch(r"\d+", size) and int(index) < int(size)):
        raise UsageError(f"{where}: found {index}/{size}; supported: i/n with 0 ≤ i < n, for example 0/4 … 3/4")
    return int(index), int(size)
