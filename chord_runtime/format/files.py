"""Files of a packed directory, read: exact positional reads, errors that name the file, and what to do about damage."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType

from chord_runtime.errors import FormatError, UnreadableError, advice


def mend(file: Path | str) -> str:
    """What helps against damage. Converting again alone would keep a file whose size and header are right."""
    return f"delete {file}, then run chord-convert again with the same options (or fetch it again)"


def unreadable(path: Path, error: OSError) -> FormatError:
    """What a failed read is called."""
    found = f"{path} cannot be read: {error.strerror}"
    if isinstance(error, (FileNotFoundError, IsADirectoryError)):
        return FormatError(f"{found}; {mend(path)}")
    return UnreadableError(f"{found}; {advice(error, 'check the disk and its permissions')}")


class DataFile:
    """A file opened once, for reads from any thread. Raises FormatError if it cannot be opened or read."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __enter__(self) -> DataFile:
        try:
            self._descriptor = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise unreadable(self.path, error) from None
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        os.close(self._descriptor)

    def read(self, start: int, out: Iterable[memoryview]) -> None:
        """Fill all of ``out``, one after the other, with the bytes from ``start`` on."""
        views = [view for view in out if view]
        while views:
            try:
                count = os.preadv(self._descriptor, views, start)
            except OSError as error:
                raise unreadable(self.path, error) from None
            if count == 0:
                raise FormatError(f"{self.path} ended at byte {start}: something shortened it; {mend(self.path)}")
            start += count
            while views and count >= len(views[0]):
                count -= len(views.pop(0))
            if count:
                views[0] = views[0][count:]
