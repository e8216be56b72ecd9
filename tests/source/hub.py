"""What the tests of the Hub share."""

from __future__ import annotations

from pathlib import Path

from chord_convert.source.headers import TensorInfo
from chord_convert.source.hub import HubSource
from chord_convert.source.retry import Retry
from tests.hub_server import HubServer

REPO = "moonshotai/Kimi-Small"
FAST = Retry(attempts=4, first=0.005, longest=0.02, longest_asked=3.0)
NAME = "model.layers.1.mlp.experts.0.down_proj.weight_packed"


def content(checkpoint: Path, tensor: TensorInfo) -> bytes:
    return (checkpoint / tensor.file).read_bytes()[tensor.start : tensor.stop]


def read(source: HubSource, tensor: TensorInfo) -> bytes:
    return bytes(source.read(tensor.file, tensor.start, tensor.stop))


def ranges(server: HubServer) -> list[str | None]:
    return [request.range for request in server.requests if request.path.startswith("/cdn/")]
