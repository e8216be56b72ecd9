"""A decode loop of your own: load a rank's experts, run all its MoE layers, and on a GPU replay them as one CUDA graph.

    python examples/custom_loop.py DIRECTORY [--tokens 32] [--steps 100] [--ep-rank 0 --ep-size 1]

DIRECTORY is made by chord-convert. Attention is left out and the router is random, so that the page stays a page.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch
from torch import Tensor

import chord_runtime as chord
from chord_runtime.loader import PackedLayers


class Router:
    """Random stand-in for a model's router: float32 scores, top-k, weights that add up to 1."""

    def __init__(self, num_experts: int, hidden: int, top_k: int, device: str) -> None:
        self.gate = torch.randn(hidden, num_experts, generator=torch.Generator().manual_seed(0)).to(device)
        self.top_k = min(top_k, num_experts)

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Global expert ids int64 and weights float32, both [tokens, top_k]."""
        weights, ids = torch.softmax(x.float() @ self.gate / x.shape[1] ** 0.5, -1).topk(self.top_k)
        return ids, weights / weights.sum(-1, keepdim=True)


def norm(x: Tensor) -> Tensor:
    """Keeps activations in range from layer to layer."""
    return torch.nn.functional.rms_norm(x, x.shape[1:])


def decode_step(layers: PackedLayers, route: Router, x: Tensor) -> Tensor:
    """All MoE layers for one token of each sequence. Nothing here waits for the device."""
    for layer in layers.values():
        ids, weights = route(x)
        # With several ranks this is the part of this rank's experts: add the ranks' parts here (or see ep_loop.py).
        x = norm(x + chord.moe_layer(x, layer, ids, weights))
    return x


def graphed(step: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """The same step as one CUDA graph: a single launch, whatever the number of layers."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()  # kernels are compiled and loaded at their first call, which a capture must not see
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = step()

    def replay() -> Tensor:
        graph.replay()
        return result

    return replay


def at_least(least: int) -> Callable[[str], int]:
    """An argument type: numbers from ``least`` on."""

    def number(text: str) -> int:
        if int(text) < least:
            raise argparse.ArgumentTypeError(f"found {text}; supported: {least} or more")
        return int(text)

    return number


def main() -> None:
    """Load, check the graph against eager calls, time the loop."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory")
    for name, value in (("tokens", 32), ("steps", 100), ("top-k", 8), ("ep-size", 1)):
        parser.add_argument(f"--{name}", type=at_least(1), default=value)
    parser.add_argument("--ep-rank", type=at_least(0), default=0)
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"

    try:
        layers = chord.load(options.directory, options.ep_rank, options.ep_size, device=device)
    except chord.ChordError as error:
        parser.error(str(error))
    if layers.layout.tp_size > 1:
        parser.error(f"{options.directory} has slices of experts: convert without --tp, for experts as a whole")
    print(f"{len(layers)} layers on {device}: {layers.report}")
    shape = layers.packing.shape
    route = Router(shape.num_experts, shape.hidden, options.top_k, device)
    x = torch.randn(options.tokens, shape.hidden, generator=torch.Generator().manual_seed(1)).bfloat16().to(device)

    def step() -> Tensor:
        return decode_step(layers, route, x)

    eager = step()
    if device == "cuda":
        step = graphed(step)
        assert torch.equal(step(), eager), "the graph must give the bits of the eager calls"
    started = time.perf_counter()
    for _ in range(options.steps):
        x.copy_(step())  # a graph reads its inputs where they were when it was captured
    if device == "cuda":
        torch.cuda.synchronize()
    seconds = (time.perf_counter() - started) / options.steps
    how = "one CUDA graph" if device == "cuda" else "no graph"
    print(f"{seconds * 1e3:.3f} ms a step, {options.tokens / seconds:.0f} tokens/s ({how})")
    print(f"mean of the last step: {float(x.float().mean()):.6f}")


if __name__ == "__main__":
    main()
