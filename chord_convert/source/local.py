"""A checkpoint in a directory, read with pread."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

from chord_convert.source.base import FileInfo, Identity, Source
from chord_convert.source.pread import FileReader, LocalFile
from chord_runtime.errors import SourceError, advice
from chord_runtime.format.layout import MANIFEST, PROGRESS

_COMMIT = re.compile(r"[0-9a-f]{40}")
_ETAG = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
_SHA256_DIGITS = 64


class LocalSource(Source):
    """A directory with a checkpoint: a plain one, one made by ``hf download --local-dir``, or a Hub cache snapshot.

    In the latter two the Hub's own book-keeping tells the commit and the hashes of large files.

    Raises:
        SourceError: the directory cannot be listed, or a directory has the name of a shard.
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self._root = Path(directory).absolute()
        self._reader = FileReader()
        self._files: dict[str, FileInfo] = {}
        self._local: dict[str, LocalFile] = {}
        try:
            self._list(self._root, "")
        except OSError as error:
            raise SourceError(
                f"{error.filename}: cannot be listed: {error.strerror}; "
                f"{advice(error, 'check the path and its permissions')}."
            ) from None
        self.identity = Identity(*_origin(self._root, self._files), location=str(self._root))

    def _list(self, folder: Path, prefix: str) -> None:
        with os.scandir(folder) as found:
            entries = sorted(found, key=lambda entry: entry.name)
        for entry in entries:
            if entry.name.startswith("."):
                continue
            path, name = Path(entry.path), prefix + entry.name
            if entry.name.endswith(".safetensors") and entry.is_dir():
                raise SourceError(
                    f"{path}: found a directory; supported: a file of this name. Put the file in its place."
                )
            if entry.is_dir(follow_symlinks=False):
                if not any((path / mark).exists() for mark in (MANIFEST, PROGRESS)):
                    self._list(path, f"{name}/")
            elif entry.is_file():
                file = self._local[name] = LocalFile.of(path)
                etag = _etag(self._root, name, file)
                sha256 = etag if etag is not None and len(etag) == _SHA256_DIGITS else None
                self._files[name] = FileInfo(file.size, sha256, etag, file.modified)

    def files(self) -> Mapping[str, FileInfo]:
        """See :meth:`Source.files`. Hidden files and folders, and outputs of the converter inside, are left out."""
        return self._files

    def _read_into(self, file: str, start: int, out: memoryview) -> None:
        self._reader.read_into(self._local[file], file, start, out)

    def close(self) -> None:
        """See :meth:`Source.close`."""
        self._reader.close()


def _origin(root: Path, files: Mapping[str, FileInfo]) -> tuple[str, str | None]:
    """Name and commit of a directory, as far as the Hub's book-keeping tells them."""
    snapshots, repository = root.parent, root.parent.parent
    if snapshots.name == "snapshots" and _COMMIT.fullmatch(root.name) and repository.name.startswith("models--"):
        return repository.name.removeprefix("models--").replace("--", "/", 1), root.name
    commits = {(_download_record(root, name) or (None, "", 0.0))[0] for name in files}
    return root.name or "checkpoint", commits.pop() if len(commits) == 1 else None


def _etag(root: Path, name: str, file: LocalFile) -> str | None:
    """The Hub's ETag of a file where it is written down: the name of the cache's blob, or the download record.

    For large files it is the SHA-256, for small ones Git's hash.
    """
    if file.path.is_symlink():
        known = file.path.readlink().name
    else:
        record = _download_record(root, name)
        # The record is written just after the file; one second covers coarse file times.
        known = record[1] if record and file.modified / 1e9 - 1 <= record[2] else ""
    return known if _ETAG.fullmatch(known) else None


def _download_record(root: Path, name: str) -> tuple[str | None, str, float] | None:
    """Commit, ETag and time that ``hf download --local-dir`` noted for a file, or None."""
    try:
        text = (root / ".cache" / "huggingface" / "download" / f"{name}.metadata").read_text()
        commit, etag, noted = text.split()[:3]
        return (commit if _COMMIT.fullmatch(commit) else None), etag, float(noted)
    except (OSError, ValueError):
        return None
