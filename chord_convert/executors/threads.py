"""Tasks on threads of this process: reading, packing, hashing and writing all let go of the interpreter's lock."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from chord_convert.plan import Task
from chord_convert.progress import Progress
from chord_convert.source.base import Source
from chord_convert.tasks import Buffers, run_task


class _Stopped(Exception):
    """Another worker failed, or Ctrl-C."""


def run(tasks: Iterable[Task], source: Source, directory: Path, workers: int, progress: Progress) -> None:
    """Do the tasks on ``workers`` threads.

    The first error stops the other workers, which remove what they have not finished, and is raised; so is
    KeyboardInterrupt.
    """
    stop = threading.Event()
    queue = iter(list(tasks))
    queue_lock = threading.Lock()

    errors: list[BaseException] = []

    def work(number: int) -> None:
        try:
            work_on_queue(number)
        except BaseException as error:
            errors.append(error)
            raise

    def work_on_queue(number: int) -> None:
        buffers = Buffers()

        def tick(count: int) -> None:
            progress.add(number, count)
            if stop.is_set():
                raise _Stopped

        while not stop.is_set():
            with queue_lock:
                task = next(queue, None)
            if task is None:
                return
            progress.done(task, run_task(task, source, directory, buffers, tick), worker=number)

    def halt() -> None:
        stop.set()
        if source.remote:
            source.close()  # ends the waits before a retry

    with _ctrl_c(halt), ThreadPoolExecutor(workers, thread_name_prefix="convert") as pool:
        futures = [pool.submit(work, number) for number in range(workers)]
        try:
            wait(futures, return_when=FIRST_EXCEPTION)
        finally:
            if errors or not all(future.done() for future in futures):
                halt()
    # The first is the cause; those after it may only say that reading was stopped.
    if errors:
        raise errors[0]


@contextmanager
def _ctrl_c(halt: Callable[[], None]) -> Iterator[None]:
    """Ctrl-C calls ``halt`` and is raised when the block has ended, so that it cannot cut a clean-up short.

    A second Ctrl-C is raised where it comes. Only the main thread can do this; elsewhere nothing changes.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    interrupted = False

    def handle(number: int, frame: FrameType | None) -> None:
        nonlocal interrupted
        if interrupted:
            raise KeyboardInterrupt
        interrupted = True
        halt()

    before = signal.signal(signal.SIGINT, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if interrupted:
        raise KeyboardInterrupt
