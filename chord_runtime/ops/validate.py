"""Checks of routing values. They read the tensors, so on CUDA they synchronise and are off unless asked for."""

from __future__ import annotations

from torch import Tensor

from chord_runtime.errors import UsageError

RUN_ROWS = 128
"""Rows of a contiguous batch that belong to one expert: every expert's run starts at a multiple of this."""


def contiguous(m_indices: Tensor, num_experts: int) -> None:
    """Every entry is −1 or a local expert, and every 128-row run belongs to the expert of its first row."""
    _experts("m_indices", m_indices, num_experts)
    runs = m_indices.view(-1, RUN_ROWS)
    first = runs[:, :1]
    mixed = (runs != first) & (runs >= 0)
    if bool(mixed.any()):
        run, place = (int(i) for i in mixed.nonzero()[0])
        raise UsageError(
            f"m_indices[{run * RUN_ROWS + place}] is {int(runs[run, place])} in a run that starts with "
            f"{int(first[run])}: each expert's rows start at a multiple of {RUN_ROWS}; pad with −1 behind them "
            "(chord_runtime.routing.contiguous does)"
        )


def masked(masked_m: Tensor, max_m: int) -> None:
    """Every count lies in 0..max_m."""
    bad = (masked_m < 0) | (masked_m > max_m)
    if bool(bad.any()):
        group = int(bad.nonzero()[0])
        raise UsageError(f"masked_m[{group}] is {int(masked_m[group])}: it must be in 0..{max_m}, the rows of a group")


def indexed(
    sorted_ids: Tensor, expert_ids: Tensor, num_tokens_padded: Tensor, block_size: int, num_rows: int, num_experts: int
) -> None:
    """The used part holds whole blocks of local experts or −1; of routed indices < num_rows each at most once, and else
    num_rows, all that vLLM pads with: kernels skip what is larger too, but it was sorted for another batch.
    """
    used = int(num_tokens_padded)
    room = min(sorted_ids.numel(), expert_ids.numel() * block_size)
    if not 0 <= used <= room or used % block_size:
        raise UsageError(
            f"num_tokens_padded is {used}: it must be a multiple of block_size {block_size} in 0..{room}, "
            "what sorted_ids and expert_ids have room for"
        )
    _experts("expert_ids", expert_ids[: used // block_size], num_experts)
    ids = sorted_ids[:used]
    bad = (ids < 0) | (ids > num_rows)
    if bool(bad.any()):
        place = int(bad.nonzero()[0])
        raise UsageError(
            f"sorted_ids[{place}] is {int(ids[place])}: routed indices are below {num_rows} (tokens · top_k), padding "
            "is that number; were they sorted for another batch or another top_k?"
        )
    routed = ids[ids < num_rows].sort().values
    again = routed[1:][routed[1:] == routed[:-1]]
    if again.numel():
        raise UsageError(
            f"sorted_ids holds the routed index {int(again[0])} twice: each of the {num_rows} rows is written once"
        )


def _experts(name: str, experts: Tensor, num_experts: int) -> None:
    bad = (experts < -1) | (experts >= num_experts)
    if bool(bad.any()):
        place = int(bad.nonzero()[0])
        raise UsageError(
            f"{name}[{place}] is {int(experts[place])}: it must be a local expert in 0..{num_experts - 1}, "
            "or −1 for rows to skip (map global ids to this rank's first)"
        )
