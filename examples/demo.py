"""What Chord does, in half a minute on a CPU: `make demo`, or `python examples/demo.py`.

A small Kimi-format checkpoint is written with compressed-tensors, converted, verified and loaded; the three operators
and a whole MoE layer run on it; and every number is compared with what compressed-tensors' own weights give.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import kimi_checkpoint
import torch
from safetensors import safe_open
from torch import Tensor

import chord_runtime as chord
from chord_runtime import routing
from chord_runtime.format.packing import deinterleave, dequantize
from chord_runtime.layer import PackedLayer

LAYER, TOKENS, EP = 1, 96, 4


def main() -> int:
    """Run the demo in a temporary folder; returns 1 if a number is off."""
    with tempfile.TemporaryDirectory(prefix="chord-demo-") as folder:
        source, packed = Path(folder, "kimi-small"), Path(folder, "kimi-small-chord")
        print(
            f"A checkpoint in the format of Kimi K2, {kimi_checkpoint.EXPERTS} experts a layer, by compressed-tensors"
        )
        kimi_checkpoint.write(source)
        command("chord", "validate", str(source), cwd=folder)
        command("chord-convert", str(source), "--ep", str(EP), "-o", str(packed), cwd=folder)
        command("chord", "verify", str(packed), "--against", str(source), cwd=folder)
        return compute(Checkpoint(source), packed)


def command(*arguments: str, cwd: str) -> None:
    """Run one of Chord's commands; show what was typed and the last line it says."""
    short = " ".join(argument.removeprefix(f"{cwd}/") for argument in arguments)
    done = subprocess.run(
        [str(Path(sys.executable).with_name(arguments[0])), *arguments[1:]], capture_output=True, text=True, check=False
    )
    if done.returncode:
        sys.exit(f"$ {short}\n{done.stdout}{done.stderr}")
    print(f"\n$ {short}\n  {done.stdout.strip().splitlines()[-1].replace(f'{cwd}/', '')}")


def compute(checkpoint: Checkpoint, packed: Path) -> int:
    """Load, multiply, compare, print the table."""
    rank = chord.load(packed, ep_rank=2)
    print(f"\nrank 2 of {EP} holds experts {rank[LAYER].experts} and read {rank.report}")
    layers = chord.load(packed, ep_size=1)  # the same files, all experts on one device
    layer = layers[LAYER]

    x = torch.randn(TOKENS, kimi_checkpoint.HIDDEN, generator=torch.Generator().manual_seed(1)).bfloat16()
    topk_ids, topk_weights = checkpoint.route(x)
    experts = [checkpoint.expert(expert) for expert in range(kimi_checkpoint.EXPERTS)]
    rows, hidden, down = by_hand(x, experts, topk_ids)
    weighted = (down.view(*topk_ids.shape, -1) * topk_weights.unsqueeze(-1)).bfloat16()  # rounded like down's rows
    wanted = weighted.float().sum(1)

    print(f"\n{TOKENS} tokens × top-{kimi_checkpoint.TOP_K}, beside dense arithmetic on compressed-tensors' weights:\n")
    table = Table()
    table.row(
        "weights of 16 experts", torch.cat([dense(layer, e) for e in range(len(experts))]), stack(experts), roundings=0
    )
    results = []
    for mode, run in {"contiguous": run_contiguous, "masked": run_masked, "indexed": run_indexed}.items():
        found = [
            run(layer, "gate_up", rows, topk_ids),
            run(layer, "down", hidden.bfloat16(), topk_ids),
            chord.moe_layer(x, layer, topk_ids, topk_weights, mode=mode),
        ]
        table.row(f"{mode:<12}gate, up, SwiGLU", found[0], hidden)
        table.row(f"{mode:<12}down", found[1], down)
        table.row(f"{mode:<12}whole MoE layer", found[2], wanted)
        results.append(found)
    parts = [
        chord.moe_layer(x, chord.load(packed, r, layers=[LAYER])[LAYER], topk_ids, topk_weights) for r in range(EP)
    ]
    table.row(f"sum of {EP} ranks, each rounded", torch.stack(parts).float().sum(0).bfloat16(), wanted, roundings=2)

    same = all(torch.equal(a, b) for found in results for a, b in zip(found, results[0], strict=True))
    print(f"\nThe three modes agree bit for bit: {'yes' if same else 'NO'}.")
    print("Every number is right." if same and table.good else "FAILED: a number is off.")
    return 0 if same and table.good else 1


def dense(layer: PackedLayer, expert: int) -> Tensor:
    """All weights of a packed expert, dequantized, in the order gate, up, down."""
    gate, up = deinterleave(dequantize(layer.w13.data[expert], layer.w13.n, layer.w13.k))
    down = dequantize(layer.w2.data[expert], layer.w2.n, layer.w2.k)
    return torch.cat([gate.flatten(), up.flatten(), down.flatten()])


def stack(experts: list[tuple[Tensor, ...]]) -> Tensor:
    """The same of compressed-tensors' weights, for all experts."""
    return torch.cat([weight.flatten() for weights in experts for weight in weights])


def run_contiguous(layer: PackedLayer, step: str, rows: Tensor, topk_ids: Tensor) -> Tensor:
    """One operator, rows by routed index in and out."""
    route = routing.contiguous(topk_ids, layer.w13.num_experts)
    weight, activation = (layer.w13, "swiglu") if step == "gate_up" else (layer.w2, None)
    return chord.contiguous(rows[route.routed], weight, route.m_indices, activation=activation)[route.rows.view(-1)]


def run_masked(layer: PackedLayer, step: str, rows: Tensor, topk_ids: Tensor) -> Tensor:
    """One operator, rows by routed index in and out."""
    route = routing.masked(topk_ids, layer.w13.num_experts)
    weight, activation = (layer.w13, "swiglu") if step == "gate_up" else (layer.w2, None)
    out = chord.masked(rows[route.routed], weight, route.masked_m, route.expected_m, activation=activation)
    return out[route.rows.view(-1)]


def run_indexed(layer: PackedLayer, step: str, rows: Tensor, topk_ids: Tensor) -> Tensor:
    """One operator, rows by routed index in and out."""
    route = routing.indexed(topk_ids, layer.w13.num_experts)
    weight, activation = (layer.w13, "swiglu") if step == "gate_up" else (layer.w2, None)
    buffers = route.sorted_ids, route.expert_ids, route.num_tokens_padded
    return chord.indexed(rows, weight, *buffers, 1, route.block_size, activation=activation)


class Checkpoint:
    """The source checkpoint, read with safetensors and compressed-tensors only."""

    def __init__(self, directory: Path) -> None:
        file = sorted(directory.glob("*.safetensors"))[LAYER]  # one file a layer
        with safe_open(file, "pt") as opened:
            self.tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 - not a dict

    def expert(self, expert: int) -> tuple[Tensor, Tensor, Tensor]:
        """gate, up and down of one expert, BF16."""
        name = f"model.layers.{LAYER}.mlp.experts.{expert}."
        kinds = ("weight_packed", "weight_scale", "weight_shape")
        gate, up, down = (
            kimi_checkpoint.decompress({kind: self.tensors[f"{name}{linear}_proj.{kind}"] for kind in kinds})
            for linear in ("gate", "up", "down")
        )
        return gate, up, down

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Kimi's router: top-k of sigmoid scores plus bias, weights normalised and scaled."""
        gate = f"model.layers.{LAYER}.mlp.gate."
        scores = torch.sigmoid(x.float() @ self.tensors[f"{gate}weight"].float().T)
        biased = scores + self.tensors[f"{gate}e_score_correction_bias"]
        ids = biased.topk(kimi_checkpoint.TOP_K, -1).indices
        chosen = scores.gather(1, ids)
        scaled = chosen / chosen.sum(-1, keepdim=True) * kimi_checkpoint.CONFIG["routed_scaling_factor"]
        return ids.int(), scaled


def by_hand(x: Tensor, experts: list[tuple[Tensor, ...]], topk_ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Input rows by routed index, and what dense FP32 arithmetic gives for them after SwiGLU and after down."""
    rows = x.repeat_interleave(topk_ids.shape[1], 0)
    hidden, out = [], []
    for row, expert in zip(rows.float(), topk_ids.view(-1).tolist(), strict=True):
        gate, up, down = (weight.float() for weight in experts[expert])
        hidden.append(torch.nn.functional.silu(gate @ row) * (up @ row))
        out.append(down @ hidden[-1].bfloat16().float())
    return rows, torch.stack(hidden), torch.stack(out)


class Table:
    """Rows as they come: what ran, its shape, and how far it is from what is expected."""

    def __init__(self) -> None:
        self.good = True
        print(f"  {'':<30}{'result':>12}{'relative error':>17}{'same BF16 bits':>17}")

    def row(self, name: str, found: Tensor, expected: Tensor, roundings: int = 1) -> None:
        """Compare with FP32 and print. A rounding to BF16 is off by 2^-8 at most, and by less than 2^-9 on average."""
        error = float((found.float() - expected.float()).norm() / expected.float().norm())
        same = float((found == expected.bfloat16()).float().mean())
        good = error <= roundings * 2**-9
        self.good &= good
        shape = "×".join(map(str, found.shape))
        print(f"  {name:<30}{shape:>12}{error:>17.1e}{same:>16.2%} {'✓' if good else '✗ WRONG'}")


if __name__ == "__main__":
    sys.exit(main())
