"""Where a checkpoint comes from: a directory or the Hub, behind one interface."""

from __future__ import annotations

import re
from pathlib import Path

from chord_convert.report import name as printable
from chord_convert.source.base import FileInfo, Identity, Source
from chord_convert.source.local import LocalSource
from chord_runtime.errors import UsageError

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)

__all__ = ["FileInfo", "Identity", "LocalSource", "Source", "open_source"]


def open_source(model: str, revision: str | None = None, token: str | None = None) -> Source:
    """Open ``model``: a directory that exists, else a Hub id ``owner/name`` at ``revision`` (default: main).

    The HF_* environment variables hold for the Hub. ``open_source(identity.location, identity.commit)`` opens the
    very same checkpoint again, in another process or later.

    Raises:
        UsageError: neither a directory nor a Hub id.
        SourceError: the source cannot be reached or read.
    """
    if model and Path(model).is_dir():
        return LocalSource(model)
    if model and Path(model).exists():
        raise UsageError(
            f"{printable(model)}: found a file; supported: the checkpoint's directory, or a Hub id like owner/name"
        )
    if not _HUB_ID.fullmatch(model):
        what = printable(model) or "an empty name"
        raise UsageError(f"{what}: neither a directory nor a Hub id like owner/name; check the path")
    from chord_convert.source.hub import open_hub

    return open_hub(model, revision, token)
