"""custom_loop.py and ep_loop.py on the CPU: the second with several processes over gloo."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from click.testing import CliRunner

from chord_convert.cli import cli
from tests import generators
from tests.checkpoints import write_checkpoint

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A packed directory by placement."""
    root = tmp_path_factory.mktemp("loops")
    source = write_checkpoint(root / "source", layers=3, experts=8, hidden=128, intermediate=64)
    for placement in ("linear", "round_robin"):
        options = ["--ep", "2", "--placement", placement, "-o", str(root / placement)]
        done = CliRunner().invoke(cli, [str(source), *options])
        assert done.exit_code == 0, done.output
    return {placement: root / placement for placement in ("linear", "round_robin")}


def run(*command: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, check=False, env=environment, timeout=300
    )


def test_custom_loop(packed: dict[str, Path]) -> None:
    loop, directory = str(EXAMPLES / "custom_loop.py"), str(packed["linear"])
    whole = run(loop, directory, "--steps", "3", "--tokens", "5", "--top-k", "2")
    assert whole.returncode == 0, whole.stderr
    assert "2 layers on cpu" in whole.stdout and "tokens/s (no graph)" in whole.stdout
    rank = run(loop, directory, "--steps", "1", "--ep-rank", "3", "--ep-size", "4")
    assert rank.returncode == 0, rank.stderr


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("custom_loop.py", ("--tokens", "-3"), "argument --tokens: found -3; supported: 1 or more"),
        ("custom_loop.py", ("--steps", "0"), "argument --steps: found 0; supported: 1 or more"),
        ("custom_loop.py", ("--top-k", "x"), "argument --top-k: invalid number value: 'x'"),
        ("custom_loop.py", ("--ep-rank", "-1"), "argument --ep-rank: found -1; supported: 0 or more"),
        ("custom_loop.py", ("--ep-size", "3"), "ep size 3 does not divide 8 experts"),
        ("custom_loop.py", ("--ep-rank", "2", "--ep-size", "2"), "ep rank 2 is not one of 0..1"),
        ("ep_loop.py", ("--decode", "0"), "argument --decode: found 0; supported: 1 or more"),
        ("ep_loop.py", (), "no launcher has set LOCAL_WORLD_SIZE: run it with torchrun"),
        ("kimi_checkpoint.py", ("more",), "unrecognized arguments: more"),
    ],
)
def test_senseless_arguments(packed: dict[str, Path], name: str, arguments: tuple[str, ...], message: str) -> None:
    done = run(str(EXAMPLES / name), str(packed["linear"]), *arguments)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert f"{name}: error: {message}" in done.stderr.splitlines()[-1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("placement", "ranks", "prefill", "top_k"),
    [("linear", 2, 19, 3), ("round_robin", 4, 19, 3), ("linear", 4, 1, 1)],
)
def test_ep_loop(packed: dict[str, Path], placement: str, ranks: int, prefill: int, top_k: int) -> None:
    """The last case leaves ranks without a row: four tokens with one expert each, of eight."""
    options = ("--prefill", str(prefill), "--decode", "3", "--steps", "1", "--top-k", str(top_k))
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks))
    done = run(*torchrun, str(EXAMPLES / "ep_loop.py"), str(packed[placement]), *options)
    assert done.returncode == 0, done.stdout + done.stderr
    for name in ("prefill", "decode"):
        assert f"{name}: equal to one rank bit for bit in 2 layers; {ranks} ranks" in done.stdout
    assert done.stdout.count("communication") == 2
    held = [line for line in done.stdout.splitlines() if line.startswith("rank ")]
    assert len(held) == ranks


def test_the_check_of_ep_loop_can_fail(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    import ep_loop

    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        layer, _, _ = generators.layer((0, 1, 2, 3), 4)
        x, ids, weights = generators.activations(6, 128), torch.tensor([[0, 3]] * 6), torch.rand(6, 2)
        parallel = ep_loop.ExpertParallel(torch.zeros(4, dtype=torch.int64), 1, ep_loop.Clock(torch.device("cpu")))
        for exchange in (parallel.decode, parallel.prefill):
            ep_loop.check(exchange, x, layer, layer, ids, weights)
            with pytest.raises(SystemExit, match="1 values differ"):
                ep_loop.check(lambda *a, run=exchange: _one_off(run(*a)), x, layer, layer, ids, weights)
    finally:
        dist.destroy_process_group()


def _one_off(result: torch.Tensor) -> torch.Tensor:
    result[2, 7] += result.abs().max()
    return result


@pytest.mark.parametrize(
    ("loop", "options", "message"),
    [
        ("custom_loop.py", ("--tp", "1", "--mode", "masked"), None),
        ("custom_loop.py", ("--tp", "2"), "has slices of experts: convert without --tp"),
        ("ep_loop.py", ("--tp", "2"), "has slices of experts: convert without --tp"),
        ("ep_loop.py", ("--mode", "masked"), "was not packed for contiguous: convert with --mode all"),
    ],
)
def test_what_a_loop_cannot_run(tmp_path: Path, loop: str, options: tuple[str, ...], message: str | None) -> None:
    source = write_checkpoint(tmp_path / "source", layers=2, experts=8, hidden=128, intermediate=128)
    done = CliRunner().invoke(cli, [str(source), "--ep", "1", *options, "-o", str(tmp_path / "out")])
    assert done.exit_code == 0, done.output
    launcher = ("-m", "torch.distributed.run", "--nproc-per-node", "1") if loop == "ep_loop.py" else ()
    found = run(*launcher, str(EXAMPLES / loop), str(tmp_path / "out"), "--steps", "1", "--top-k", "2")
    assert (found.returncode == 0) == (message is None)
    assert message is None or message in found.stderr
