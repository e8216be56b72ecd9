"""What is registered with vLLM, and under which names."""

from __future__ import annotations

from vllm.model_executor.layers.quantization import register_quantization_config
from vllm.model_executor.model_loader import register_model_loader

from chord_runtime.integrations.vllm.config import ChordConfig
from chord_runtime.integrations.vllm.loader import ChordModelLoader

_registered: set[str] = set()


def register(opt_in: bool) -> None:
    """Register ``chord`` as quantization method and load format; with ``opt_in``, stand in for two built-in methods.

    The stand-ins are vLLM's own classes with one method overridden: they take INT4 group-32 experts and hand every
    other layer to the class they extend. Each name is registered once a process.
    """
    if "chord" not in _registered:
        register_quantization_config("chord")(ChordConfig)
        register_model_loader("chord")(ChordModelLoader)
        _registered.add("chord")
    if opt_in and "compressed-tensors" not in _registered:
        from chord_runtime.integrations.vllm.adopt import OptInCompressedTensorsConfig, OptInHummingConfig

        register_quantization_config("compressed-tensors")(OptInCompressedTensorsConfig)
        register_quantization_config("humming")(OptInHummingConfig)
        _registered.update(("compressed-tensors", "humming"))
