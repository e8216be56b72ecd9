"""Where a checkpoint comes from: a directory or the Hub, behind one interface."""

from __future__ import annotations

from pathlib import Path

from chord_convert.source.base import FileInfo, Identity, Source
from chord_convert.source.local import LocalSource

__all__ = ["FileInfo", "Identity", "LocalSource", "Source", "open_source"]


def open_source(model: str, revision: str | None = None, token: str | None = None) -> Source:
    """Open ``model``: a directory that exists, else a Hub id ``owner/name`` at ``revision`` (default: main).

    The HF_* environment variables hold for the Hub. ``open_source(identity.location, identity.commit)`` opens the
    very same checkpoint again, in another process or later.

    Raises:
        UsageError: neither a directory nor a Hub id.
        SourceError: the source cannot be reached or read.
    """
    if Path(model).is_dir():
        return LocalSource(model)
    from chord_convert.source.hub import open_hub

    return open_hub(model, revision, token)
