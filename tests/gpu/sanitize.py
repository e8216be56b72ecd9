"""A reduced set of calls for compute-sanitizer, which is a hundred times slower than the tests:

for tool in memcheck racecheck synccheck initcheck; do
    compute-sanitizer --tool $tool --report-api-errors no --error-exitcode 1 python -m tests.gpu.sanitize
done

Every mode and epilogue, empty experts and −1 choices, on shapes whose activations travel with the weights, for many
rows and for few, and on two whose activations stay in shared memory, in two slots and in one; then whole layers.
"""

from __future__ import annotations

import torch

import chord_runtime as chord
from chord_runtime.layer import PackedLayer
from chord_runtime.ops.weight import PackedWeight
from tests import generators
from tests.gpu.calls import MODES, batch, call

SHAPES = ((384, 320, 20), (384, 2304, 2), (384, 128, 42), (128, 128, 90))
"""N, K and tokens."""


def main() -> None:
    """Run all calls; the sanitizer is the judge, values are the tests' business."""
    for n, k, tokens in SHAPES:
        for gate_up in (False, True):
            packed, _ = generators.experts(3, n, k, gate_up=gate_up)
            w = PackedWeight(packed.data.cuda(), n, k, packed.row_order)
            for mode in MODES:
                for draw in ("hot", "none"):
                    for activation in (None, "swiglu") if gate_up else (None,):
                        call(mode, batch(tokens, 3, k, 2, draw), w, activation)
    w13, w2 = (
        PackedWeight(packed.data.cuda(), n, 128, packed.row_order)
        for n, gate_up in ((256, True), (128, False))
        for packed, _ in [generators.experts(3, n, 128, gate_up=gate_up)]
    )
    layer = PackedLayer(w13, w2, (0, 1, 2), 3)
    for mode in MODES:
        for draw in ("hot", "none"):
            b = batch(20, 3, 128, 2, draw)
            chord.moe_layer(b.x, layer, b.ids, b.weights, mode=mode)
    torch.cuda.synchronize()
    print("done")


if __name__ == "__main__":
    main()
