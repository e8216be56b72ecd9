"""``chord bench`` on a GPU: ceilings are measured, and one point of each mode is checked, timed and saved."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from chord_runtime.bench import humming
from chord_runtime.bench.ceilings import bulk_read, measure_ceilings
from chord_runtime.bench.results import DENSE, Results
from chord_runtime.bench.timing import CudaTimer
from chord_runtime.commands.bench import bench

pytestmark = pytest.mark.gpu


def test_bulk_read_reads_its_range() -> None:
    source = torch.zeros(1 << 28, dtype=torch.int32, device="cuda")
    call, read_bytes = bulk_read(source)
    assert 0.99 * 2**30 < read_bytes <= 2**30
    assert CudaTimer().measure({"read": call}, 20.0)["read"].us > 0


def test_ceilings() -> None:
    found = measure_ceilings(CudaTimer())
    assert found.copy_tbps > 0
    assert found.read_tbps > 0
    assert all(rate > 0 for rate in found.dense_tflops.values())


def test_one_point_of_each_mode(tmp_path: Path) -> None:
    points = ["masked/down/8", "contiguous/down/128", "decode/down/20"]  # one weight for all three
    arguments = [part for point in points for part in ("--points", point)]
    path = str(tmp_path / "run.json")
    result = CliRunner().invoke(bench, ["--quick", *arguments, "--save", path], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    results = Results.load(tmp_path / "run.json")
    assert set(results.points) == set(points)
    expected = {"chord", "torch bf16"} | ({"humming"} if humming.version() else set())
    for key, point in results.points.items():
        assert point.failures == {}, key
        assert set(point.timings) == expected | ({DENSE} if key.startswith("contiguous") else set())
        assert point.timings["chord"].host_us > 0
        assert point.error is not None
        assert point.alone_us is not None
        assert 0.5 < point.alone_us / point.timings["chord"].us < 1.5
