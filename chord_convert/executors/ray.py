"""Tasks on a Ray cluster whose nodes share the output directory. Needs ``pip install chord-moe[ray]``.

Tasks are safe to repeat, so Ray may run one again whose worker or node died; the file it was writing is written anew.
"""

from __future__ import annotations

import importlib.util
import os
import re
import socket
from pathlib import Path
from typing import Any

from chord_convert.buffers import Buffers
from chord_convert.plan import Task, source_tensors
from chord_convert.progress import Progress
from chord_convert.source import Source, open_source
from chord_convert.tasks import run_task
from chord_runtime.errors import ChordError, SourceError, Unfinished, UsageError

_RETRIES = 5
_SECONDS_BETWEEN_LOOKS = 1.0
_SECONDS_TO_CONNECT = 30.0


def require() -> None:
    """Raise UsageError without Ray."""
    if importlib.util.find_spec("ray") is None:
        raise UsageError("--executor ray needs Ray: pip install chord-moe[ray], or use --executor threads")


def run(
    tasks: list[Task],
    source: Source,
    directory: Path,
    workers: int,
    progress: Progress,
    *,
    address: str | None = None,
    token: str | None = None,
) -> None:
    """Do the tasks on Ray, at most ``workers`` at a time.

    Raises UsageError without Ray or its cluster, Unfinished if a task's workers kept dying, and what the task raised
    otherwise.
    """
    require()
    import ray

    if not ray.is_initialized():
        _connect(address or os.environ.get("RAY_ADDRESS"), workers)
    do = ray.remote(max_retries=_RETRIES, num_cpus=1)(_do)
    place, commit = source.identity.location, source.identity.commit
    waiting = list(reversed(tasks))
    running: dict[Any, Task] = {}
    try:
        while waiting or running:
            while waiting and len(running) < workers:
                task = waiting.pop()
                fingerprint = source.fingerprint(_files(task))
                running[do.remote(task, place, commit, fingerprint, token, str(directory.absolute()))] = task
            done, _ = ray.wait(list(running), timeout=_SECONDS_BETWEEN_LOOKS)
            for reference in done:
                has_zero, node = ray.get(reference)
                task = running.pop(reference)
                progress.add(0, sum(output.layout.size for output in task.outputs))
                progress.done(task, has_zero, node=node)
    except ray.exceptions.RayTaskError as error:
        # The others still write: let them end. ray.cancel would be quicker, but Ray 2.60 aborts this process if a task
        # starts or ends in the same moment. After anything else they end with this process.
        ray.wait(list(running), num_returns=len(running))
        cause = error.cause
        raise (cause if isinstance(cause, ChordError) else error) from None
    except ray.exceptions.RayError as error:
        raise Unfinished(f"Ray gave up on a task after {_RETRIES} tries: {error}") from None


def _connect(address: str | None, workers: int) -> None:
    """Join the cluster at ``address``, or start one here. Ray itself would try for ever where nothing listens."""
    import ray

    try:
        host_port = re.fullmatch(r"(?:ray://)?([^/]+):(\d+)", address or "")
        if host_port:
            socket.create_connection((host_port[1].strip("[]"), int(host_port[2])), _SECONDS_TO_CONNECT).close()
        cpus = None if address else workers
        ray.init(address, num_cpus=cpus, log_to_driver=False, logging_level="error", include_dashboard=False)
    except Exception as error:
        raise UsageError(
            f"no Ray cluster at {address or 'this machine'} ({error}): check --address and RAY_ADDRESS against what "
            "`ray status` says there, start one with `ray start --head`, or use --executor threads"
        ) from error


def _files(task: Task) -> set[str]:
    return {tensor.file for tensor in source_tensors(task)}


def _do(
    task: Task, place: str, commit: str | None, fingerprint: str, token: str | None, directory: str
) -> tuple[bool, str]:
    """One task in a Ray worker; returns what ``run_task`` does, and the node's id."""
    import ray

    with open_source(place, commit, token) as source:
        if source.fingerprint(_files(task)) != fingerprint:
            raise SourceError(f"{place} is not the same here as where the run was planned: put the same files there")
        has_zero = run_task(task, source, Path(directory), Buffers(), lambda count: None)
    return has_zero, str(ray.get_runtime_context().get_node_id())
