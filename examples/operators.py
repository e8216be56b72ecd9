"""The three operators on one packed weight: python examples/operators.py

INT4 experts from anywhere are packed once; how rows reach them is then a choice made call by call.
"""

from __future__ import annotations

import torch

import chord_runtime as chord
from chord_runtime import routing

EXPERTS, N, K, TOKENS, TOP_K = 8, 512, 256, 20, 2

# gate and up of each expert, one above the other: codes 0..15 mean (code − 8) · scale, a scale for each 32 columns.
codes = torch.randint(0, 16, (EXPERTS, N, K), dtype=torch.uint8)
scale = (torch.randn(EXPERTS, N, K // 32) * 0.02).bfloat16()
weight = chord.pack_w4a16_grouped(codes, scale, "all", gate_up=True)

x = torch.randn(TOKENS, K).bfloat16()
topk_ids = torch.rand(TOKENS, EXPERTS).topk(TOP_K).indices.int()

# Prefill: rows sorted by expert, every expert's run at a multiple of 128, −1 is padding.
route = routing.contiguous(topk_ids, EXPERTS)
rows = x[route.routed.clamp(min=0) // TOP_K]
prefill = chord.contiguous(rows, weight, route.m_indices, activation="swiglu")[route.rows]

# Decode behind an all-to-all: a fixed number of rows for each expert, of which masked_m are valid.
route = routing.masked(topk_ids, EXPERTS)
rows = x[route.routed.clamp(min=0) // TOP_K].view(EXPERTS, route.max_m, K)
decode = chord.masked(rows, weight, route.masked_m, route.expected_m, activation="swiglu")[route.rows]

# vLLM's routing: rows are gathered by index, nothing is sorted or copied.
route = routing.indexed(topk_ids, EXPERTS, block_size=16)
buffers = route.sorted_ids, route.expert_ids, route.num_tokens_padded
gathered = chord.indexed(x, weight, *buffers, TOP_K, route.block_size, activation="swiglu")[route.rows]

print(f"packed {EXPERTS} experts [{N}, {K}] into {weight.data.numel():,} bytes")
print(f"silu(gate)·up of {TOKENS} tokens × {TOP_K} experts: {list(prefill.shape)} {prefill.dtype}")
assert torch.equal(prefill, decode) and torch.equal(prefill, gathered)
print("contiguous, masked and indexed agree bit for bit")
