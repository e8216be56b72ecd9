"""A source that lives in memory, for tests of what is built upon sources."""

from __future__ import annotations

from collections.abc import Mapping

from chord_convert.source.base import FileInfo, Identity, Source


class MemorySource(Source):
    """Files as bytes. ``reads`` lists what was read: (file, start, stop)."""

    def __init__(self, contents: Mapping[str, bytes]) -> None:
        self.contents = dict(contents)
        self.reads: list[tuple[str, int, int]] = []
        self.identity = Identity("memory", None, "memory")

    def files(self) -> Mapping[str, FileInfo]:
        return {name: FileInfo(len(content)) for name, content in self.contents.items()}

    def _read_into(self, file: str, start: int, out: memoryview) -> None:
        self.reads.append((file, start, start + len(out)))
        out[:] = self.contents[file][start : start + len(out)]
