"""For all tests: workers that run side by side share the cores."""

from __future__ import annotations

import os

if workers := int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "0")):
    # Torch takes every core in each worker otherwise, and they spend their time waiting for each other: minutes.
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // workers)))
