"""The same conversion on a real Ray, one of whose workers is killed in the middle of a file."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from chord_convert.executors import ray as executor
from chord_runtime.errors import ScaleError, Unfinished
from chord_runtime.format.layout import MANIFEST
from tests.checkpoints import write_checkpoint
from tests.convert.helpers import options, run, snapshot

ray = pytest.importorskip("ray")
pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("address", "message"),
    [("127.0.0.1:9", "[Errno 111] Connection refused"), ("nonsense", "Invalid address format")],
)
def test_a_wrong_address_is_one_error(model: Path, tmp_path: Path, address: str, message: str) -> None:
    """In a process of its own: this one's Ray is started already."""
    arguments = [str(model), "--ep", "2", "-o", str(tmp_path / "out"), "--executor", "ray", "--address", address]
    environment = {**os.environ, "RAY_TMPDIR": str(tmp_path)}
    command = [sys.executable, "-c", "from chord_convert.cli import main; main()", *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2, done.stderr
    assert f"error: no Ray cluster at {address} ({message}" in done.stderr and "Traceback" not in done.stderr


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="error")
    yield
    ray.shutdown()


def test_the_same_bytes_as_threads(model: Path, packed: Path, tmp_path: Path) -> None:
    run(model, tmp_path / "out", run=executor.run)
    assert snapshot(tmp_path / "out") == snapshot(packed)


def writer_of(directory: Path) -> int | None:
    """The process, other than this one, that holds one of the directory's temporaries open."""
    for process in Path("/proc").glob("[0-9]*"):
        try:
            held = [str(entry.readlink()) for entry in (process / "fd").iterdir()]
        except OSError:
            continue
        if int(process.name) != os.getpid() and any(f"{directory}/" in name and ".tmp" in name for name in held):
            return int(process.name)
    return None


def test_a_worker_killed_in_the_middle_of_a_file(tmp_path: Path) -> None:
    model = write_checkpoint(tmp_path / "model", layers=4, experts=32, hidden=1024, intermediate=512)
    output, killed = tmp_path / "out", []

    def kill() -> None:
        deadline = time.monotonic() + 60
        while not killed and time.monotonic() < deadline:
            process = writer_of(output)
            if process is not None:
                os.kill(process, signal.SIGKILL)
                killed.append(process)

    killer = threading.Thread(target=kill)
    killer.start()
    run(model, output, options(2), run=executor.run)
    killer.join()
    assert killed
    run(model, tmp_path / "undisturbed", options(2))
    assert snapshot(output) == snapshot(tmp_path / "undisturbed")


def test_a_source_that_changed_since_the_plan(tmp_path: Path) -> None:
    model = write_checkpoint(tmp_path / "model")

    def change_first(*arguments: Any) -> None:
        os.utime(model / "model-00002-of-000004.safetensors")
        executor.run(*arguments)

    with pytest.raises(Unfinished, match="not the same here"):
        run(model, tmp_path / "out", run=change_first)
    assert not (tmp_path / "out" / MANIFEST).exists()


def test_a_tasks_error_is_the_runs_error(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    model = write_checkpoint(tmp_path / "model")
    file = sorted(model.glob("model-*"))[1]
    tensors = load_file(file)
    tensors["model.layers.1.mlp.experts.3.up_proj.weight_scale"][0, 0] = float("inf")
    save_file(tensors, file)
    with pytest.raises(ScaleError, match="is inf"):
        run(model, tmp_path / "out", run=executor.run)
