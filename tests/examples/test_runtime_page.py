"""The program of docs/runtime.md runs as it is written, and its claims about shapes hold."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parents[2]


def test_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(*command: str) -> None:
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr

    run(sys.executable, str(ROOT / "examples" / "kimi_checkpoint.py"), "kimi-small")
    run(str(Path(sys.executable).with_name("chord-convert")), "kimi-small", "--ep", "4", "-o", "kimi-small-chord")
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "runtime.md").read_text(), re.DOTALL)
    assert len(blocks) == 3
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    exec("\n".join(blocks), names)
    said = re.search(r"# ([\d,]+ bytes from \d+ files) in", blocks[0])
    assert said and str(names["rank"].report).startswith(said[1])
    layer, topk_ids = names["layer"], names["topk_ids"]
    assert layer.experts == tuple(range(8, 16))
    assert names["y"].shape == (40, layer.w2.n)
    owned = (layer.expert_map[topk_ids] >= 0).view(-1)
    expected = names["i"][owned]
    for mode, found in (("contiguous", names["c"]), ("masked", names["m"])):
        rows = getattr(names["routing"], mode)(topk_ids, names["experts"], expert_map=layer.expert_map).rows
        assert torch.equal(found[rows.view(-1)[owned]], expected)
