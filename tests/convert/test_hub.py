"""Streaming from the Hub, through the real client and a server that counts bytes and misbehaves."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from chord_convert.convert import convert, prepare
from chord_convert.finish import provenance
from chord_convert.plan import ExpertsTask
from chord_convert.source import hub
from chord_convert.source.retry import Retry
from chord_convert.spans import spans
from chord_runtime.errors import Unfinished
from chord_runtime.format.layout import MANIFEST
from tests.checkpoints import write_checkpoint
from tests.convert.helpers import options, run, snapshot
from tests.hub_server import Fault, HubServer

REPO = "moonshotai/Kimi-Small"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Large enough that headers are a small part of it."""
    folder = tmp_path_factory.mktemp("hub") / "Kimi-Small"
    return write_checkpoint(folder, experts=16, hidden=512, intermediate=256)


@pytest.fixture
def server(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    monkeypatch.setattr(hub, "Retry", lambda: Retry(attempts=4, first=0.005, longest=0.02))
    with HubServer() as server:
        server.add(REPO, model)
        server.point_client_here(monkeypatch, tmp_path)
        yield server


def test_the_same_bytes_as_from_a_directory(server: HubServer, model: Path, tmp_path: Path) -> None:
    run(Path(REPO), tmp_path / "streamed")
    run(model, tmp_path / "local")
    from_hub, local = snapshot(tmp_path / "streamed"), snapshot(tmp_path / "local")
    assert {k: v for k, v in from_hub.items() if not k.startswith(("experts", MANIFEST))} == {
        k: v for k, v in local.items() if not k.startswith(("experts", MANIFEST))
    }
    manifest = json.loads((tmp_path / "streamed" / MANIFEST).read_text())
    assert manifest["source"]["repo"] == REPO
    assert manifest["source"]["commit"] == server.repositories[REPO].commit
    assert all(value.startswith("sha256:") for value in manifest["source"]["files"].values())
    for file in (tmp_path / "streamed").glob("experts-*"):
        other = tmp_path / "local" / file.name
        assert file.read_bytes()[-100_000:] == other.read_bytes()[-100_000:]


def test_one_rank_fetches_its_byte_ranges_only(server: HubServer, tmp_path: Path) -> None:
    prepared = prepare(REPO, options(8, ranks=(3,), experts_only=True))
    origin = provenance(prepared.source, prepared.plan)
    assert len(origin.files) == 3
    before, requests = server.sent("/cdn/"), len(server.requests)
    with prepared.source:
        convert(prepared, tmp_path / "out")
    ranges = [
        part
        for task in prepared.plan.tasks
        if isinstance(task, ExpertsTask)
        for expert in task.experts
        for part in spans(expert.tensors())
    ]
    sent = server.sent("/cdn/") - before
    assert sent == sum(stop - start for _, start, stop in ranges)
    assert sent <= prepared.plan.read_bytes + len(ranges) * 3 * 8
    fetched = [request for request in server.requests[requests:] if "/cdn/" in request.path and request.method == "GET"]
    assert len(fetched) == len(ranges) == 2 * 2 * 2


@pytest.mark.parametrize(
    "fault",
    [
        Fault("drop", after=1000, times=3),
        Fault("status", status=429, headers={"Retry-After": "0"}, times=2),
        Fault("status", status=503, times=3),
        Fault("short", after=100, times=2),
    ],
    ids=lambda fault: f"{fault.kind}{fault.status}",
)
def test_troubles_that_pass(server: HubServer, model: Path, tmp_path: Path, fault: Fault) -> None:
    prepared = prepare(REPO, options())
    server.faults.append(fault)
    with prepared.source:
        convert(prepared, tmp_path / "out")
    assert fault.times == 0
    server.faults.clear()
    run(Path(REPO), tmp_path / "undisturbed")
    assert snapshot(tmp_path / "out") == snapshot(tmp_path / "undisturbed")


@pytest.mark.parametrize("kind", ["etag", "total", "drop", "status"])
def test_troubles_that_stay_end_unfinished_and_resume(server: HubServer, tmp_path: Path, kind: str) -> None:
    prepared = prepare(REPO, options())
    server.faults.append(Fault(kind, path="model-00003", after=10, times=10**9))
    with prepared.source, pytest.raises(Unfinished, match="model-00003"):
        convert(prepared, tmp_path / "out")
    assert not (tmp_path / "out" / MANIFEST).exists()
    assert not list((tmp_path / "out").glob("*.tmp"))
    server.faults.clear()
    run(Path(REPO), tmp_path / "out")
    run(Path(REPO), tmp_path / "undisturbed")
    assert snapshot(tmp_path / "out") == snapshot(tmp_path / "undisturbed")


def test_ctrl_c_does_not_wait_for_retries(server: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "Retry", lambda: Retry(attempts=9, first=300.0, longest=300.0))
    prepared = prepare(REPO, options())
    server.faults.append(Fault("status", path="model-00003", status=503, times=10**9))

    def interrupt() -> None:
        while not any(request.status == 503 for request in server.requests):
            time.sleep(0.01)
        time.sleep(0.2)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt).start()
    started = time.monotonic()
    with prepared.source, pytest.raises(KeyboardInterrupt):
        convert(prepared, tmp_path / "out")
    assert time.monotonic() - started < 60
    assert not list((tmp_path / "out").glob("*.tmp"))
