"""A checkpoint on a local server that speaks the Hub's API."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from chord_convert.source import LocalSource
from chord_convert.source.headers import TensorInfo
from chord_convert.source.hub import HubSource
from chord_convert.validate import validate
from tests.checkpoints import write_checkpoint
from tests.hub_server import HubServer
from tests.source.hub import FAST, NAME, REPO


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("hub") / "model", experts=32, hidden=512)


@pytest.fixture
def server(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    with HubServer() as server:
        server.add(REPO, checkpoint)
        server.point_client_here(monkeypatch, tmp_path)
        yield server


@pytest.fixture
def tensor(checkpoint: Path) -> TensorInfo:
    """A tensor of 16 KB."""
    return validate(LocalSource(checkpoint)).require().tensors[NAME]


@pytest.fixture
def source(server: HubServer) -> Iterator[HubSource]:
    with HubSource(REPO, retry=FAST) as source:
        yield source
