"""Runs in a process of its own: ``routes.py OUT JSON``, where JSON is {route: {"model": …, vLLM arguments}}.

Each route starts the model in vLLM, answers the prompts and saves the answers as OUT/route.pt. A route's key
``batched`` puts vLLM's reference dispatcher of the BatchedExperts format in the place of DeepEP's, which needs several
GPUs. With the key ``refused`` the start must fail, and what it said is saved as OUT/route.txt. With VLLM_DP_SIZE set
this is one rank of a data-parallel group; ranks with an odd number answer the prompts in another order, so that ranks
have different numbers of tokens.
"""

from __future__ import annotations

import gc
import json
import os
import socket
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import torch

from tests.vllm.model import PROMPTS, TOKENS, VOCABULARY, Answer


def answer(llm: Any, prompt: list[int]) -> Answer:
    """Greedy tokens and the log-probabilities of every position."""
    from vllm import SamplingParams

    sampling = SamplingParams(
        temperature=0,
        max_tokens=TOKENS,
        ignore_eos=True,
        prompt_logprobs=VOCABULARY,
        logprobs=VOCABULARY,
        detokenize=False,
    )
    (result,) = llm.generate([{"prompt_token_ids": prompt}], sampling, use_tqdm=False)
    steps = [*result.prompt_logprobs[1:], *result.outputs[0].logprobs]
    logprobs = torch.tensor([[step[token].logprob for token in range(VOCABULARY)] for step in steps])
    return {"tokens": torch.tensor(result.outputs[0].token_ids), "logprobs": logprobs}


def use_batched_dispatch() -> Any:
    """Make Chord's method build its kernel around the BatchedExperts format; returns what it called before."""
    from vllm.model_executor.layers.fused_moe.prepare_finalize.batched import BatchedPrepareAndFinalize

    from chord_runtime.integrations.vllm import method

    before = method.maybe_make_prepare_finalize

    def make(moe: Any, *args: Any, **kwargs: Any) -> BatchedPrepareAndFinalize:
        return BatchedPrepareAndFinalize(moe.max_num_tokens, moe.num_local_experts, num_dispatchers=1, rank=0)

    method.maybe_make_prepare_finalize = make
    return before


def free_port() -> int:
    """A port of this machine that nothing listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def rank_variables(rank: int, port: int) -> dict[str, str]:
    """How a process is told that it is one of two data-parallel ranks, which meet at ``port``."""
    return {
        "VLLM_DP_SIZE": "2", "VLLM_DP_RANK": str(rank), "VLLM_DP_RANK_LOCAL": str(rank),
        "VLLM_DP_MASTER_IP": "127.0.0.1", "VLLM_DP_MASTER_PORT": str(port),
    }  # fmt: skip


def add_gathers() -> None:
    """Give vLLM's CPU communicator the two collectives over unequal parts that it lacks and data parallelism needs."""
    import torch.distributed as dist
    from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator

    def all_gatherv(self: Any, tensors: Any, dim: int = 0, sizes: list[int] | None = None) -> Any:
        if isinstance(tensors, list):
            return [all_gatherv(self, tensor, dim, sizes) for tensor in tensors]
        sizes = sizes or [len(tensors)] * self.world_size
        mine = tensors.new_zeros(max(sizes), *tensors.shape[1:])
        mine[: len(tensors)] = tensors
        parts = [torch.empty_like(mine) for _ in sizes]
        dist.all_gather(parts, mine, group=self.device_group)
        return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])

    def reduce_scatterv(self: Any, tensor: torch.Tensor, dim: int = 0, sizes: list[int] | None = None) -> torch.Tensor:
        sizes = sizes or [len(tensor) // self.world_size] * self.world_size
        total = tensor.clone()
        dist.all_reduce(total, group=self.device_group)
        return total.split(sizes)[self.rank_in_group].contiguous()

    CpuCommunicator.all_gatherv, CpuCommunicator.reduce_scatterv = all_gatherv, reduce_scatterv


def run(out: Path, routes: dict[str, dict[str, Any]]) -> None:
    """Answer the prompts through every route."""
    from vllm import LLM
    from vllm.distributed import cleanup_dist_env_and_memory
    from vllm.platforms import current_platform

    from chord_runtime.errors import ChordError
    from chord_runtime.integrations.vllm import method

    if os.environ.get("VLLM_WORKER_MULTIPROC_METHOD") != "spawn" or torch.cuda.is_initialized():
        sys.exit("ranks are spawned, by a process that has not used CUDA: set VLLM_WORKER_MULTIPROC_METHOD=spawn")
    if current_platform.is_cpu():
        import llvmlite.binding.ffi  # noqa: F401

        # vLLM 0.32 looks for kernels in every module and stumbles over this one, which K2.5's images bring in.
        del sys.modules["llvmlite.binding.ffi"]
    prompts = dict(PROMPTS)
    if int(os.environ.get("VLLM_DP_SIZE", "1")) > 1:
        if current_platform.is_cpu():
            add_gathers()
        if int(os.environ["VLLM_DP_RANK"]) % 2:
            prompts = dict(reversed(PROMPTS.items()))
    common = {
        "dtype": "float32",
        "enforce_eager": True,
        "enable_prefix_caching": False,
        "disable_log_stats": True,
        "max_logprobs": -1,
        "max_model_len": 1024,
        "max_num_seqs": 4,
    }
    failed = []
    for name, options in routes.items():
        batched, refused = options.pop("batched", False), options.pop("refused", False)
        before = use_batched_dispatch() if batched else method.maybe_make_prepare_finalize
        llm, began = None, time.perf_counter()
        try:
            llm = LLM(**common | options)
            torch.save({key: answer(llm, prompt) for key, prompt in prompts.items()}, out / f"{name}.pt")
        except Exception as error:  # the other routes are run, whatever went wrong in this one
            if refused and isinstance(error, (ChordError, OSError)):
                (out / f"{name}.txt").write_text(f"{type(error).__name__}: {error}")
            else:
                traceback.print_exc()
                failed.append(name)
        print(f"route {name}: {time.perf_counter() - began:.1f} s", flush=True)
        method.maybe_make_prepare_finalize = before
        del llm
        gc.collect()
        cleanup_dist_env_and_memory()
    if failed:
        sys.exit(f"routes that failed: {', '.join(failed)}")


if __name__ == "__main__":
    run(Path(sys.argv[1]), json.loads(sys.argv[2]))
