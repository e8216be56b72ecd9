"""What the Makefile's comments promise, from the commands that ``make`` would run."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.skipif(shutil.which("make") is None, reason="no make here")
@pytest.mark.parametrize("torch", ["", "torch==2.13.0"])
def test_torch_may_be_left_to_the_index(tmp_path: Path, torch: str) -> None:
    command = ["make", "-n", "setup", f"TORCH={torch}", f"VENV={tmp_path}"]
    printed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    installs = [line.partition(" -q ")[2] for line in printed.splitlines() if "pip install" in line]
    assert installs == ["--upgrade pip", *([torch] if torch else []), "-e '.[dev]'"]
