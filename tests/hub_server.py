"""A local HTTP server that speaks enough of the Hub's API for the real huggingface_hub client, and can misbehave.

Large files (``.safetensors``) are answered as the Hub answers them: a redirect with ``X-Linked-ETag`` and
``X-Linked-Size`` to a signed address on another host (``localhost`` instead of ``127.0.0.1``), which serves ranges.

    with HubServer() as server:
        server.add("owner/model", directory)
        server.faults.append(Fault("drop", after=1000))
        ...
"""

from __future__ import annotations

import hashlib
import json
import re
import socket
import threading
import time
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest
from huggingface_hub import constants, hf_api

_RANGE = re.compile(r"bytes=(\d+)-(\d*)")


@dataclass
class Fault:
    """Something that goes wrong for the next ``times`` requests whose method and path match.

    ``kind``:
      ``status``        answer with ``status`` (and ``headers``) instead
      ``drop``          close the connection after ``after`` bytes of the body
      ``short``         a Content-Length and a body ``after`` bytes long, with the Content-Range that was asked for
      ``long``          ``after`` bytes more than asked for
      ``etag``          an ETag of another file          ``total``   a Content-Range with another total
      ``shift``         a Content-Range and body that begin one byte late
      ``ignore-range``  the whole file with status 200   ``gzip``    a Content-Encoding
      ``stall``         wait ``after`` seconds before answering
    """

    kind: str
    path: str = "/cdn/"
    times: int = 1
    method: str = "GET"
    status: int = 503
    after: int = 0
    headers: dict[str, str] = field(default_factory=dict)


@dataclass
class Request:
    """One request as the server saw it, with the bytes of body it sent."""

    method: str
    path: str
    range: str | None
    token: str | None
    status: int = 0
    sent: int = 0


@dataclass
class _Repository:
    directory: Path
    commit: str
    token: str | None
    gated: bool
    revisions: tuple[str, ...]


class HubServer:
    """The server; a context manager. ``requests`` is its log, ``faults`` what goes wrong next."""

    def __init__(self) -> None:
        self.repositories: dict[str, _Repository] = {}
        self.renamed: dict[str, str] = {}
        self.faults: list[Fault] = []
        self.requests: list[Request] = []
        self.expired: set[str] = set()
        self._lock = threading.Lock()
        self._hashes: dict[tuple[Path, int], tuple[str, str]] = {}
        self._signature = 0
        handler = type("Handler", (_Handler,), {"hub": self})
        self._server = _Server(("127.0.0.1", 0), handler)
        self._server.daemon_threads = True
        self.port = self._server.server_address[1]
        self.endpoint = f"http://127.0.0.1:{self.port}"

    def add(
        self,
        repo: str,
        directory: Path,
        *,
        token: str | None = None,
        gated: bool = False,
        revisions: tuple[str, ...] = ("main",),
    ) -> str:
        """Publish ``directory`` as ``repo``; private when a ``token`` is given. Returns the commit."""
        commit = hashlib.sha1(f"{repo}{directory}".encode()).hexdigest()
        self.repositories[repo] = _Repository(Path(directory), commit, token, gated, revisions)
        return commit

    def sent(self, path: str = "") -> int:
        """Bytes of body sent for GET requests whose path contains ``path``."""
        return sum(request.sent for request in self.requests if request.method == "GET" and path in request.path)

    def expire_locations(self) -> None:
        """Every signed address given out so far answers 403 from now on."""
        self.expired.update(str(number) for number in range(self._signature + 1))

    def client_environment(self, home: Path) -> dict[str, str]:
        """Environment variables that point the client of a subprocess here, with its cache under ``home``."""
        return {"HF_ENDPOINT": self.endpoint, "HF_HOME": str(home), "HF_HUB_DISABLE_TELEMETRY": "1"}

    def point_client_here(self, monkeypatch: pytest.MonkeyPatch, home: Path) -> None:
        """The same for this process, whose client has read its environment already."""
        monkeypatch.setattr(constants, "ENDPOINT", self.endpoint)
        template = self.endpoint + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(home / "hub"))
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(home / "token"))
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.delenv("HF_TOKEN", raising=False)
        monkeypatch.setattr(hf_api.api, "endpoint", self.endpoint)

    def hashes(self, path: Path) -> tuple[str, str]:
        """SHA-256 and git blob hash of a file."""
        key = (path, path.stat().st_mtime_ns)
        if key not in self._hashes:
            content = path.read_bytes()
            blob = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
            self._hashes[key] = (hashlib.sha256(content).hexdigest(), blob)
        return self._hashes[key]

    def take_fault(self, method: str, path: str) -> Fault | None:
        """The first fault that matches, used once."""
        with self._lock:
            for fault in self.faults:
                if fault.times > 0 and fault.method == method and fault.path in path:
                    fault.times -= 1
                    return fault
        return None

    def sign(self) -> str:
        """A new signature for an address."""
        with self._lock:
            self._signature += 1
            return str(self._signature)

    def __enter__(self) -> HubServer:
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Server(ThreadingHTTPServer):
    request_queue_size = 64

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away is no news; anything else is."""
        import sys

        if not isinstance(sys.exception() if hasattr(sys, "exception") else sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: HubServer

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        self._answer()

    def do_HEAD(self) -> None:
        self._answer()

    def _answer(self) -> None:
        authorization = self.headers.get("Authorization")
        token = authorization.removeprefix("Bearer ") if authorization else None
        self.entry = Request(self.command, unquote(self.path), self.headers.get("Range"), token)
        self.hub.requests.append(self.entry)
        self.fault = self.hub.take_fault(self.command, self.entry.path) or Fault("none", "")
        if self.fault.kind == "stall":
            time.sleep(self.fault.after)
        if self.fault.kind == "status":
            self._send(self.fault.status, b"a fault was asked for", self.fault.headers)
            return
        path = urlsplit(self.path).path
        if path.startswith("/cdn/"):
            self._storage(path)
        elif match := re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/revision/([^/]+))?", path):
            self._model(match[1], unquote(match[2] or "main"))
        elif match := re.fullmatch(r"/api/models/([^/]+/[^/]+)/tree/([^/]+)", path):
            self._tree(match[1], unquote(match[2]), token)
        elif match := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
            self._resolve(match[1], unquote(match[2]), unquote(match[3]), token)
        else:
            self._error(404, "RepoNotFound", "Not found")

    def _repository(self, repo: str, revision: str, token: str | None) -> _Repository | None:
        found = self.hub.repositories.get(repo)
        if token == "invalid":
            self._error(401, "", "Invalid credentials in Authorization header")
        elif found is None:
            self._error(401 if token is None else 404, "RepoNotFound", "Repository not found")
        elif found.token is not None and found.gated and token != found.token:
            self._error(401 if token is None else 403, "GatedRepo", "Access to this model is restricted")
        elif found.token is not None and token == "limited":
            self._error(403, "", "this token may not read that")
        elif found.token is not None and token != found.token:
            self._error(401 if token is None else 404, "RepoNotFound", "Repository not found")
        elif revision not in (*found.revisions, found.commit):
            self._error(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        else:
            return found
        return None

    def _model(self, repo: str, revision: str) -> None:
        # The page of a gated model is public, its files are not.
        known = self.hub.repositories.get(repo)
        token = known.token if known is not None and known.gated and self.entry.token is None else self.entry.token
        if repo in self.hub.renamed:
            self._send(307, b"", {"Location": self.path.replace(repo, self.hub.renamed[repo])})
            return
        found = self._repository(repo, revision, token)
        if found is None:
            return
        siblings = []
        for path in sorted(found.directory.rglob("*")):
            if not path.is_file():
                continue
            sha256, blob = self.hub.hashes(path)
            entry: dict[str, Any] = {"rfilename": path.relative_to(found.directory).as_posix()}
            entry |= {"size": path.stat().st_size, "blobId": blob}
            if path.suffix == ".safetensors":
                entry["lfs"] = {"sha256": sha256, "size": path.stat().st_size, "pointerSize": 135}
            siblings.append(entry)
        model = {
            "_id": "1", "id": repo, "modelId": repo, "sha": found.commit, "private": False, "gated": found.gated,
            "disabled": False, "downloads": 0, "likes": 0, "tags": [], "siblings": siblings,
        }  # fmt: skip
        self._send(200, json.dumps(model).encode(), {"Content-Type": "application/json"})

    def _tree(self, repo: str, revision: str, token: str | None) -> None:
        found = self._repository(repo, revision, token)
        if found is None:
            return
        entries = []
        for path in sorted(found.directory.rglob("*")):
            entry: dict[str, Any] = {"path": path.relative_to(found.directory).as_posix(), "oid": "0" * 40}
            if path.is_file():
                sha256, blob = self.hub.hashes(path)
                entry |= {"type": "file", "size": path.stat().st_size, "oid": blob}
                if path.suffix == ".safetensors":
                    entry["lfs"] = {"oid": sha256, "size": path.stat().st_size, "pointerSize": 135}
            else:
                entry |= {"type": "directory", "size": 0}
            entries.append(entry)
        self._send(200, json.dumps(entries).encode(), {"Content-Type": "application/json"})

    def _resolve(self, repo: str, revision: str, file: str, token: str | None) -> None:
        if repo in self.hub.renamed:
            self._send(307, b"", {"Location": self.path.replace(repo, self.hub.renamed[repo])})
            return
        found = self._repository(repo, revision, token)
        if found is None:
            return
        path = found.directory / file
        if not path.is_file():
            self._error(404, "EntryNotFound", "Entry not found")
            return
        sha256, blob = self.hub.hashes(path)
        commit = {"X-Repo-Commit": found.commit}
        if path.suffix == ".safetensors":
            location = f"http://localhost:{self.hub.port}/cdn/{repo}/{sha256}/{file}?signature={self.hub.sign()}"
            linked = {"X-Linked-ETag": f'"{self._etag(sha256)}"', "X-Linked-Size": str(path.stat().st_size)}
            self._send(302, b"", {**commit, **linked, "Location": location, "ETag": f'"{sha256[:32]}"'})
        else:
            self._content(path, self._etag(blob), commit)

    def _storage(self, path: str) -> None:
        owner, name, sha256, file = unquote(path).removeprefix("/cdn/").split("/", 3)
        signature = urlsplit(self.path).query.removeprefix("signature=")
        if signature in self.hub.expired or self.headers.get("Authorization"):
            self._send(403, b"<Error><Code>AccessDenied</Code></Error>", {})
            return
        self._content(self.hub.repositories[f"{owner}/{name}"].directory / file, self._etag(sha256[:32]), {})

    def _etag(self, etag: str) -> str:
        return etag[::-1] if self.fault.kind == "etag" else etag

    def _content(self, path: Path, etag: str, headers: dict[str, str]) -> None:
        size = path.stat().st_size
        headers = {**headers, "ETag": f'"{etag}"', "Accept-Ranges": "bytes"}
        asked = _RANGE.fullmatch(self.headers.get("Range") or "")
        if asked is None or self.fault.kind == "ignore-range":
            self._send(200, path, headers, 0, size)
            return
        start, stop = int(asked[1]), min(int(asked[2]) + 1 if asked[2] else size, size)
        if start >= size:
            self._send(416, b"", {"Content-Range": f"bytes */{size}"})
            return
        kind, after = self.fault.kind, self.fault.after
        start += kind == "shift"
        total = size + 1 if kind == "total" else size
        headers["Content-Range"] = f"bytes {start}-{stop - 1}/{total}"
        if kind == "gzip":
            headers["Content-Encoding"] = "gzip"
        stop = start + after if kind == "short" else stop + after if kind == "long" else stop
        self._send(206, path, headers, start, stop)

    def _error(self, status: int, code: str, message: str) -> None:
        body = json.dumps({"error": message}).encode()
        headers = {"X-Error-Message": message, "Content-Type": "application/json"}
        self._send(status, body, {**headers, "X-Error-Code": code} if code else headers)

    def _send(
        self, status: int, body: bytes | Path, headers: dict[str, str], start: int = 0, stop: int | None = None
    ) -> None:
        self.entry.status = status
        length = len(body) if isinstance(body, bytes) else (stop or 0) - start
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(length)}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        if isinstance(body, bytes):
            self.wfile.write(body)
            return
        with body.open("rb") as file:
            file.seek(start)
            while length > 0:
                chunk = file.read(min(length, 1 << 16)) or bytes(min(length, 1 << 16))
                if self.fault.kind == "drop":
                    chunk = chunk[: max(0, self.fault.after - self.entry.sent)]
                self.wfile.write(chunk)
                self.entry.sent += len(chunk)
                length -= len(chunk)
                if self.fault.kind == "drop" and self.entry.sent >= self.fault.after:
                    self.wfile.flush()
                    self.connection.shutdown(socket.SHUT_RDWR)
                    self.close_connection = True
                    return
