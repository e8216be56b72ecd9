"""Few large reads from which many small ones are served: over a network, each read is a request."""

from __future__ import annotations

from collections.abc import Iterable

from chord_convert.buffers import Buffers
from chord_convert.source.base import Source
from chord_convert.source.headers import TensorInfo

# Bytes between two tensors that cost less than another request: a weight_shape, or alignment.
_GAP_BYTES = 4096


def spans(tensors: Iterable[TensorInfo]) -> list[tuple[str, int, int]]:
    """(file, start, stop) of the ranges that hold the tensors, neighbours joined."""
    joined: list[tuple[str, int, int]] = []
    for tensor in sorted(tensors, key=lambda tensor: (tensor.file, tensor.start)):
        if joined and joined[-1][0] == tensor.file and tensor.start - joined[-1][2] <= _GAP_BYTES:
            joined[-1] = (tensor.file, joined[-1][1], tensor.stop)
        else:
            joined.append((tensor.file, tensor.start, tensor.stop))
    return joined


class SpanReader:
    """Reads like a source, from what ``load`` has fetched."""

    def __init__(self, source: Source, buffers: Buffers) -> None:
        self._source, self._buffers = source, buffers
        self._held: list[tuple[str, int, int, memoryview]] = []

    def load(self, tensors: Iterable[TensorInfo]) -> None:
        """Fetch the tensors, in place of those before. Raises SourceError."""
        self._held = []
        for number, (file, start, stop) in enumerate(spans(tensors)):
            buffer = self._buffers.reading(f"span {number}", stop - start)
            self._held.append((file, start, stop, self._source.read(file, start, stop, buffer)))

    def read(self, file: str, start: int, stop: int, out: memoryview) -> memoryview:
        """Bytes ``start:stop`` of ``file``, which must lie in a loaded tensor."""
        for held, first, last, data in self._held:
            if held == file and first <= start and stop <= last:
                out[:] = data[start - first : stop - first]
                return out
        raise ValueError(f"{file}: bytes {start}:{stop} were not loaded")
