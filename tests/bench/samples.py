"""A small recorded run: probe kernels on one H200 at points of the published table, with the card's ceilings.

Times alone are made up: 5 % below those in turns.
"""

from __future__ import annotations

from chord_runtime.bench.ceilings import Ceilings
from chord_runtime.bench.results import DENSE, Measurement, Results
from chord_runtime.bench.timing import Timing

CEILINGS = Ceilings(copy_tbps=4.31, read_tbps=4.60, dense_tflops={"4096": 700.0, "8192": 672.0})

# key: (experts with rows, µs of the probe, µs of Humming)
MEASURED = {
    "masked/gate_up/8": (48, 207.0, 241.0),
    "masked/gate_up/32": (48, 254.0, 345.0),
    "masked/down/8": (48, 115.0, 131.0),
    "contiguous/gate_up/128": (48, 523.0, 725.0),
    "contiguous/gate_up/256": (48, 1010.0, 1296.0),
    "contiguous/gate_up/512": (48, 2015.0, 2209.0),
    "contiguous/down/128": (48, 282.0, 372.0),
    "decode/gate_up/20": (47, 210.0, 212.0),
    "decode/down/20": (47, 108.0, 116.0),
    "prefill/gate_up/1024": (48, 252.0, 287.0),
    "prefill/gate_up/16384": (48, 1688.0, 1911.0),
    "tp8/down/8192": (384, 729.0, 929.0),
}


def timing(us: float) -> Timing:
    return Timing(us, us * 0.99, us * 1.02, 100, 9.5)


def sample(device: str = "NVIDIA H200 (132 SMs, 151 GB)", *, humming: bool = True, scale: float = 1.0) -> Results:
    """The run above; ``scale`` makes the probe slower or faster."""
    dense = {DENSE: timing(2 * 4096**3 / 690e6)}
    points = {}
    for key, (active, ours, peer) in MEASURED.items():
        timings = {"chord": timing(ours * scale)} | ({"humming": timing(peer)} if humming else {})
        timings |= dense if key.startswith("contiguous") else {}
        points[key] = Measurement(active, 1e-4, timings, alone_us=0.95 * ours * scale, seconds=1.5)
    return Results({"device": device, "torch": "2.11.0"}, {"timing": "median"}, CEILINGS, points)
