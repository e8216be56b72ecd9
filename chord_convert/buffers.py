"""A worker's memory: what it reads into and writes from, allocated once."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from chord_convert.write import STAGE_BYTES, Stage


class Buffers:
    """A worker's memory, kept from task to task."""

    def __init__(self) -> None:
        self._read: dict[str, bytearray] = {}
        self._stages: list[Stage] = []
        self._writing = ThreadPoolExecutor(1, thread_name_prefix="write")

    def reading(self, role: str, size: int) -> memoryview:
        """At least ``size`` bytes for one kind of input."""
        held = self._read.get(role)
        if held is None or len(held) < size:
            held = self._read[role] = bytearray(size)
        return memoryview(held)[:size]

    def stages(self, count: int, least: int) -> list[Stage]:
        """``count`` stages that take chunks of ``least`` bytes."""
        if len(self._stages) != count or not all(stage.takes(least) for stage in self._stages):
            self._stages = [Stage(STAGE_BYTES // count, least, self._writing) for _ in range(count)]
        return self._stages
