"""The quantization methods of routed experts: parameters, loading, and the modular kernel that runs them."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import torch
import vllm.model_executor.layers.fused_moe.modular_kernel as mk
from torch import Tensor
from torch.nn import Parameter
from vllm.config import get_current_vllm_config
from vllm.model_executor.layers.fused_moe import FusedMoEMethodBase, RoutedExperts
from vllm.model_executor.layers.fused_moe.all2all_utils import maybe_make_prepare_finalize
from vllm.model_executor.layers.fused_moe.config import FUSED_MOE_UNQUANTIZED_CONFIG, FusedMoEQuantConfig
from vllm.model_executor.utils import set_weight_attrs
from vllm.platforms import current_platform

from chord_runtime.errors import ChordError, FormatError, ModeError, ScaleError, UsageError
from chord_runtime.format.block import GROUP_SIZE, packed_bytes
from chord_runtime.format.layout import ALL_MODES, Mode, Projection, row_order
from chord_runtime.format.metadata import Manifest, Packing
from chord_runtime.format.packing import pack, pack_gate_up
from chord_runtime.integrations.vllm.experts import BatchedExperts, StandardExperts
from chord_runtime.integrations.vllm.limits import refusal
from chord_runtime.layer import PackedLayer
from chord_runtime.ops.weight import PackedWeight
from chord_runtime.routing import convention

_NAMES = {Projection.W13: "w13_weight_packed", Projection.W2: "w2_weight_packed"}
"""Parameters of a layer, as vLLM's loader spells ``gate_proj.weight_packed`` and ``down_proj.weight_packed``."""


class ExpertsMethod(FusedMoEMethodBase):
    """What both ways of loading share: the checks before it and the kernel after it."""

    modes: tuple[Mode, ...] = ALL_MODES

    def __init__(self, layer: RoutedExperts) -> None:
        super().__init__(layer.moe_config)
        backend = layer.moe_config.moe_backend
        sentence = refusal(layer)
        if backend not in ("auto", "humming"):
            sentence = f"moe_backend={backend}: these experts are Chord's to run, start without --moe-backend"
        if sentence is not None:
            raise ChordError(f"Chord does not serve the experts {layer.layer_name} with {sentence}")

    @property
    def shapes(self) -> dict[Projection, tuple[int, int]]:
        """(N, K) of this rank's packed weights."""
        local, hidden = self.moe.intermediate_size_per_partition, self.moe.hidden_dim
        return {Projection.W13: (2 * local, hidden), Projection.W2: (hidden, local)}

    def start_compiling(self, num_experts: int) -> None:
        """Have this rank's kernels compiled while vLLM loads and compiles, where it has a GPU."""
        if current_platform.is_cuda():
            from chord_runtime.cuda import warmup

            batched = self.moe.moe_parallel_config.use_batched_activation_format
            mode = Mode.MASKED if batched else convention(self.modes)
            hidden, local = self.shapes[Projection.W2]
            warmup.start_layer(hidden, local, num_experts, mode, torch.cuda.current_device())

    def maybe_roundup_sizes(
        self, hidden_size: int, intermediate_size_per_partition: int, act_dtype: torch.dtype, moe_parallel_config: Any
    ) -> tuple[int, int]:
        """The sizes as they are; raises ChordError if the all2all backend needs others."""
        sizes = (hidden_size, intermediate_size_per_partition)
        rounded = super().maybe_roundup_sizes(*sizes, act_dtype, moe_parallel_config)
        if rounded != sizes:
            raise ChordError(
                f"--all2all-backend {moe_parallel_config.all2all_backend} rounds hidden size {hidden_size} up to "
                f"{rounded[0]}; packed experts keep their size: choose another all2all backend"
            )
        return sizes

    def get_fused_moe_quant_config(self, layer: RoutedExperts) -> FusedMoEQuantConfig:
        """Activations travel and enter the kernels as they are."""
        return FUSED_MOE_UNQUANTIZED_CONFIG

    def process_weights_after_loading(self, layer: RoutedExperts) -> None:
        """Build the kernel around the loaded parameters."""
        w13, w2 = (
            PackedWeight(self.parameter(layer, which).data, *self.shapes[which], row_order(which), self.modes)
            for which in Projection
        )
        self.moe_quant_config = self.get_fused_moe_quant_config(layer)
        prepare_finalize = maybe_make_prepare_finalize(
            self.moe, self.moe_quant_config, layer._expert_routing_tables(), allow_new_interface=True
        )
        if prepare_finalize.activation_format is mk.FusedMoEActivationFormat.BatchedExperts:
            experts = BatchedExperts(
                self.moe,
                self.moe_quant_config,
                max_num_tokens=prepare_finalize.max_num_tokens_per_rank(),
                num_dispatchers=prepare_finalize.num_dispatchers(),
            )
        else:
            experts = StandardExperts(self.moe, self.moe_quant_config)
        placed = sorted((local, expert) for expert, local in enumerate(_local_ids(layer)) if local >= 0)
        experts.layer = PackedLayer(w13, w2, tuple(expert for _, expert in placed), self.moe.num_experts)
        self.moe_kernel = mk.FusedMoEKernel(prepare_finalize, experts)

    def parameter(self, layer: RoutedExperts, which: Projection) -> Parameter:
        """The uint8 [experts, bytes] parameter of a projection."""
        parameter: Parameter = getattr(layer, _NAMES[which])
        return parameter

    def apply(
        self,
        layer: RoutedExperts,
        x: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        shared_experts: Any,
        shared_experts_input: Tensor | None,
    ) -> Tensor:
        """Rows ``x`` [tokens, hidden] through the experts that ``topk_ids`` [tokens, top_k] names."""
        result: Tensor = self.moe_kernel.apply(
            hidden_states=x,
            w1=self.parameter(layer, Projection.W13),
            w2=self.parameter(layer, Projection.W2),
            topk_weights=topk_weights,
            topk_ids=topk_ids,
            activation=layer.activation,
            global_num_experts=layer.global_num_experts,
            expert_map=layer.expert_map,
            apply_router_weight_on_input=False,
            shared_experts=shared_experts,
            shared_experts_input=shared_experts_input,
        )
        return result


class PackedExpertsMethod(ExpertsMethod):
    """Experts of a packed directory: bytes are copied into place, and that is all."""

    supports_pre_processed_weights = True

    def __init__(self, layer: RoutedExperts, packing: Packing, model: str) -> None:
        super().__init__(layer)
        self.packing = packing
        self.modes = packing.modes
        self._check_directory(model)
        self.local_ids: list[int] = []
        self._missing: set[tuple[Projection, int]] = set()

    def _check_directory(self, model: str) -> None:
        """Raise if the directory was packed for other modes, sizes or tensor-parallel ranks than this deployment's."""
        moe, packing = self.moe, self.packing
        manifest = _manifest(model)
        if manifest is not None and manifest.experts_only:
            raise FormatError(
                f"{model} was made with --experts-only: it lacks the model's other tensors; "
                "convert without that option to serve it"
            )
        shape, tp = packing.shape, packing.layout.tp_size
        sizes = (moe.num_experts, moe.hidden_dim, moe.intermediate_size)
        if sizes != (shape.num_experts, shape.hidden, shape.intermediate):
            raise FormatError(
                f"{model} was packed for experts, hidden, intermediate = {shape.num_experts}, {shape.hidden}, "
                f"{shape.intermediate}; its config.json describes {sizes}: it was edited, convert again"
            )
        if moe.tp_size != tp:
            raise UsageError(
                f"{model} was packed for tensor-parallel size {tp}, this deployment cuts experts in {moe.tp_size}: "
                + _convert(model, packing, packing.modes, moe.tp_size)
                + (", or start with --enable-expert-parallel, which keeps experts whole" if tp == 1 else "")
            )
        batched = moe.moe_parallel_config.use_batched_activation_format
        serving = (Mode.MASKED,) if batched else (Mode.CONTIGUOUS, Mode.INDEXED)
        if not set(serving) & set(packing.modes):
            raise ModeError(
                f"{model} was packed for {', '.join(packing.modes)}; this deployment "
                f"({moe.moe_parallel_config.all2all_backend if moe.ep_size > 1 else 'no all2all'}) calls "
                f"{' or '.join(serving)}: " + _convert(model, packing, (*packing.modes, *serving), tp)
            )

    def create_weights(
        self,
        layer: RoutedExperts,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        """Register this rank's parameters, and for other tensor-parallel ranks' names empty ones that take nothing."""
        self.start_compiling(num_experts)
        self.local_ids = _local_ids(layer)
        tp = self.packing.layout.tp_size
        for which, name in _NAMES.items():
            size = packed_bytes(*self.shapes[which])
            self._missing |= {(which, expert) for expert in range(num_experts)}
            for rank in range(tp):
                mine = rank == self.moe.tp_rank
                parameter = Parameter(
                    torch.empty((num_experts, size) if mine else 0, dtype=torch.uint8), requires_grad=False
                )
                set_weight_attrs(parameter, {"weight_loader": self._loader(which) if mine else _ignore})
                layer.register_parameter(name + (f"_tp{rank}" if tp > 1 else ""), parameter)

    def parameter(self, layer: RoutedExperts, which: Projection) -> Parameter:
        """The parameter of this tensor-parallel rank."""
        suffix = f"_tp{self.moe.tp_rank}" if self.packing.layout.tp_size > 1 else ""
        parameter: Parameter = getattr(layer, _NAMES[which] + suffix)
        return parameter

    def all_loaded(self) -> None:
        """Note that every expert's bytes are in place."""
        self._missing.clear()

    def _loader(self, which: Projection) -> Any:
        """The loader of a parameter, called by vLLM with global expert ids."""

        def load(
            param: Parameter,
            loaded_weight: Tensor,
            weight_name: str,
            shard_id: str,
            expert_id: int,
            return_success: bool = False,
        ) -> bool | None:
            local = self.local_ids[expert_id]
            if local >= 0:
                if loaded_weight.dtype is not torch.uint8 or loaded_weight.shape != param.shape[1:]:
                    raise FormatError(
                        f"{weight_name}: expert {expert_id} is {loaded_weight.dtype} {list(loaded_weight.shape)}, "
                        f"expected uint8 [{param.shape[1]}]: the directory mixes conversions, convert again"
                    )
                param.data[local].copy_(loaded_weight, non_blocking=True)
                self._missing.discard((which, local))
            return local >= 0 if return_success else None

        return load

    def process_weights_after_loading(self, layer: RoutedExperts) -> None:
        """Build the kernel, once every expert of this rank has arrived."""
        if self._missing and get_current_vllm_config().load_config.load_format != "dummy":
            which, expert = min(self._missing, key=lambda item: (item[0].value, item[1]))
            raise FormatError(
                f"{layer.layer_name}: {len(self._missing)} packed tensors of this rank were not in the files read, "
                f"the first is {which.value} of local expert {expert}: fetch or convert the missing ranks"
            )
        super().process_weights_after_loading(layer)


class LoadTimeExpertsMethod(ExpertsMethod):
    """INT4 experts of an ordinary checkpoint: loaded as they are by vLLM, packed on their device layer by layer."""

    def create_weights(
        self,
        layer: RoutedExperts,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        """Register the tensors of compressed-tensors' pack-quantized format; vLLM's loader slices and places them."""
        self.start_compiling(num_experts)
        extra_weight_attrs |= {"is_transposed": False, "quant_method": "group"}
        for which, name in _NAMES.items():
            n, k = self.shapes[which]
            stem = name.removesuffix("_packed")
            for suffix, shape, dtype in (
                ("_packed", (num_experts, n, k // 8), torch.int32),
                ("_scale", (num_experts, n, k // GROUP_SIZE), torch.bfloat16),
                ("_shape", (num_experts, 2), torch.int64),
            ):
                parameter = Parameter(torch.empty(shape, dtype=dtype), requires_grad=False)
                set_weight_attrs(parameter, extra_weight_attrs)
                layer.register_parameter(stem + suffix, parameter)

    def process_weights_after_loading(self, layer: RoutedExperts) -> None:
        """Pack one expert at a time: the extra memory is one projection of one layer. Then build the kernel."""
        for which, name in _NAMES.items():
            stem = name.removesuffix("_packed")
            words, scale = getattr(layer, name).data, getattr(layer, stem + "_scale").data
            if words.dtype is not torch.uint8:
                packed = _pack_experts(layer.layer_name, which, words, scale)
                del words, scale
                for suffix in ("_packed", "_scale", "_shape"):
                    delattr(layer, stem + suffix)
                layer.register_parameter(name, Parameter(packed, requires_grad=False))
        super().process_weights_after_loading(layer)


def _local_ids(layer: RoutedExperts) -> list[int]:
    """Local expert of each global one, -1 for those of other ranks."""
    expert_map = layer.expert_map
    return list(range(layer.local_num_experts)) if expert_map is None else expert_map.tolist()


def _pack_experts(layer_name: str, which: Projection, words: Tensor, scale: Tensor) -> Tensor:
    """int32 [E, N, K/8] and bfloat16 [E, N, K/32], gate above up in w13 → uint8 [E, bytes] on the same device."""
    experts, n, columns = words.shape
    out = torch.empty(experts, packed_bytes(n, columns * 8), dtype=torch.uint8, device=words.device)
    for expert in range(experts):
        out[expert] = _pack_expert(f"{layer_name}, local expert {expert}", which, words[expert], scale[expert])
    return out


def _pack_expert(where: str, which: Projection, words: Tensor, scale: Tensor) -> Tensor:
    try:
        if which is Projection.W2:
            return pack(words, scale)
        (gate, up), (gate_scale, up_scale) = words.chunk(2), scale.chunk(2)
        return pack_gate_up(gate, gate_scale, up, up_scale)
    except ScaleError as error:
        raise ScaleError(f"{where}, {which.value}: {error}") from None


def _ignore(*args: Any, return_success: bool = False, **kwargs: Any) -> bool | None:
    """The loader of another rank's tensor."""
    return False if return_success else None


@cache
def _manifest(model: str) -> Manifest | None:
    """The manifest of a local directory; None for a model on the Hub, whose files are not here yet."""
    return Manifest.read(Path(model)) if Path(model).is_dir() else None


def _convert(model: str, packing: Packing, modes: tuple[Mode, ...], tp_size: int) -> str:
    """The command that makes the directory that is needed."""
    manifest = _manifest(model)
    source = "MODEL" if manifest is None else manifest.source.repo
    chosen = [mode for mode in ALL_MODES if mode in modes]
    flags = "--mode all" if len(chosen) == len(ALL_MODES) else " ".join(f"--mode {mode.value}" for mode in chosen)
    return f"run chord-convert {source} {flags} --ep {packing.layout.ep_size} --tp {tp_size} -o DIR"
