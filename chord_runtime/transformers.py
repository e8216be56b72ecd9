"""``import chord_runtime.transformers`` teaches Transformers to load packed directories.

See :mod:`chord_runtime.integrations.transformers`, which this is the short name of.
"""

from chord_runtime.integrations.transformers import ChordQuantizationConfig, PackedExperts

__all__ = ["ChordQuantizationConfig", "PackedExperts"]
