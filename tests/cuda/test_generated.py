"""The generated header is what its generator writes."""

from __future__ import annotations

import runpy

from chord_runtime.resources import csrc_dir


def test_wgmma_shapes_are_the_generators() -> None:
    generator = runpy.run_path(str(csrc_dir() / "chord" / "generate_wgmma.py"))
    assert generator["generated"]() == (csrc_dir() / "chord" / "wgmma_shapes.cuh").read_text()
