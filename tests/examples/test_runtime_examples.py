"""The examples of the runtime run, and the demo notices a wrong number."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

EXAMPLES = Path(__file__).parents[2] / "examples"


def run(name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(EXAMPLES / name), *arguments], capture_output=True, text=True, check=False
    )


def test_operators() -> None:
    done = run("operators.py")
    assert done.returncode == 0, done.stderr
    assert "agree bit for bit" in done.stdout


def test_demo() -> None:
    done = run("demo.py")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("✓") == 11 and "✗" not in done.stdout
    assert "Every number is right." in done.stdout
    assert "every byte is equal to kimi-small, unpacked" in done.stdout
    assert os.sep + "tmp" not in done.stdout


def test_the_demo_can_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its table refuses a result that is off by more than rounding."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    spec = importlib.util.spec_from_file_location("demo", EXAMPLES / "demo.py")
    assert spec and spec.loader
    demo = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(demo)
    exact = torch.randn(100, 50, generator=torch.Generator().manual_seed(0))
    table = demo.Table()
    table.row("rounded", exact.bfloat16(), exact)
    assert table.good
    table.row("one value wrong", torch.cat([exact[:99], -exact[99:]]).bfloat16(), exact)
    assert not table.good
    table = demo.Table()
    table.row("not exact", exact.bfloat16(), exact, roundings=0)
    assert not table.good
