"""from_pretrained on packed directories, against Transformers in float32 on the same weights, dequantised."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from chord_runtime.errors import ChordError, FormatError, UsageError
from tests.checkpoints import SERVED, write_checkpoint

transformers = pytest.importorskip("transformers", minversion="5.10")

Pack = Callable[..., Path]
IDS = torch.randint(0, 256, (3, 23), generator=torch.Generator().manual_seed(0))


def load(directory: Path, dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    import chord_runtime.transformers  # noqa: F401 - registers

    return transformers.AutoModelForCausalLM.from_pretrained(str(directory), dtype=dtype).eval()


def log_probabilities(model: torch.nn.Module) -> Tensor:
    with torch.no_grad():
        return model(IDS.to(next(model.parameters()).device)).logits.float().log_softmax(-1).cpu()


@pytest.mark.parametrize("options", [("--ep", "1"), ("--ep", "4", "--placement", "round_robin")])
def test_equal_to_float32(pack: Pack, reference: torch.nn.Module, options: tuple[str, ...]) -> None:
    found, wanted = log_probabilities(load(pack(*options))), log_probabilities(reference)
    assert float((found - wanted).abs().max()) < 1e-3
    assert float(wanted.std()) > 0.1  # a model whose answers vary, or equality would say nothing


@pytest.mark.parametrize("mode", ["contiguous", "masked"])
def test_any_mode_will_do(pack: Pack, reference: torch.nn.Module, mode: str) -> None:
    found = log_probabilities(load(pack("--ep", "2", "--mode", mode)))
    assert float((found - log_probabilities(reference)).abs().max()) < 1e-3


def test_experts_stay_packed(pack: Pack) -> None:
    from chord_runtime.transformers import PackedExperts

    model = load(pack("--ep", "1"), torch.bfloat16)
    experts = [module for module in model.modules() if isinstance(module, PackedExperts)]
    assert len(experts) == 2
    assert all(p.dtype is torch.uint8 and not p.requires_grad for e in experts for p in e.parameters())
    assert log_probabilities(model).isfinite().all()
    prompt = IDS[:1, :5]
    text = model.generate(prompt, max_new_tokens=4, do_sample=False, attention_mask=torch.ones_like(prompt))
    assert text.shape == (1, 9)


def test_multimodal_wrapper(tmp_path: Path, pack: Pack) -> None:
    """K2.5's nesting: experts under language_model.model.layers, quantization_config in text_config."""
    import chord_runtime.transformers

    nested = write_checkpoint(tmp_path / "nested", nested=True, attention=SERVED)
    flat = write_checkpoint(tmp_path / "flat", attention=SERVED)
    packed = pack("--ep", "2", of=nested)
    config = json.loads((packed / "config.json").read_text())
    config["vision_config"] = {"model_type": "kimi_k25_vision", "hidden_size": 32, "num_hidden_layers": 1,
                               "num_attention_heads": 2, "intermediate_size": 64}  # fmt: skip
    (packed / "config.json").write_text(json.dumps(config))
    if not hasattr(transformers, "Kimi_K25ForConditionalGeneration"):
        pytest.skip("this Transformers has no Kimi K2.5")
    wrapper = transformers.AutoModelForImageTextToText.from_pretrained(
        str(packed),
        dtype=torch.float32,
        ignore_mismatched_sizes=True,  # the vision tower of the test is a stand-in
    ).eval()
    assert isinstance(wrapper.model.language_model.layers[1].mlp.experts, chord_runtime.transformers.PackedExperts)
    alone = load(pack("--ep", "2", of=flat))
    assert torch.equal(log_probabilities(wrapper), log_probabilities(alone))


def test_gradients_are_refused(pack: Pack) -> None:
    with pytest.raises(UsageError, match="no_grad"):
        load(pack("--ep", "1"))(IDS)


def test_slices_of_experts_are_refused(pack: Pack) -> None:
    with pytest.raises(UsageError, match=r"--tp 2.*--tp 1"):
        load(pack("--tp", "2"))


def test_float16_is_refused(pack: Pack) -> None:
    with pytest.raises(UsageError, match="float16"):
        load(pack("--ep", "1"), torch.float16)


def test_missing_layer(pack: Pack, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(pack("--ep", "1"), broken)
    index = json.loads((broken / "model.safetensors.index.json").read_text())
    index["weight_map"] = {k: v for k, v in index["weight_map"].items() if ".layers.2.mlp.experts." not in k}
    (broken / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(FormatError, match="2 of 4 packed expert tensors"):
        load(broken)


def test_edited_config(pack: Pack, tmp_path: Path) -> None:
    edited = tmp_path / "edited"
    shutil.copytree(pack("--ep", "1"), edited)
    config = json.loads((edited / "config.json").read_text())
    for key, value, message in (("format_version", 9, "version 9"), ("modes", ["dense"], "'dense'")):
        block = {**config["quantization_config"], key: value}
        (edited / "config.json").write_text(json.dumps({**config, "quantization_config": block}))
        with pytest.raises(ChordError, match=message):
            load(edited)


def test_the_core_does_not_import_it() -> None:
    script = "import sys, chord_runtime, chord_runtime.layer, chord_runtime.loader, chord_runtime.ops.api\n"
    script += "sys.exit('transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0


@pytest.mark.gpu
def test_cuda(pack: Pack, reference: torch.nn.Module) -> None:
    model = load(pack("--ep", "1"), torch.bfloat16).to("cuda")
    on_cpu = log_probabilities(load(pack("--ep", "1"), torch.bfloat16))
    found = log_probabilities(model)
    # bfloat16 activations flip a few routing choices, on either device: compare the bulk, and with float32 loosely.
    assert float((found - on_cpu).abs().median()) < 0.02
    assert float((found - log_probabilities(reference)).abs().median()) < 0.05
