"""Tasks on threads of this process: reading, packing, hashing and writing all let go of the interpreter's lock."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from chord_convert.buffers import Buffers
from chord_convert.plan import Task
from chord_convert.progress import Progress
from chord_convert.source.base import Source
from chord_convert.tasks import run_task


class _Stopped(Exception):
    """Another worker failed, or Ctrl-C."""


def run(tasks: Iterable[Task], source: Source, directory: Path, workers: int, progress: Progress) -> None:
    """Do the tasks on ``workers`` threads.

    The first error stops the other workers, which remove what they have not finished, and is raised; so are Ctrl-C
    and SIGTERM.
    """
    stop = threading.Event()
    queue, queue_lock = iter(list(tasks)), threading.Lock()
    errors: list[BaseException] = []

    def halt() -> None:
        stop.set()
        if source.remote:
            source.close()  # ends the waits before a retry

    def work(number: int) -> None:
        buffers = Buffers()

        def tick(count: int) -> None:
            progress.add(number, count)
            if stop.is_set():
                raise _Stopped

        try:
            while not stop.is_set():
                with queue_lock:
                    task = next(queue, None)
                if task is None:
                    return
                progress.done(task, run_task(task, source, directory, buffers, tick), worker=number)
        except BaseException as error:
            errors.append(error)
            halt()

    with _signals(halt):
        pool = [threading.Thread(target=work, args=(n,), name=f"convert-{n}") for n in range(workers)]
        for worker in pool:
            worker.start()
        for worker in pool:
            worker.join()
    # The first is the cause; those after it may only say that reading was stopped.
    if errors:
        raise errors[0]


@contextmanager
def _signals(halt: Callable[[], None]) -> Iterator[None]:
    """Ctrl-C and SIGTERM call ``halt`` and are raised again when the block has ended: no clean-up is cut short.

    A second one is raised where it comes. Only the main thread can do this; elsewhere nothing changes.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []

    def handle(number: int, frame: FrameType | None) -> None:
        came.append(number)
        halt()
        if len(came) > 1:
            restore()
            signal.raise_signal(number)

    # One that is ignored, as in a background job of a plain shell, stays so.
    numbers = [n for n in (signal.SIGINT, signal.SIGTERM) if signal.getsignal(n) not in (signal.SIG_IGN, None)]
    before = {number: signal.signal(number, handle) for number in numbers}

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    try:
        yield
    finally:
        restore()
    if came:
        signal.raise_signal(came[0])
