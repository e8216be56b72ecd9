"""Whose directory is it, and what of it is done: the record of options and source, the locks, the finished files.

Locks are advisory (flock) and go with their process, so a killed run leaves none behind, only empty lock files. A run
alone holds the main lock exclusively; the parts of a divided run share it, and each holds its own part's lock. The gate
is held for moments: while a directory is claimed, and while it is finished.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from chord_convert.plan import Plan, Task
from chord_convert.write import TEMPORARY, is_at, output_error, sync_directory, write_small
from chord_runtime.errors import FormatError, OutputError
from chord_runtime.format.layout import MANIFEST, PROGRESS
from chord_runtime.format.metadata import Manifest
from chord_runtime.format.metadata import Source as Provenance
from chord_runtime.format.shard import ShardLayout, read_shard_header

LOCK = "chord-lock"
_GATE = f"{LOCK}-gate"
_DIFFERENCES_SHOWN = 6

Part = tuple[int, int]
"""(i, n): this run does every n-th task, beginning with task i."""


def record(plan: Plan, provenance: Provenance) -> dict[str, Any]:
    """Everything that decides the output: the manifest without its files and what follows from the rest."""
    manifest = Manifest(plan.packing, plan.ranks, plan.experts_only, provenance, {})
    data: dict[str, Any] = json.loads(manifest.to_string())
    del data["files"], data["experts_of_rank"], data["checksum"]
    return data


@contextmanager
def claim(directory: Path, wanted: dict[str, Any], fingerprint: str, part: Part | None) -> Iterator[bool]:
    """Hold ``directory`` for a conversion that ``wanted`` (see ``record``) describes; yields whether it is finished.

    ``fingerprint`` tells whether the source may have changed since an interrupted run. Raises OutputError if the
    directory is in use, was made with other options or from another source, or holds something else.
    """
    if directory.exists() and not directory.is_dir():
        raise OutputError(f"{directory} is not a directory: choose another one with -o")
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise output_error(directory, error) from None
    with ExitStack() as held:
        shared = part is not None
        held.enter_context(_lock(directory / LOCK, shared=shared))
        if part is not None:
            held.enter_context(_lock(directory / f"{LOCK}-part-{part[0]}-of-{part[1]}"))
        with gate(directory):
            finished = _admit(directory, wanted, fingerprint, keep_temporaries=shared)
        yield finished


@contextmanager
def gate(directory: Path) -> Iterator[None]:
    """One run at a time; waits."""
    with _lock(directory / _GATE, wait=True):
        yield


def is_finished(directory: Path, task: Task) -> bool:
    """Whether all files of a task are there, by size, header and metadata; data are trusted, they were synced."""
    return all(_is_complete(directory / output.name, output.layout) for output in task.outputs)


def release(directory: Path) -> None:
    """Remove what only an unfinished directory has: record, locks, temporaries."""
    for path in [directory / PROGRESS, *directory.glob(f"{LOCK}*"), *directory.rglob(f"*{TEMPORARY}")]:
        path.unlink(missing_ok=True)
    sync_directory(directory)


def _is_complete(path: Path, layout: ShardLayout) -> bool:
    if not path.exists():
        return False
    try:
        header = read_shard_header(path)
        checksums = [header.tensors[tensor.name].checksum for tensor in layout.tensors]
    except (FormatError, KeyError):
        return False
    return header.size == layout.size and header.raw == layout.header(checksums)


def _admit(directory: Path, wanted: dict[str, Any], fingerprint: str, keep_temporaries: bool) -> bool:
    if (directory / MANIFEST).exists():
        found = json.loads(Manifest.read(directory).to_string())
        _refuse_different(directory, found, wanted)
        if _has_all(directory, found["files"]):
            release(directory)
            return True
    progress, wanted = directory / PROGRESS, {**wanted, "source_fingerprint": fingerprint}
    if progress.exists():
        try:
            found = json.loads(progress.read_text())
        except (OSError, ValueError) as error:
            raise OutputError(f"{progress} cannot be read ({error}): choose another directory, or empty it") from None
        _refuse_different(directory, found, wanted)
    else:
        if not (directory / MANIFEST).exists():
            _refuse_foreign(directory)
        write_small(progress, (json.dumps(wanted, indent=1, sort_keys=True) + "\n").encode())
    # A finished directory that has lost files is unfinished again.
    (directory / MANIFEST).unlink(missing_ok=True)
    if not keep_temporaries:
        for path in directory.rglob(f"*{TEMPORARY}"):
            path.unlink(missing_ok=True)
    return False


def _has_all(directory: Path, files: dict[str, Any]) -> bool:
    """Whether the files are there, in their sizes."""
    try:
        return all((directory / name).stat().st_size == recorded["size"] for name, recorded in files.items())
    except OSError:
        return False


def _refuse_foreign(directory: Path) -> None:
    foreign = sorted(path.name for path in directory.iterdir() if not path.name.startswith((LOCK, PROGRESS)))
    if foreign:
        for path in directory.glob(f"{LOCK}*"):
            path.unlink(missing_ok=True)
        raise OutputError(
            f"{directory} holds files that chord-convert did not write ({', '.join(foreign[:3])}, …): "
            "choose an empty or new directory with -o"
        )


def _refuse_different(directory: Path, found: Any, wanted: dict[str, Any]) -> None:
    differences = [line for key, value in wanted.items() for line in _differences(key, found.get(key), value)]
    if differences:
        shown = "\n  ".join(differences[:_DIFFERENCES_SHOWN])
        more = f"\n  and {len(differences) - _DIFFERENCES_SHOWN} more" if len(differences) > _DIFFERENCES_SHOWN else ""
        raise OutputError(
            f"{directory} was made from another source or with other options; nothing was changed:\n  {shown}{more}\n"
            "Use the same options and source to go on, or choose another directory with -o."
        )


def _differences(key: str, found: Any, wanted: Any) -> Iterator[str]:
    if isinstance(found, dict) and isinstance(wanted, dict):
        for name in sorted(found.keys() | wanted.keys()):
            yield from _differences(f"{key}.{name}", found.get(name), wanted.get(name))
    elif found != wanted:
        if key == "source_fingerprint":
            yield "the source's files have changed since (size, time of change, or commit)"
        else:
            yield f"{key}: {_short(found)} in the directory, {_short(wanted)} now"


def _short(value: Any) -> str:
    text = "nothing" if value is None else json.dumps(value)
    return text if len(text) <= 80 else f"{text[:77]}…"


@contextmanager
def _lock(path: Path, shared: bool = False, wait: bool = False) -> Iterator[None]:
    descriptor = _acquire(path, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | (0 if wait else fcntl.LOCK_NB))
    try:
        yield
    finally:
        os.close(descriptor)


def _acquire(path: Path, kind: int) -> int:
    while True:
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise output_error(path, error) from None
        try:
            fcntl.flock(descriptor, kind)
            # A run that finished may have removed the file between our open and our lock.
            if is_at(path, descriptor):
                return descriptor
        except BlockingIOError:
            os.close(descriptor)
            raise OutputError(
                f"{path.parent} is in use by another run of chord-convert: wait for it, or end it, and run again"
            ) from None
        except OSError as error:
            os.close(descriptor)
            raise OutputError(f"{path} cannot be locked ({error.strerror}): use a file system with flock") from None
        os.close(descriptor)
