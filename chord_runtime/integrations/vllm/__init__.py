"""vLLM serves packed directories, and packs ordinary INT4 checkpoints at load, through its public plugin hooks.

``register`` is the entry point of the group ``vllm.general_plugins``: vLLM calls it in every process it starts.
"""

from __future__ import annotations

import logging
import os

OPT_IN = "CHORD_VLLM"
"""Environment variable: 1 lets Chord take the INT4 experts of ordinary checkpoints without being named."""


def register() -> None:
    """Register Chord's quantization config and model loader with vLLM; harmless when called again.

    A vLLM that lacks a hook is left exactly as it was, with one warning: it may serve models that need no Chord.
    """
    try:
        from chord_runtime.integrations.vllm import plugin

        plugin.register(opt_in=os.environ.get(OPT_IN) == "1")
    except (ImportError, AttributeError) as error:
        logging.getLogger("vllm.chord").warning(
            "Chord's plugin is off: it needs vLLM 0.30 to 0.33, and this one lacks a hook (%s).", error
        )
