"""``chord bench`` on a GPU: the ceilings are sane, and one point of each mode is checked, timed, saved and shown."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from chord_runtime.bench.ceilings import bulk_read, measure_ceilings
from chord_runtime.bench.contenders import Humming
from chord_runtime.bench.results import Results
from chord_runtime.bench.timing import CudaTimer
from chord_runtime.commands.bench import bench

pytestmark = pytest.mark.gpu


def test_bulk_read_reads_its_range() -> None:
    source = torch.zeros(1 << 28, dtype=torch.int32, device="cuda")
    call, read_bytes = bulk_read(source)
    assert 0.99 * 2**30 < read_bytes <= 2**30
    took = CudaTimer().measure({"read": call}, 20.0)["read"].us
    assert 1.0 < read_bytes / took / 1e6 < 10.0, "TB/s"


def test_ceilings() -> None:
    found = measure_ceilings(CudaTimer(), 20.0)
    assert 0 < found.copy_tbps <= found.read_tbps * 1.1
    assert all(rate > 50 for rate in found.dense_tflops.values())


def test_one_point_of_each_mode(tmp_path: Path) -> None:
    points = ["masked/down/8", "contiguous/down/128", "decode/down/20", "tp8/gate_up/1024"]
    arguments = [part for point in points for part in ("--points", point)]
    result = CliRunner().invoke(bench, [*arguments, "--save", str(tmp_path / "run.json")], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    results = Results.load(tmp_path / "run.json")
    assert set(results.points) == set(points)
    expected = {"chord", "torch bf16"} | ({"humming"} if Humming.version() else set())
    for key, point in results.points.items():
        assert point.failures == {}, key
        assert set(point.timings) == expected
        assert 0 < point.timings["chord"].host_us <= 12.0, "resolved once a shape, then cheap"
        assert point.error is not None
