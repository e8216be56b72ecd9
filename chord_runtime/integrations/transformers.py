"""Packed experts in Hugging Face Transformers: import this module, and ``from_pretrained(directory)`` runs them.

    import chord_runtime.transformers
    model = AutoModelForCausalLM.from_pretrained("Kimi-K2-Thinking-chord", dtype=torch.bfloat16).cuda()

The experts module of every packed layer is replaced by :class:`PackedExperts` before weights load, so nothing is ever
dequantised: experts stay INT4 in memory. CUDA runs the kernels in bfloat16; the CPU runs the reference in bfloat16 or
float32. Everything else (attention, router, shared experts) is Transformers' own. For inference only: call under
``torch.no_grad()`` or ``generate``.
"""

from __future__ import annotations

import re
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, DeepseekV3Config
from transformers.conversion_mapping import get_checkpoint_conversion_mapping, register_checkpoint_conversion_mapping
from transformers.core_model_loading import ConversionOps, WeightConverter
from transformers.models.deepseek_v3 import DeepseekV3ForCausalLM, DeepseekV3Model
from transformers.quantizers import HfQuantizer, register_quantization_config, register_quantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from chord_runtime.errors import ChordError, FormatError, ModeError, UsageError
from chord_runtime.format.block import packed_bytes
from chord_runtime.format.layout import Mode, Projection, row_order
from chord_runtime.format.metadata import Packing
from chord_runtime.layer import PackedLayer, moe_layer
from chord_runtime.ops.weight import PackedWeight

if tuple(map(int, re.findall(r"\d+", transformers.__version__)[:2])) < (5, 10):
    raise ImportError(f"Transformers {transformers.__version__} loads weights in another way; 5.10 or later is needed")

_EXPERTS = re.compile(r"(?:^|\.)layers\.(\d+)\.mlp\.experts$")
_SOURCES = {Projection.W13: "gate_proj", Projection.W2: "down_proj"}
"""Under which of an expert's projections the packed tensor is stored."""


class KimiK2Config(DeepseekV3Config):
    """Kimi K2's own name for DeepSeek-V3's architecture."""

    model_type = "kimi_k2"


class KimiK2Model(DeepseekV3Model):
    """DeepSeek-V3 under Kimi K2's configuration."""

    config_class = KimiK2Config


class KimiK2ForCausalLM(DeepseekV3ForCausalLM):
    """DeepSeek-V3 under Kimi K2's configuration."""

    config_class = KimiK2Config


class PackedExperts(nn.Module):
    """Takes the place of a layer's experts: the same ``forward``, over packed weights."""

    w13: Tensor
    w2: Tensor

    def __init__(self, packing: Packing) -> None:
        super().__init__()
        self.packing = packing
        for projection in Projection:
            size = packed_bytes(*packing.shape.packed(projection))
            data = torch.empty(packing.shape.num_experts, size, dtype=torch.uint8)
            self.register_parameter(projection.name.lower(), nn.Parameter(data, requires_grad=False))
        self._layer: PackedLayer | None = None

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """hidden_states [T, hidden], top_k_index int [T, top_k], top_k_weights [T, top_k] → [T, hidden]."""
        return moe_layer(hidden_states.contiguous(), self._packed_layer(), top_k_index, top_k_weights.float())

    def _packed_layer(self) -> PackedLayer:
        """The layer over the parameters as they are now; rebuilt when they were moved."""
        if self._layer is None or self._layer.w13.data.data_ptr() != self.w13.data_ptr():
            w13, w2 = (self._weight(projection) for projection in Projection)
            experts = tuple(range(self.packing.shape.num_experts))
            self._layer = PackedLayer(w13, w2, experts, len(experts))
        return self._layer

    def _weight(self, projection: Projection) -> PackedWeight:
        data = getattr(self, projection.name.lower()).detach()
        return PackedWeight(data, *self.packing.shape.packed(projection), row_order(projection), self.packing.modes)


class StackExperts(ConversionOps):
    """Stacks one projection of a layer's experts as they are loaded, and remembers which layers were filled."""

    def __init__(self, num_experts: int, filled: set[str]) -> None:
        self.num_experts = num_experts
        self.filled = filled

    def __deepcopy__(self, memo: dict[int, Any]) -> StackExperts:
        return self  # the loader copies converters for each layer; what was filled is told to all

    def convert(
        self, input_dict: dict[str, list[Tensor]], source_patterns: list[str], target_patterns: list[str], **kwargs: Any
    ) -> dict[str, Tensor]:
        """One source pattern, one target."""
        [tensors] = input_dict.values()
        name = kwargs.get("full_layer_name", target_patterns[0])
        if len(tensors) != self.num_experts:
            raise FormatError(
                f"{name}: {len(tensors)} of {self.num_experts} experts are in the checkpoint: Transformers runs all "
                "ranks' experts; convert the missing ranks too, or load a rank with chord_runtime.load"
            )
        self.filled.add(name)
        return {target_patterns[0]: torch.stack(tensors)}


@register_quantization_config("chord")
class ChordQuantizationConfig(QuantizationConfigMixin):
    """``quantization_config`` of a packed directory."""

    def __init__(self, quant_method: str = "chord", **recorded: Any) -> None:
        self.quant_method = quant_method
        self.__dict__.update(recorded)
        self._packing = Packing.from_config({"quant_method": quant_method, **recorded})

    @property
    def packing(self) -> Packing:
        """How the directory was packed."""
        return self._packing

    def to_dict(self) -> dict[str, Any]:
        """As it stands in config.json."""
        return {"quant_method": self.quant_method, **self._packing.to_json()}


@register_quantizer("chord")
class ChordQuantizer(HfQuantizer):
    """Swaps the experts before loading, stacks their tensors while loading, and checks that none was left out."""

    def __init__(self, quantization_config: ChordQuantizationConfig, **kwargs: Any) -> None:
        super().__init__(quantization_config, **kwargs)
        self.packing = quantization_config.packing
        self._filled: set[str] = set()

    def validate_environment(self, *args: Any, **kwargs: Any) -> None:
        """Refuse directories that hold slices of experts, or that lack every mode the layer can run here."""
        if not self.pre_quantized:
            raise UsageError("Chord does not quantize: convert an INT4 checkpoint with chord-convert and load that")
        if self.packing.layout.tp_size != 1:
            raise UsageError(
                f"the directory was packed for --tp {self.packing.layout.tp_size}, so each expert is in slices; "
                "Transformers runs whole experts: convert with --tp 1 (any --ep will do)"
            )
        if not {Mode.INDEXED, Mode.CONTIGUOUS, Mode.MASKED} & set(self.packing.modes):
            raise ModeError("the directory was packed for no mode: convert again with --mode all")

    def update_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """bfloat16, or float32 (on the CPU, where the layer itself checks)."""
        if dtype not in (torch.bfloat16, torch.float32):
            raise UsageError(f"dtype {dtype}: packed experts run in bfloat16, and on the CPU in float32 too")
        return dtype

    def _process_model_before_weight_loading(self, model: nn.Module, **kwargs: Any) -> nn.Module:
        wanted = set(self.packing.layers)
        for name, _ in list(model.named_modules()):
            match = _EXPERTS.search(name)
            if match and int(match[1]) in wanted:
                wanted.remove(int(match[1]))
                parent = model.get_submodule(name.rpartition(".")[0])
                with torch.device("meta"):
                    parent.experts = PackedExperts(self.packing)
        if wanted:
            raise ChordError(
                f"{type(model).__name__} has no layers.N.mlp.experts for N in {sorted(wanted)}: load it with "
                "Transformers' own model class, without trust_remote_code=True"
            )
        return model

    def get_weight_conversions(self) -> list[Any]:
        """Experts' packed tensors → ``w13`` and ``w2``."""
        stack = StackExperts(self.packing.shape.num_experts, self._filled)
        return [
            WeightConverter(
                source_patterns=f"mlp.experts.*.{source}.weight_packed",
                target_patterns=f"mlp.experts.{p.name.lower()}",
                operations=[stack],
            )
            for p, source in _SOURCES.items()
        ]

    def update_weight_conversions(self, weight_conversions: list[Any], model: Any = None) -> list[Any]:
        """The model's own, but for those that merge experts: there are no ``experts.N.gate_proj.weight`` to merge."""
        kept = [
            conversion
            for conversion in weight_conversions
            if not any("mlp.experts." in str(pattern) for pattern in conversion.source_patterns)
        ]
        return kept + self.get_weight_conversions()

    def _process_model_after_weight_loading(self, model: nn.Module, **kwargs: Any) -> nn.Module:
        expected = len(self.packing.layers) * len(_SOURCES)
        if len(self._filled) != expected:
            raise FormatError(
                f"{len(self._filled)} of {expected} packed expert tensors were found in the checkpoint: files are "
                "missing; convert or fetch it again"
            )
        return model

    def is_serializable(self, *args: Any, **kwargs: Any) -> bool:
        """Packed directories are written by chord-convert only."""
        return False

    @property
    def is_trainable(self) -> bool:
        """Experts are constants."""
        return False


def _register_kimi_k2() -> None:
    """Kimi K2 by its own model_type, unless Transformers knows it or another package registered it."""
    try:
        AutoConfig.for_model(KimiK2Config.model_type)
        return
    except ValueError:
        pass
    AutoConfig.register(KimiK2Config.model_type, KimiK2Config)
    AutoModel.register(KimiK2Config, KimiK2Model)
    AutoModelForCausalLM.register(KimiK2Config, KimiK2ForCausalLM)
    conversions = get_checkpoint_conversion_mapping(DeepseekV3Config.model_type)
    if conversions is not None:
        register_checkpoint_conversion_mapping(KimiK2Config.model_type, conversions)


_register_kimi_k2()
