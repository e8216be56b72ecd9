"""``import chord_runtime.transformers`` teaches Transformers to load packed directories.

See :mod:`chord_runtime.integrations.transformers`, which this is the short name of.
"""

try:
    from chord_runtime.integrations.transformers import ChordQuantizationConfig, PackedExperts
except ImportError as error:
    raise ImportError(
        f"chord_runtime.transformers needs Transformers 5.10 or later ({error}): pip install 'chord-moe[transformers]'"
    ) from error

__all__ = ["ChordQuantizationConfig", "PackedExperts"]
