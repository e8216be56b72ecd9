"""Compiled kernels on disk: checked when read, written whole or not at all, each compiled once by many processes."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from chord_runtime.errors import OutputError, UsageError

_MAGIC = b"chord-kernel-1 "
LOCK_TIMEOUT_S = 120.0  # far above any compile: only a stopped process holds a lock this long


def cache_dir() -> Path | None:
    """``CHORD_CACHE_DIR``, else ``chord`` under the XDG cache folder; None where the user has no home folder.

    Raises:
        UsageError: ``CHORD_CACHE_DIR`` is under the home folder of a user that does not exist.
    """
    if chosen := os.environ.get("CHORD_CACHE_DIR"):
        try:
            return Path(chosen).expanduser()
        except RuntimeError as error:
            raise UsageError(
                f"CHORD_CACHE_DIR={chosen} names a user without a home folder; set it to a folder"
            ) from error
    if xdg := os.environ.get("XDG_CACHE_HOME"):
        return Path(xdg) / "chord"
    try:
        return Path.home() / ".cache" / "chord"
    except RuntimeError:
        return None


class KernelCache:
    """Named entries of bytes in one folder."""

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder

    def read(self, name: str) -> bytes | None:
        """The entry's payload, or None where there is none or its checksum does not hold."""
        if self.folder is None:
            return None
        try:
            raw = (self.folder / name).read_bytes()
        except OSError:
            return None
        head, _, payload = raw.partition(b"\n")
        return payload if head == _header(payload) else None

    def write(self, name: str, payload: bytes) -> None:
        """Make the entry durable under its name; a reader sees all of it or nothing.

        Raises:
            OutputError: the folder cannot be written.
        """
        if self.folder is None:
            raise _unusable("<none>", "no home folder")
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            handle, aside = tempfile.mkstemp(dir=self.folder, prefix=f".{name}.", suffix=".tmp")
        except OSError as error:
            raise _unusable(self.folder, error) from error
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(_header(payload) + b"\n" + payload)
                file.flush()
                os.fchmod(file.fileno(), 0o644)
                os.fsync(file.fileno())
            Path(aside).replace(self.folder / name)
        except OSError as error:
            with contextlib.suppress(OSError):
                Path(aside).unlink()
            raise _unusable(self.folder, error) from error

    @contextlib.contextmanager
    def lock(self, name: str) -> Iterator[None]:
        """Hold the entry's lock; the kernel of the machine frees it if the holder dies.

        Without a lock (read-only folder, file system without flock, a holder that is stopped) the work goes on: two
        writers of one entry write the same bytes, and each rename is whole.
        """
        handle = self._open_lock(name)
        if handle is None:
            yield
            return
        try:
            _acquire(handle)
            yield
        finally:
            os.close(handle)

    def _open_lock(self, name: str) -> int | None:
        if self.folder is None:
            return None
        folder = self.folder / "locks"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            return os.open(folder / f"{name}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except OSError:
            return None


def _acquire(handle: int) -> None:
    """Wait for the lock, but not for ever; where the file system has no flock, do not wait at all."""
    deadline = time.monotonic() + LOCK_TIMEOUT_S
    while _held_elsewhere(handle) and time.monotonic() < deadline:
        time.sleep(0.01)


def _held_elsewhere(handle: int) -> bool:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def _header(payload: bytes) -> bytes:
    return _MAGIC + hashlib.sha256(payload).hexdigest().encode()


def _unusable(folder: Path | str, reason: OSError | str) -> OutputError:
    what = reason.strerror if isinstance(reason, OSError) else reason  # without the name of the entry: one text for all
    return OutputError(
        f"the kernel cache {folder} cannot be written ({what}): set CHORD_CACHE_DIR to a writable folder, or to one "
        "that `chord warmup` has filled"
    )
