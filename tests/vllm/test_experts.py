"""The experts classes by themselves, against the layer that they call."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import torch

pytestmark = pytest.mark.vllm


def test_a_batch_that_is_run_in_parts_gives_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    from chord_runtime.integrations.vllm import experts
    from chord_runtime.layer import PackedLayer, moe_layer
    from chord_runtime.ops.pack import pack_w4a16_grouped

    generator = torch.Generator().manual_seed(1)

    def packed(n: int, k: int, gate_up: bool) -> object:
        words = torch.randint(-(2**31), 2**31, (4, n, k // 8), dtype=torch.int32, generator=generator)
        scale = (0.5 + torch.rand(4, n, k // 32, generator=generator)).mul(0.2 * k**-0.5).bfloat16()
        return pack_w4a16_grouped(words, scale, gate_up=gate_up)

    layer = PackedLayer(packed(256, 128, True), packed(128, 128, False), (0, 1, 2, 3), 4)
    x = torch.randn(13, 128, generator=generator).bfloat16()
    ids = torch.stack([torch.randperm(4, generator=generator)[:2] for _ in range(13)]).int()
    weights = torch.rand(13, 2, generator=generator)
    expected = moe_layer(x, layer, ids, weights)
    standard = experts.StandardExperts.__new__(experts.StandardExperts)
    standard.layer = layer
    calls = []
    monkeypatch.setattr(experts, "moe_layer", lambda rows, *a, **k: calls.append(len(rows)) or moe_layer(rows, *a, **k))
    for at_a_time, parts in ((32768, [13]), (13, [13]), (5, [5, 5, 3])):
        monkeypatch.setattr(experts, "TOKENS_AT_A_TIME", at_a_time)
        calls.clear()
        output = torch.full_like(x, torch.nan)
        standard.run(output, x, weights, ids, None)
        assert torch.equal(output, expected) and calls == parts


@pytest.mark.parametrize("batched", [False, True])
def test_a_ranks_kernels_are_compiled_while_it_starts(batched: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    from chord_runtime.format.layout import Mode
    from chord_runtime.integrations.vllm import method

    started = []
    warmup = SimpleNamespace(start_layer=lambda *arguments: started.append(arguments))
    monkeypatch.setitem(sys.modules, "chord_runtime.cuda.warmup", warmup)
    monkeypatch.setattr("torch.cuda.current_device", lambda: 3)
    experts = method.PackedExpertsMethod.__new__(method.PackedExpertsMethod)
    experts.moe = SimpleNamespace(
        hidden_dim=7168,
        intermediate_size_per_partition=2048,
        moe_parallel_config=SimpleNamespace(use_batched_activation_format=batched),
    )
    experts.start_compiling(48)
    assert started == [], "on a CPU"
    monkeypatch.setattr(method, "current_platform", SimpleNamespace(is_cuda=lambda: True))
    experts.start_compiling(48)
    assert started == [(7168, 2048, 48, Mode.MASKED if batched else Mode.INDEXED, 3)]
