"""A checkpoint on the Hub, read by ranges over plain HTTP and never downloaded whole.

The revision is resolved to a commit once. A file that is complete in the local Hub cache is read from there. For any
other, the Hub is asked once where its bytes lie (``get_hf_file_metadata``: location, ETag, size), then every read is
one ranged GET of that location, resumed where it broke. Signed locations expire, so a refused one is asked for again.
"""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn, TypeVar
from urllib.parse import urlsplit

import huggingface_hub
from huggingface_hub import constants, errors, get_hf_file_metadata, get_session, hf_hub_url
from huggingface_hub.utils import build_hf_headers, disable_progress_bars  # type: ignore[attr-defined]

from chord_convert.report import name as printable
from chord_convert.source.base import FileInfo, Identity, Source
from chord_convert.source.hub_errors import ADVICE, describe, refusal, transport_errors
from chord_convert.source.local import LocalSource
from chord_convert.source.pread import FileReader, LocalFile
from chord_convert.source.retry import RETRIED_STATUS, Retry, asked_wait
from chord_runtime.errors import SourceError, UsageError
from chord_runtime.version import VERSION

_T = TypeVar("_T")
# Files up to this size, other than tensors, go through the Hub's own cache; larger ones are read by ranges.
_CACHED_BYTES = 64 << 20
# This many bytes count as progress: the count of failures starts again.
_PROGRESS_BYTES = 64 << 10
# Nobody waits minutes to learn that the network is down: the very first request gives up sooner.
_FIRST_ATTEMPTS = 4
# Waits from here on are worth a line on the terminal.
_TELL_SECONDS = 5.0
_log = logging.getLogger(__name__)
_CONTENT_RANGE = re.compile(r"bytes (\d+)-(\d+)/(\d+)")


@dataclass(slots=True)
class _Location:
    """Where a file's bytes lie, whether the Hub itself serves them (then with the token), and their ETag there."""

    url: str
    at_hub: bool
    etag: str | None = None


class HubSource(Source):
    """A model repository at one commit. Needs the network when made, unless :func:`open_hub` chose the cache.

    Raises:
        UsageError: ``repo`` is not a Hub id.
        SourceError: the repository or revision does not exist, is gated or private, or the Hub cannot be reached.
    """

    remote = True

    def __init__(self, repo: str, revision: str | None = None, token: str | None = None, retry: Retry | None = None):
        self._repo, self._token, self._retry = repo, token, retry or Retry()
        self._closed = threading.Event()
        self._lock = threading.Lock()
        self._file_locks: dict[str, threading.Lock] = {}
        self._locations: dict[str, _Location] = {}
        self._cached: dict[str, LocalFile | None] = {}
        self._reader = FileReader()
        api = huggingface_hub.HfApi(token=token)
        try:
            info = self._attempt(
                f"{repo}: asking for its files",
                lambda: api.model_info(
                    repo, revision=revision, files_metadata=True, timeout=constants.HF_HUB_DOWNLOAD_TIMEOUT
                ),
                replace(self._retry, attempts=min(self._retry.attempts, _FIRST_ATTEMPTS)),
            )
        except errors.HFValidationError:
            raise UsageError(f"{printable(repo)}: neither a directory nor a Hub id like owner/name.") from None
        commit = str(info.sha)
        self.identity = Identity(repo, commit, repo)
        self._files: dict[str, FileInfo] = {}
        for sibling in sorted(info.siblings or [], key=lambda entry: entry.rfilename):
            sha256 = sibling.lfs.sha256 if sibling.lfs else None
            self._files[sibling.rfilename] = FileInfo(sibling.size or 0, sha256, sha256 or sibling.blob_id)

    def files(self) -> Mapping[str, FileInfo]:
        """See :meth:`Source.files`."""
        return self._files

    def close(self) -> None:
        """See :meth:`Source.close`. Reads that wait before a retry end with an error."""
        self._closed.set()
        self._reader.close()

    def _read_into(self, file: str, start: int, out: memoryview) -> None:
        cached = self._in_cache(file)
        if cached is not None:
            self._reader.read_into(cached, file, start, out)
            return
        self._read_remote(file, start, out)

    # -- the local cache ---------------------------------------------------------------------------------------

    def _in_cache(self, file: str) -> LocalFile | None:
        """The complete copy of ``file`` at this commit in the Hub cache; small files are put there first."""
        with self._lock:
            lock = self._file_locks.setdefault(file, threading.Lock())
        with lock:
            if file not in self._cached:
                self._cached[file] = self._find_in_cache(file) or self._download_small(file)
            return self._cached[file]

    def _find_in_cache(self, file: str) -> LocalFile | None:
        path = huggingface_hub.try_to_load_from_cache(self._repo, file, revision=self.identity.commit)
        return self._if_complete(path, file) if isinstance(path, str) else None

    def _download_small(self, file: str) -> LocalFile | None:
        if file.endswith(".safetensors") or self._files[file].size > _CACHED_BYTES:
            return None
        troubles: tuple[type[Exception], ...] = (OSError, *transport_errors())
        try:
            path = huggingface_hub.hf_hub_download(self._repo, file, revision=self.identity.commit, token=self._token)
        except troubles:
            # A cache that cannot be written, or a server in trouble: ranged reads go on, with retries and messages.
            return None
        return self._if_complete(path, file)

    def _if_complete(self, path: str, file: str) -> LocalFile | None:
        try:
            found = LocalFile.of(Path(path))
        except OSError:
            return None
        return found if found.size == self._files[file].size else None

    # -- ranged reads ------------------------------------------------------------------------------------------

    def _read_remote(self, file: str, start: int, out: memoryview) -> None:
        done = failures = 0
        while done < len(out):
            if self._closed.is_set():
                raise SourceError(f"{printable(file)}: reading was stopped.")
            before, asked = done, None
            try:
                location = self._locate(file)
                request = {"Range": f"bytes={start + done}-{start + len(out) - 1}", "Accept-Encoding": "identity"}
                request = {**self._headers(location), **request}
                with get_session().stream(
                    "GET", location.url, headers=request, timeout=constants.HF_HUB_DOWNLOAD_TIMEOUT
                ) as response:
                    reason = f"HTTP status {response.status_code}"
                    if response.status_code in (401, 403, 404, 410) and not location.at_hub:
                        self._forget(file, location)
                    elif response.status_code in RETRIED_STATUS:
                        asked = asked_wait(response.headers)
                    else:
                        self._check(file, location, response, start + done, len(out))
                        for chunk in response.iter_raw():
                            if len(chunk) > len(out) - done:
                                self._changed(file, "more bytes than were asked for")
                            out[done : done + len(chunk)] = chunk
                            done += len(chunk)
                        reason = f"the connection ended after {done - before} bytes"
            except transport_errors() as error:
                reason = describe(error)
            except errors.OfflineModeIsEnabled:
                raise SourceError(self._offline(file)) from None
            failures = 1 if done - before >= _PROGRESS_BYTES else failures + 1
            if done < len(out):
                self._wait(
                    f"{self._repo}: {printable(file)}: bytes {start + done}:{start + len(out)}", reason, failures, asked
                )

    def _locate(self, file: str) -> _Location:
        with self._lock:
            lock = self._file_locks.setdefault(file, threading.Lock())
        with lock:
            if file in self._locations:
                return self._locations[file]
            url = hf_hub_url(self._repo, file, revision=self.identity.commit)
            found = self._attempt(
                f"{self._repo}: {printable(file)}: asking for its location",
                lambda: get_hf_file_metadata(url, token=self._token, library_name="chord", library_version=VERSION),
            )
            info = self._files[file]
            if found.commit_hash is not None and found.commit_hash != self.identity.commit:
                self._changed(file, f"commit {found.commit_hash}, {self.identity.commit} was asked for")
            if found.size is not None and found.size != info.size:
                self._changed(file, f"{found.size} bytes where the commit lists {info.size}")
            if info.etag is not None and found.etag is not None and found.etag != info.etag:
                self._changed(file, f"ETag {found.etag} where the commit lists {info.etag}")
            location = _Location(found.location, urlsplit(found.location)[:2] == urlsplit(url)[:2])
            self._locations[file] = location
            return location

    def _forget(self, file: str, location: _Location) -> None:
        with self._lock:
            if self._locations.get(file) is location:
                del self._locations[file]

    def _headers(self, location: _Location) -> dict[str, str]:
        """The token goes to the Hub only, never to the storage it points to."""
        token = self._token if location.at_hub else False
        return build_hf_headers(token=token, library_name="chord", library_version=VERSION)

    def _check(self, file: str, location: _Location, response: Any, start: int, asked: int) -> None:
        """Refuse a response that is not the range that was asked for of the file that was asked for."""
        size = self._files[file].size
        if response.status_code == 416:
            self._changed(file, f"HTTP status 416 (no such range) for byte {start} of {size}")
        if response.status_code not in (200, 206):
            raise SourceError(
                f"{self._repo}: {printable(file)}: found HTTP status {response.status_code} for bytes at {start}; "
                f"{ADVICE.get(response.status_code, 'try again, or download the repository and pass the directory')}."
            )
        if response.headers.get("content-encoding", "identity") != "identity":
            raise SourceError(
                f"{self._repo}: {printable(file)}: the server compresses ranges "
                f"({response.headers['content-encoding']}); use another HF_ENDPOINT or download the repository."
            )
        if response.status_code == 200:
            if start or asked != size:
                raise SourceError(
                    f"{self._repo}: {printable(file)}: the server ignores range requests; "
                    "use another HF_ENDPOINT or download the repository and pass the directory."
                )
        else:
            given = _CONTENT_RANGE.fullmatch(response.headers.get("content-range", ""))
            if given is None or int(given[1]) != start:
                self._changed(file, f"Content-Range {response.headers.get('content-range')!r} for byte {start}")
            if int(given[3]) != size:
                self._changed(file, f"{given[3]} bytes in all where the commit lists {size}")
        etag = response.headers.get("etag", "").removeprefix("W/") or None
        if location.etag is None:
            location.etag = etag
        elif etag is not None and etag != location.etag:
            self._changed(file, f"ETag {etag}, it was {location.etag} before")

    def _changed(self, file: str, found: str) -> NoReturn:
        raise SourceError(
            f"{self._repo}: {printable(file)}: the file is not the one this run began with: found {found}; "
            "run again, and check HF_ENDPOINT if it names a mirror."
        )

    # -- retries and messages ----------------------------------------------------------------------------------

    def _attempt(self, what: str, call: Callable[[], _T], retry: Retry | None = None) -> _T:
        """Call the Hub's API, again after errors that pass, and turn the others into one SourceError."""
        failures = 0
        while True:
            asked = None
            try:
                return call()
            except errors.OfflineModeIsEnabled:
                raise SourceError(self._offline("")) from None
            except errors.HfHubHTTPError as error:
                status = error.response.status_code
                if status not in RETRIED_STATUS:
                    raise SourceError(refusal(self._repo, error)) from None
                reason, asked = f"HTTP status {status}", asked_wait(error.response.headers)
            except transport_errors() as error:
                reason = describe(error)
            failures += 1
            self._wait(what, reason, failures, asked, retry)

    def _wait(self, what: str, reason: str, failures: int, asked: float | None, retry: Retry | None = None) -> None:
        retry = retry or self._retry
        delay = retry.delay(failures, asked)
        if delay is None:
            wait = f" and asks to wait {asked:.0f} s" if asked else ""
            raise SourceError(
                f"{what}: gave up after {failures} tries; the last one failed with {reason}{wait}. "
                "Check the network, then run again: what was finished is kept."
            )
        level = logging.WARNING if delay >= _TELL_SECONDS else logging.INFO
        _log.log(level, "%s: %s; try %d of %d in %.0f s", what, reason, failures + 1, retry.attempts, delay)
        if self._closed.wait(delay):
            raise SourceError(f"{what}: reading was stopped.")

    def _offline(self, file: str) -> str:
        return (
            f"{self._repo}: {printable(file) + ': ' if file else ''}HF_HUB_OFFLINE is set and the file is not in the "
            "Hub cache; unset it, or download the repository first."
        )


def open_hub(repo: str, revision: str | None, token: str | None) -> Source:
    """The repository on the Hub or, with HF_HUB_OFFLINE, its snapshot in the local cache.

    Raises:
        UsageError, SourceError: see :class:`HubSource`.
    """
    disable_progress_bars()  # small files only; the converter shows its own progress
    if not huggingface_hub.is_offline_mode():
        return HubSource(repo, revision, token)
    try:
        config = huggingface_hub.try_to_load_from_cache(repo, "config.json", revision=revision)
    except errors.HFValidationError:
        raise UsageError(f"{printable(repo)}: neither a directory nor a Hub id like owner/name.") from None
    if not isinstance(config, str):
        raise SourceError(
            f"{repo}: HF_HUB_OFFLINE is set and the Hub cache ({constants.HF_HUB_CACHE}) holds no config.json of "
            f"revision {revision or 'main'}; unset HF_HUB_OFFLINE, or download the repository first."
        )
    return LocalSource(Path(config).parent)
