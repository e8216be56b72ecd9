"""Advisory locks (flock) on files. They go with their process, so a killed run leaves none behind, only empty files."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from chord_runtime.errors import OutputError
from chord_runtime.output import output_error


def open_locked(path: Path, kind: int = fcntl.LOCK_EX | fcntl.LOCK_NB) -> int:
    """Open ``path``, made if need be, and lock it as ``kind`` says; returns the descriptor, which holds the lock.

    Raises BlockingIOError if another run holds it and ``kind`` says not to wait, OutputError for any other failure.
    """
    while True:
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise output_error(path, error) from None
        try:
            fcntl.flock(descriptor, kind)
            # Whoever held it before may have renamed or removed it between our open and our lock.
            if _is_at(path, descriptor):
                return descriptor
        except BlockingIOError:
            os.close(descriptor)
            raise
        except OSError as error:
            os.close(descriptor)
            raise OutputError(f"{path} cannot be locked ({error.strerror}): use a file system with flock") from None
        os.close(descriptor)


def is_held(path: Path) -> bool:
    """Whether a run holds the lock of a file that may exist."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def _is_at(path: Path, descriptor: int) -> bool:
    """Whether ``path`` still names the open file."""
    try:
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False
