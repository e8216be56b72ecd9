"""Whose directory is it, and what of it is done: the record of options and source, the finished files, the locks.

A run alone holds the main lock exclusively; the parts of a divided run share it, and each holds its own part's lock.
The gate is held for moments: while a directory is claimed, and while it is finished. A directory is judged before any
lock is made, so that a refused run leaves no trace, and once more behind the gate.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from chord_convert.lock import is_held, open_locked
from chord_convert.plan import Plan, Task
from chord_runtime.errors import FormatError, OutputError, UnreadableError
from chord_runtime.format.layout import MANIFEST, PROGRESS
from chord_runtime.format.metadata import FileRecord, Manifest
from chord_runtime.format.metadata import Source as Provenance
from chord_runtime.format.shard import ShardLayout, read_shard_header
from chord_runtime.output import TEMPORARY, output_error, sync_directory, write

LOCK = "chord-lock"
_GATE = f"{LOCK}-gate"
_LOCKS = re.compile(rf"{LOCK}(-gate|-part-\d+-of-(\d+))?")
_DIFFERENCES_SHOWN = 6

Part = tuple[int, int]
"""(i, n): this run does every n-th task, beginning with task i."""


@dataclass(frozen=True)
class Job:
    """A conversion as an output directory sees it."""

    record: dict[str, Any]
    """Everything that decides the output, see ``record``."""
    fingerprint: str
    """Of the source's files that are read, see ``Source.fingerprint``."""
    changed: int
    """When the last of them changed, in nanoseconds."""
    names: frozenset[str]
    """Every file that the conversion writes, manifest included."""
    differing: Callable[[tuple[str, ...]], list[str]]
    """Compares finished files with the source, bit for bit; returns those that differ."""

    @property
    def hashed(self) -> bool:
        """Whether the record tells the source's content, not only its headers and sizes."""
        return all(value.startswith("sha256:") for value in self.record["source"]["files"].values())


@dataclass(frozen=True)
class _Finished:
    """A directory with a manifest. ``lost`` files are missing or not as recorded: without any, it is complete."""

    lost: tuple[str, ...]
    complete: bool


def record(plan: Plan, provenance: Provenance) -> dict[str, Any]:
    """Everything that decides the output: the manifest without its files and what follows from the rest.

    The tool's version is not among it: directories of one format version are all alike.
    """
    return _comparable(Manifest(plan.packing, plan.ranks, plan.experts_only, provenance, {}))


def _comparable(manifest: Manifest) -> dict[str, Any]:
    data = json.loads(manifest.to_string())
    return {key: data[key] for key in ("packing", "ep_ranks", "experts_only", "source")}


@contextmanager
def claim(directory: Path, job: Job, part: Part | None) -> Iterator[bool]:
    """Hold ``directory`` for a conversion; yields whether it is finished.

    Raises OutputError if the directory is in use, was made with other options or from another source, or holds
    something else.
    """
    if directory.exists() and not directory.is_dir():
        raise OutputError(f"{directory} is not a directory: choose another one with -o")
    if folders := sorted(name for name in job.names if (directory / name).is_dir()):
        raise OutputError(
            f"{directory / folders[0]} is a directory where a file of the conversion belongs: move it away, or choose "
            "another directory with -o"
        )
    found = _look(directory, job) if directory.is_dir() else None
    if found is not None and found.complete and not _leftovers(directory, job.names):
        yield True
        return
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise output_error(directory, error) from None
    with ExitStack() as held:
        held.enter_context(_lock(directory / LOCK, shared=part is not None))
        if part is not None:
            held.enter_context(_lock(directory / f"{LOCK}-part-{part[0]}-of-{part[1]}"))
        with gate(directory):
            if part is not None:
                _refuse_other_division(directory, part[1])
            finished = _admit(directory, job, keep_temporaries=part is not None)
        yield finished


@contextmanager
def gate(directory: Path) -> Iterator[None]:
    """One run at a time; waits."""
    with _lock(directory / _GATE, wait=True):
        yield


def is_finished(directory: Path, task: Task) -> bool:
    """Whether all files of a task are there, by size, header and metadata; data are trusted, they were synced."""
    return all(_is_complete(directory / output.name, output.layout) for output in task.outputs)


def release(directory: Path, names: frozenset[str]) -> None:
    """Remove what only an unfinished directory has: record, locks, and temporaries of the files ``names``."""
    for path in _leftovers(directory, names):
        _remove(path)
    sync_directory(directory)


def _leftovers(directory: Path, names: frozenset[str]) -> list[Path]:
    locks = [path for path in directory.iterdir() if _LOCKS.fullmatch(path.name)]
    return [path for path in (directory / PROGRESS, *_temporaries(directory, names), *locks) if path.exists()]


def _temporaries(directory: Path, names: frozenset[str]) -> list[Path]:
    return [directory / f"{name}{TEMPORARY}" for name in sorted(names | {PROGRESS})]


def _remove(path: Path) -> None:
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        raise output_error(path, error) from None


def _is_complete(path: Path, layout: ShardLayout) -> bool:
    if not path.exists():
        return False
    try:
        header = read_shard_header(path)
        checksums = [header.tensors[tensor.name].checksum for tensor in layout.tensors]
    except UnreadableError:
        raise
    except (FormatError, KeyError):
        return False
    return header.size == layout.size and header.raw == layout.header(checksums)


def _admit(directory: Path, job: Job, keep_temporaries: bool) -> bool:
    """Make the directory this job's; returns whether it is finished."""
    found = _judge(directory, job)
    if found is not None and found.complete:
        release(directory, job.names)
        return True
    if found is not None:
        # A finished directory that has lost files is unfinished again, and what is damaged of it is lost too.
        for name in found.lost:
            _remove(directory / name)
    if not (directory / PROGRESS).exists():
        text = json.dumps(_started(job), indent=1, sort_keys=True) + "\n"
        write({directory / PROGRESS: text.encode()})
    _remove(directory / MANIFEST)
    if not keep_temporaries:
        for path in _temporaries(directory, job.names):
            _remove(path)
    return False


def _started(job: Job) -> dict[str, Any]:
    return {**job.record, "source_fingerprint": job.fingerprint}


def _look(directory: Path, job: Job) -> _Finished | None:
    """``_judge`` without any lock."""
    try:
        return _judge(directory, job)
    except (OutputError, FormatError):
        # Another part may have changed the directory meanwhile: then what holds is found out behind the gate.
        return None if is_held(directory / LOCK) else _judge(directory, job)


def _judge(directory: Path, job: Job) -> _Finished | None:
    """What is known of a directory with a manifest, None for one without; changes nothing.

    Raises OutputError if the directory is not this job's.
    """
    progress = directory / PROGRESS
    if (directory / MANIFEST).exists():
        return _judge_finished(directory, job)
    if progress.exists():
        try:
            found = dict(json.loads(progress.read_bytes()))
        except (ValueError, TypeError) as error:
            raise OutputError(f"{progress} cannot be read ({error}): choose another directory, or empty it") from None
        _refuse_different(directory, found, _started(job))
        return None
    names = sorted(path.name for path in directory.iterdir())
    foreign = [name for name in names if not _LOCKS.fullmatch(name) and name != f"{PROGRESS}{TEMPORARY}"]
    if job.names.issuperset(foreign) and any(name.endswith(".safetensors") for name in foreign):
        raise OutputError(
            f"{directory} holds files of such a conversion ({', '.join(foreign[:3])}, …), but neither {MANIFEST} nor "
            f"{PROGRESS}, which tell whose they are: bring the manifest back from a copy, or choose an empty or new "
            "directory with -o"
        )
    if foreign:
        raise OutputError(
            f"{directory} holds files that chord-convert did not write ({', '.join(foreign[:3])}, …): "
            "choose an empty or new directory with -o"
        )
    return None


def _judge_finished(directory: Path, job: Job) -> _Finished:
    """Whether a finished directory is this job's, whole, or in part: files lost since, or fewer ranks asked for then.

    What a plain directory holds is known by headers and sizes only. So unless hashes tell, or nothing of the source has
    changed since the manifest was written and nothing is to be added, the files are compared with the source.
    """
    manifest = Manifest.read(directory)
    more = _refuse_other_source(directory, manifest, job.record)
    lost = tuple(name for name, recorded in manifest.files.items() if not _is_recorded(directory / name, recorded))
    complete = not lost and not more
    unchanged = complete and job.changed < (directory / MANIFEST).stat().st_mtime_ns
    if not job.hashed and not unchanged:
        kept = tuple(name for name in manifest.files if name not in lost)
        different = job.differing(kept)
        if different:
            others = f" and {len(different) - _DIFFERENCES_SHOWN} more" if len(different) > _DIFFERENCES_SHOWN else ""
            raise OutputError(
                f"{directory} was made from another source, or is damaged; nothing was changed. Not what the source "
                f"holds now: {', '.join(different[:_DIFFERENCES_SHOWN])}{others}. Choose another directory with -o, or "
                "delete these files and run again to have them made from this source"
            )
    return _Finished(lost, complete)


def _refuse_other_source(directory: Path, manifest: Manifest, wanted: dict[str, Any]) -> bool:
    """Refuse a finished directory that is not of ``wanted``; returns whether ``wanted`` has more ranks than it."""
    found = _comparable(manifest)
    more = set(found["ep_ranks"]) < set(wanted["ep_ranks"])
    if more:
        files = {**wanted["source"]["files"], **found["source"]["files"]}
        found |= {"ep_ranks": wanted["ep_ranks"], "source": {**found["source"], "files": files}}
    _refuse_different(directory, found, wanted)
    return more


def _is_recorded(path: Path, recorded: FileRecord) -> bool:
    """Whether a file is as the manifest says, by size and the checksum of its header or, without one, its bytes."""
    try:
        if path.stat().st_size != recorded.size:
            return False
        if path.suffix == ".safetensors":
            return read_shard_header(path).checksum == recorded.checksum
        return xxhash.xxh3_128_hexdigest(path.read_bytes()) == recorded.checksum
    except UnreadableError:
        raise  # what is lost is removed, and this may be whole
    except (FileNotFoundError, FormatError):
        return False


def _refuse_other_division(directory: Path, number: int) -> None:
    """Parts of another n, at the same time, would write the same files."""
    for path in directory.iterdir():
        name = _LOCKS.fullmatch(path.name)
        if name is not None and name[2] is not None and int(name[2]) != number and is_held(path):
            raise OutputError(
                f"{directory} is in use by parts of {name[2]} (--part i/{name[2]}), this is one of {number}: "
                f"divide by {name[2]} here too, or wait for them and run again"
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
            yield "the source's files have changed since (content, size or time of change)"
        elif key == "ep_ranks":
            hint = "a finished directory takes further ranks when --ranks names those it has too"
            yield f"{key}: {_short(found)} in the directory, {_short(wanted)} now; {hint}"
        else:
            yield f"{key}: {_short(found)} in the directory, {_short(wanted)} now"


def _short(value: Any) -> str:
    text = "nothing" if value is None else json.dumps(value)
    return text if len(text) <= 80 else f"{text[:77]}…"


@contextmanager
def _lock(path: Path, shared: bool = False, wait: bool = False) -> Iterator[None]:
    try:
        descriptor = open_locked(path, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        raise OutputError(
            f"{path.parent} is in use by another run of chord-convert: wait for it, or end it, and run again"
        ) from None
    try:
        yield
    finally:
        os.close(descriptor)
