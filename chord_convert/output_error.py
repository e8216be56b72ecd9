"""What a failed write is called."""

from __future__ import annotations

import errno
import shutil
from pathlib import Path

from chord_runtime.errors import OutputError

_FULL = {errno.ENOSPC: "no space is left on the device", errno.EDQUOT: "the disk quota is used up"}
_REASONS = {
    errno.EIO: "the device reports an I/O error",
    errno.EROFS: "the file system is read-only",
    errno.EACCES: "permission denied",
}


def output_error(path: Path, error: OSError) -> OutputError:
    """One clear error for a failed write."""
    number = error.errno or 0
    if number not in _FULL:
        return OutputError(f"{path}: cannot be written: {_REASONS.get(number, error.strerror or str(error))}")
    try:
        free = f"; {shutil.disk_usage(path.parent).free:,} bytes are free there"
    except OSError:
        free = ""
    return OutputError(f"{path}: cannot be written: {_FULL[number]}{free}")
