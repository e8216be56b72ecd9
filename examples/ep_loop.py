"""Expert parallelism without a server: N ranks load their experts, exchange tokens, compute, combine.

    torchrun --nproc-per-node 2 examples/ep_loop.py DIRECTORY [--prefill 1024] [--decode 16] [--steps 20]

Any number of ranks that divides the experts; NCCL on GPUs, gloo on CPUs. Every layer's result is compared, bit for bit,
with all experts and all tokens on one rank. Two ways to exchange, as servers do it:

decode   Shapes are fixed, so nothing waits for the host, and slots that are not needed travel too: every rank has one
         for each of its tokens on every rank. Received rows are sorted into the masked layout, [experts, max_m, hidden]
         of which masked_m are valid; each choice's row returns to its own slot.
prefill  Rows travel once for each choice, exactly as many as there are: ranks tell each other counts first (the host
         reads them), and received rows are sorted into the contiguous layout.

An expert's weight is applied where the expert is, in the epilogue of down; the sum over a token's choices happens on
the token's own rank, in the order of the choices. So the bits cannot depend on the number of ranks.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from custom_loop import Router, at_least, norm
from torch import Tensor

import chord_runtime as chord
from chord_runtime import routing
from chord_runtime.layer import PackedLayer


class Clock:
    """Time in total and in communication; on a GPU by events, so that measuring does not wait."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.reset()

    def reset(self) -> None:
        """Forget what was measured."""
        self._spans: list[tuple[object, object]] = []
        self._began = self._now()

    @contextmanager
    def communication(self) -> Iterator[None]:
        """Counts what happens inside as communication (waiting for slower ranks included)."""
        began = self._now()
        yield
        self._spans.append((began, self._now()))

    def read(self) -> tuple[float, float]:
        """Seconds since ``reset``, and those of them in communication."""
        total = (self._began, self._now())
        if self._device.type == "cuda":
            torch.cuda.synchronize()
        return self._seconds(*total), sum(self._seconds(*span) for span in self._spans)

    def _now(self) -> object:
        if self._device.type == "cpu":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _seconds(self, began: object, ended: object) -> float:
        if isinstance(began, float) and isinstance(ended, float):
            return ended - began
        return began.elapsed_time(ended) / 1e3  # type: ignore[attr-defined]


class ExpertParallel:
    """Layers whose experts are spread over the ranks: rank ``owner[e]`` holds global expert e."""

    def __init__(self, owner: Tensor, ranks: int, clock: Clock) -> None:
        self.owner, self.ranks, self.clock = owner, ranks, clock

    def decode(self, x: Tensor, layer: PackedLayer, ids: Tensor, weights: Tensor) -> Tensor:
        """Fixed shapes: x [T, hidden], ids and weights [T, top_k] → [T, hidden]; T is the same on all ranks."""
        tokens, top_k = ids.shape
        # Slot (rank, token): the token's row, and ids of the experts that it wants there.
        mine = self.owner[ids] == torch.arange(self.ranks, device=ids.device).view(-1, 1, 1)
        rows = self._exchange(x.expand(self.ranks, *x.shape))
        wanted = self._exchange(torch.where(mine, ids, -1))
        scales = self._exchange(weights.expand(self.ranks, *weights.shape))

        wanted = wanted.view(-1, top_k)
        route = routing.masked(wanted, layer.w13.num_experts, len(wanted), layer.expert_map, scales.view(-1, top_k))
        sorted_rows = routing.gather(rows.view(-1, x.shape[1]), route.routed, wanted)
        valid = route.masked_m, route.expected_m
        hidden = chord.masked(sorted_rows, layer.w13, *valid, activation="swiglu")
        down = chord.masked(hidden, layer.w2, *valid, row_weight=route.row_weight)

        results = self._exchange(down[route.rows.clamp(min=0)].view(self.ranks, tokens * top_k, -1))
        choice = torch.arange(tokens * top_k, device=ids.device).view(tokens, top_k)
        place = self.owner[ids] * (tokens * top_k) + choice
        return routing.combine(results.flatten(0, 1), place.int(), torch.empty_like(x))

    def prefill(self, x: Tensor, layer: PackedLayer, ids: Tensor, weights: Tensor) -> Tensor:
        """As many rows as there are; T may differ between ranks."""
        flat = ids.flatten()
        order = self.owner[flat].argsort(stable=True)
        sent = self.owner[flat].bincount(minlength=self.ranks)
        received = self._exchange(sent)
        send, receive = sent.tolist(), received.tolist()  # the host waits here

        def travel(values: Tensor) -> Tensor:
            out = values.new_empty((sum(receive), *values.shape[1:]))
            with self.clock.communication():
                dist.all_to_all_single(out, values.contiguous(), receive, send)
            return out

        rows, wanted = travel(x[order // ids.shape[1]]), travel(flat[order]).view(-1, 1)
        scales = travel(weights.flatten()[order]).view(-1, 1)

        route = routing.contiguous(wanted, layer.w13.num_experts, layer.expert_map, scales)
        sorted_rows = routing.gather(rows, route.routed, wanted)
        hidden = chord.contiguous(sorted_rows, layer.w13, route.m_indices, activation="swiglu")
        down = chord.contiguous(hidden, layer.w2, route.m_indices, row_weight=route.row_weight)

        back = x.new_empty((len(flat), x.shape[1]))
        with self.clock.communication():
            dist.all_to_all_single(back, down[route.rows.flatten()], send, receive)
        place = torch.empty_like(order)
        place[order] = torch.arange(len(flat), device=order.device)
        return routing.combine(back, place.view(ids.shape).int(), torch.empty_like(x))

    def _exchange(self, slots: Tensor) -> Tensor:
        """Slot r of every rank goes to rank r: [ranks, …] → [ranks, …], ordered by the rank it came from."""
        out = torch.empty_like(slots, memory_format=torch.contiguous_format)
        with self.clock.communication():
            dist.all_to_all_single(out, slots.contiguous())
        return out


Exchange = Callable[[Tensor, PackedLayer, Tensor, Tensor], Tensor]


def check(run: Exchange, x: Tensor, layer: PackedLayer, whole: PackedLayer, ids: Tensor, weights: Tensor) -> Tensor:
    """The layer's result, which must have the bits of one rank with all experts and all ranks' tokens."""
    found = run(x, layer, ids, weights)
    everything = []
    for mine in (x, ids, weights):
        parts = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, mine.contiguous())
        everything.append(torch.cat(parts))
    all_x, all_ids, all_weights = everything
    first = dist.get_rank() * len(x)
    wanted = chord.moe_layer(all_x, whole, all_ids, all_weights)[first : first + len(x)]
    if not torch.equal(found, wanted):
        raise SystemExit(f"rank {dist.get_rank()}: {int((found != wanted).sum())} values differ from one rank's")
    return found


def main() -> None:
    """Load a rank, check both exchanges, time them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory")
    parser.add_argument("--prefill", type=at_least(1), default=1024, help="tokens of each rank")
    parser.add_argument("--decode", type=at_least(1), default=16, help="tokens of each rank")
    parser.add_argument("--steps", type=at_least(1), default=20)
    parser.add_argument("--top-k", type=at_least(1), default=8)
    options = parser.parse_args()
    if "LOCAL_WORLD_SIZE" not in os.environ:
        parser.error("no launcher has set LOCAL_WORLD_SIZE: run it with torchrun, as above")
    on_gpu = torch.cuda.is_available() and torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpu else "gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()

    try:
        layers = chord.load(options.directory, ep_rank=rank, ep_size=ranks, device=device)
    except chord.ChordError as error:
        parser.error(str(error))
    if layers.layout.tp_size > 1:
        parser.error(f"{options.directory} has slices of experts: convert without --tp, for experts as a whole")
    if missing := {chord.Mode.CONTIGUOUS, chord.Mode.MASKED} - set(layers.packing.modes):
        parser.error(f"{options.directory} was not packed for {', '.join(missing)}: convert with --mode all")
    # The newline in the same write: ranks share the terminal.
    print(f"rank {rank} of {ranks} on {device}: experts of {len(layers)} layers, {layers.report}\n", end="", flush=True)
    shape = layers.packing.shape
    owner = torch.empty(shape.num_experts, dtype=torch.int64, device=device)
    for other in range(ranks):
        owner[list(layers.layout.experts_of(other, shape.num_experts))] = other
    route = Router(shape.num_experts, shape.hidden, options.top_k, str(device))
    clock = Clock(device)
    parallel = ExpertParallel(owner, ranks, clock)

    for name, run, tokens in (
        ("prefill", parallel.prefill, options.prefill),
        ("decode", parallel.decode, options.decode),
    ):
        x = torch.randn(tokens, shape.hidden, generator=torch.Generator().manual_seed(rank)).bfloat16().to(device)
        start = x
        for number, layer in layers.items():  # one whole layer at a time beside the shard
            whole = chord.load(options.directory, ep_size=1, device=device, layers=[number])[number]
            x = norm(x + check(run, x, layer, whole, *route(x)))
            del whole
        dist.barrier()
        clock.reset()
        for _ in range(options.steps):
            x = start
            for layer in layers.values():
                x = norm(x + run(x, layer, *route(x)))
        seconds, communication = clock.read()
        if rank == 0:
            rate = tokens * ranks * options.steps / seconds
            print(
                f"{name}: equal to one rank bit for bit in {len(layers)} layers; {ranks} ranks × {tokens} tokens: "
                f"{rate:.0f} tokens/s, {seconds / options.steps * 1e3:.2f} ms a step, "
                f"communication {communication / seconds:.0%}",
                flush=True,
            )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
