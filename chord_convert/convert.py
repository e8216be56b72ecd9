"""A conversion from end to end: open, validate, plan, claim the directory, run what is missing, finish."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from chord_convert.checkpoint import Checkpoint
from chord_convert.executors import threads
from chord_convert.finish import file_names, finish, provenance
from chord_convert.plan import Options, Plan, Task, make_plan
from chord_convert.progress import Progress
from chord_convert.resume import Job, Part, claim, gate, is_finished, record, release
from chord_convert.source import Source, open_source
from chord_convert.validate import validate
from chord_runtime.errors import FileSizeError, OutputError, SourceError, Unfinished
from chord_runtime.format.layout import MANIFEST
from chord_runtime.format.metadata import Source as Provenance
from chord_runtime.units import counted, human

Run = Callable[[list[Task], Source, Path, int, Progress], None]
"""An executor: (tasks, source, directory, workers, progress)."""


@dataclass(frozen=True)
class Prepared:
    """A validated source and the plan for it."""

    source: Source
    checkpoint: Checkpoint
    plan: Plan
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True)
class Result:
    """What a run did. ``missing_files`` are left to other parts; 0 means that the directory is finished."""

    written_bytes: int
    kept_bytes: int
    missing_files: int
    seconds: float


def prepare(model: str, options: Options, revision: str | None = None, token: str | None = None) -> Prepared:
    """Open and validate ``model`` and plan its conversion.

    Raises CheckpointError with every problem found, SourceError, or UsageError.
    """
    with ExitStack() as held:
        source = held.enter_context(open_source(model, revision, token))
        report = validate(source)
        checkpoint = report.require()
        plan = make_plan(checkpoint, source.identity, options)
        held.pop_all()
    return Prepared(source, checkpoint, plan, tuple(str(warning) for warning in report.warnings))


def convert(
    prepared: Prepared,
    directory: Path,
    *,
    workers: int = 2,
    part: Part | None = None,
    run: Run = threads.run,
    progress: Progress | None = None,
) -> Result:
    """Write the packed directory, or what is missing of it; with ``part`` only this part's share.

    Raises OutputError if the directory is refused or a file would be too large, ScaleError for a weight that the format
    cannot hold, and Unfinished when there is not enough space, or reading or writing failed on the way.
    """
    started = time.monotonic()
    progress = progress or Progress()
    source, plan = prepared.source, prepared.plan
    origin = provenance(source, plan)
    with claim(directory, job_of(prepared, directory, origin, progress), part) as finished:
        if finished:
            return Result(0, plan.write_bytes, 0, time.monotonic() - started)
        mine = plan.tasks if part is None else plan.tasks[part[0] :: part[1]]
        todo = [task for task in mine if not is_finished(directory, task)]
        total, missing = _size(mine), _size(todo)
        try:
            check_space(directory, missing)
            progress.start(total, total - missing)
            run(todo, source, directory, workers, progress)
            rest = _finish_if_last(prepared, directory, origin)
        except FileSizeError:
            raise
        except (OutputError, SourceError) as error:
            raise Unfinished(str(error)) from error
        finally:
            progress.close()
    result = Result(missing, total - missing, rest, time.monotonic() - started)
    progress.event("end", written_bytes=missing, missing_files=rest, seconds=round(result.seconds, 3))
    return result


def job_of(prepared: Prepared, directory: Path, origin: Provenance, progress: Progress) -> Job:
    """The conversion as its output directory sees it."""
    source, files = prepared.source, prepared.source.files()

    @cache
    def different(names: tuple[str, ...]) -> list[str]:
        from chord_convert.against import differing  # imports torch, which conversions do without

        progress.event("compare", files=len(names))
        progress.say(f"comparing {counted(len(names), 'finished file')} with the source, whose hashes are not known")
        return differing(directory, names, prepared.checkpoint, source)

    return Job(
        record=record(prepared.plan, origin),
        fingerprint=source.fingerprint(origin.files),
        changed=max(files[name].modified or 0 for name in origin.files),
        names=file_names(prepared.plan, prepared.checkpoint),
        differing=different,
    )


def _finish_if_last(prepared: Prepared, directory: Path, origin: Provenance) -> int:
    """Finish the directory if every planned file is there; returns how many are not."""
    plan = prepared.plan
    with gate(directory):
        # Another part may have finished the directory while this one waited at the gate.
        if (directory / MANIFEST).exists():
            release(directory, file_names(plan, prepared.checkpoint))
            return 0
        rest = sum(len(task.outputs) for task in plan.tasks if not is_finished(directory, task))
        if not rest:
            finish(directory, plan, prepared.checkpoint, prepared.source, origin)
        return rest


def check_space(directory: Path, needed: int) -> None:
    """Raise OutputError unless ``needed`` bytes are free where ``directory`` is or will be."""
    free = free_space(directory)
    if free < needed:
        raise OutputError(
            f"{directory}: {human(needed)} are needed, {human(free)} are free; make room, choose another disk with -o, "
            "or convert fewer ranks at a time with --ranks"
        )


def free_space(directory: Path) -> int:
    """Free bytes of the file system that ``directory`` is on, or will be."""
    place = directory.absolute()
    while not place.exists():
        place = place.parent
    return shutil.disk_usage(place).free


def _size(tasks: list[Task] | tuple[Task, ...]) -> int:
    return sum(output.layout.size for task in tasks for output in task.outputs)
