"""One vLLM engine in a process of its own, started and measured from outside."""

from __future__ import annotations

import multiprocessing
import os
import re
import sys
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

DEFAULTS: dict[str, Any] = {
    "dtype": "bfloat16",
    "max_model_len": 8192,
    "max_num_seqs": 128,
    "max_num_batched_tokens": 16384,
    "enable_prefix_caching": False,
    "gpu_memory_utilization": 0.4,
    # Given, so that engines on one GPU do not size theirs by what the other has left, and peaks can be compared.
    "kv_cache_memory_bytes": 8 << 30,
    "disable_log_stats": True,
}
"""Of ``LLM``."""

Prompts = list[dict[str, list[int]]]


class Engine:
    """A started process; ``call`` runs one of this module's functions of an ``LLM`` there."""

    def __init__(self, name: str, model: Path, home: Path, **options: Any) -> None:
        """Start it without waiting. ``home`` is new: nothing was compiled or cached there before."""
        refuse_cuda()
        home.mkdir(parents=True)
        self.name, self.log = name, home / f"{name}.log"
        spawn = multiprocessing.get_context("spawn")
        self._connection, theirs = spawn.Pipe()
        self._process = spawn.Process(target=_serve, args=(theirs, home, self.log, str(model), options))
        self._process.start()
        theirs.close()

    def result(self, seconds: float) -> Any:
        """What the last call returned, or the start: seconds, peak bytes. Raises RuntimeError if it does not come."""
        try:
            if self._connection.poll(seconds):
                return self._connection.recv()
        except EOFError:
            pass
        raise RuntimeError(f"the engine {self.name} does not answer:\n{trouble(self.log)}")

    def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Run ``function(llm, *arguments)`` in the process."""
        self._connection.send((function, arguments))
        return self.result(120)

    def stop(self) -> None:
        """End the process."""
        self._connection.close()
        self._process.join(15)
        self._process.kill()


def refuse_cuda() -> None:
    """Raise RuntimeError in a process that uses CUDA: it must neither hold memory nor be forked beside engines."""
    if torch.cuda.is_initialized():
        raise RuntimeError("CUDA is in use in the process that starts engines: do that in a process of its own")


def trouble(log: Path) -> str:
    """What a log says of a failure: its errors in short, for the first is often the cause, and its end."""
    lines = log.read_text(errors="replace").splitlines() if log.exists() else []
    errors = dict.fromkeys(line[:400] for line in lines if re.search(r"\b[A-Z]\w*(Error|Exception|Interrupt): ", line))
    return "\n".join([*list(errors)[:10], "…", *lines[-30:]])


CACHES = ("XDG_CACHE_HOME", "VLLM_CACHE_ROOT", "CHORD_CACHE_DIR", "TRITON_CACHE_DIR")
"""Variables that would lead to caches outside of HOME, where they are otherwise."""

PROCESSES = {
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",  # once CUDA was asked anything, a device count even, forks cannot use it
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # all prompts of a call are there before the first step: batches repeat
}
"""vLLM's processes: one for each rank, none of them forked."""


def _serve(connection: Connection, home: Path, log: Path, model: str, options: dict[str, Any]) -> None:
    began = time.perf_counter()
    refuse_cuda()
    for name in CACHES:
        os.environ.pop(name, None)
    os.environ |= {"HOME": str(home), "TORCHINDUCTOR_CACHE_DIR": str(home / "inductor"), **PROCESSES}
    with log.open("wb") as file:
        os.dup2(file.fileno(), sys.stdout.fileno())
        os.dup2(file.fileno(), sys.stderr.fileno())
    from vllm import LLM

    llm = None
    try:
        llm = LLM(model, **DEFAULTS | options)
        connection.send({"start_s": time.perf_counter() - began, "start_peak_bytes": peak(llm)})
        while True:
            try:
                function, arguments = connection.recv()
            except EOFError:
                return
            connection.send(function(llm, *arguments))
    except Exception:
        traceback.print_exc()
    finally:
        connection.close()  # tells the other side, which then reads the log
        if llm is not None:
            llm.llm_engine.engine_core.shutdown()


def peak(llm: Any) -> int:
    """Bytes of GPU memory that the worker's tensors took at most so far, the KV cache included."""
    return int(llm.collective_rpc(_peak)[0])


def _peak(worker: Any) -> int:
    return torch.cuda.max_memory_allocated()


def versions(llm: Any) -> dict[str, str]:
    """What was measured, and on which GPU."""
    import vllm

    return {"gpu": llm.collective_rpc(_gpu)[0], "torch": torch.__version__, "vllm": vllm.__version__}


def _gpu(worker: Any) -> str:
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "none"


def generate(llm: Any, asked: Prompts, tokens: int) -> float:
    """Seconds until all of ``asked`` have ``tokens`` more tokens."""
    from vllm import SamplingParams

    parameters = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
    began = time.perf_counter()
    llm.generate(asked, parameters, use_tqdm=False)
    return time.perf_counter() - began


def answers(llm: Any, asked: Prompts, tokens: int, logprobs: int) -> list[list[tuple[int, list[tuple[int, float]]]]]:
    """For each prompt its tokens, each with the log-probabilities of the likeliest."""
    from vllm import SamplingParams

    parameters = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False, logprobs=logprobs)
    return [
        [
            (token, [(key, value.logprob) for key, value in step.items()])
            for token, step in zip(result.outputs[0].token_ids, result.outputs[0].logprobs, strict=True)
        ]
        for result in llm.generate(asked, parameters, use_tqdm=False)
    ]
