"""Small files, written whole and durable or not at all; and what a failed write is called."""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from chord_runtime.errors import FileSizeError, OutputError, advice

TEMPORARY = ".tmp"


def write(contents: Mapping[Path, bytes], temporary: str = TEMPORARY) -> None:
    """Write files, each whole or not at all: aside, under its name and ``temporary``, synced, renamed.

    Folders are made. Nothing is renamed before all are written. Raises OutputError.
    """
    parts = {path: path.with_name(path.name + temporary) for path in contents}
    path = Path()
    try:
        for path, data in contents.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            with parts[path].open("wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
        for path, part in parts.items():
            part.rename(path)
        for folder in {path.parent for path in contents}:
            sync_directory(folder)
    except OSError as error:
        raise output_error(path, error) from None
    finally:
        for part in parts.values():
            with suppress(OSError):
                part.unlink()


def sync_directory(path: Path) -> None:
    """Make renames and removals in a directory durable."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some network and FUSE file systems have no such operation; their renames need none.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)


def output_error(path: Path, error: OSError) -> OutputError:
    """One clear error for a failed write."""
    kind = FileSizeError if error.errno == errno.EFBIG else OutputError
    helps = advice(error, "check the disk, or choose another place")
    return kind(f"{path} cannot be written: {error.strerror or error}{_free(path, error)}; {helps}")


def _free(path: Path, error: OSError) -> str:
    """What is free, where there is not enough of it."""
    if error.errno not in (errno.ENOSPC, errno.EDQUOT):
        return ""
    try:
        found = os.statvfs(path.parent)
    except OSError:
        return ""
    inodes = "no inodes (df -i) and " if found.f_files and not found.f_favail else ""
    return f", {inodes}{found.f_bavail * found.f_frsize:,} bytes are free"
