"""What is read from the Hub, by its real client from a local server: by whom, and what the cache is good for."""

from __future__ import annotations

from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub import constants

from chord_convert.source import LocalSource, open_source
from chord_convert.source.headers import TensorInfo
from chord_convert.source.hub import HubSource
from chord_convert.validate import validate
from chord_runtime.errors import SourceError, UsageError
from tests.checkpoints import write_checkpoint
from tests.hub_server import HubServer
from tests.source.hub import FAST, REPO, content, ranges, read


def test_the_same_checkpoint_as_in_the_directory(source: HubSource, checkpoint: Path, server: HubServer) -> None:
    local = LocalSource(checkpoint)
    assert {name: info.size for name, info in source.files().items()} == {
        name: info.size for name, info in local.files().items()
    }
    here, there = validate(local).require(), validate(source).require()
    assert here.tensors == there.tensors
    assert here.config == there.config
    for info in list(there.tensors.values())[::17]:
        assert read(source, info) == content(checkpoint, info)
    commit = server.repositories[REPO].commit
    assert (source.identity.name, source.identity.commit) == (REPO, commit)
    shard = next(name for name in source.files() if name.endswith(".safetensors"))
    assert source.files()[shard].sha256 == server.hashes(checkpoint / shard)[0]


def test_validation_takes_headers_only(source: HubSource, server: HubServer, checkpoint: Path) -> None:
    assert validate(source).problems == []
    shards = sum(path.stat().st_size for path in checkpoint.glob("*.safetensors"))
    assert server.sent("/cdn/") <= 4 * (512 << 10)
    assert server.sent("/cdn/") < shards
    assert all(asked is not None and asked.startswith("bytes=0-") for asked in ranges(server))


def test_a_range_is_one_request_of_its_own_bytes(source: HubSource, server: HubServer, tensor: TensorInfo) -> None:
    read(source, tensor)
    read(source, tensor)
    assert ranges(server) == [f"bytes={tensor.start}-{tensor.stop - 1}"] * 2
    assert server.sent("/cdn/") == 2 * tensor.nbytes
    assert [request.method for request in server.requests if "/resolve/" in request.path] == ["HEAD"]


def test_a_branch_is_pinned_to_its_commit(server: HubServer, tensor: TensorInfo, checkpoint: Path) -> None:
    commit = server.add(REPO, checkpoint, revisions=("main", "v2"))
    with HubSource(REPO, "v2", retry=FAST) as source:
        read(source, tensor)
        source.read_bytes("config.json")
        assert source.identity.commit == commit
    resolved = [request.path for request in server.requests if "/resolve/" in request.path]
    assert resolved
    assert all(f"/resolve/{commit}/" in path for path in resolved)
    with open_source(source.identity.location, source.identity.commit) as again:
        assert again.fingerprint(again.files()) == source.fingerprint(source.files())


def test_a_renamed_repository(server: HubServer, checkpoint: Path, tensor: TensorInfo) -> None:
    server.renamed["moonshotai/Old"] = REPO
    with HubSource("moonshotai/Old", retry=FAST) as source:
        assert read(source, tensor) == content(checkpoint, tensor)


def test_the_token_goes_to_the_hub_and_nowhere_else(server: HubServer, checkpoint: Path, tensor: TensorInfo) -> None:
    server.add("me/private", checkpoint, token="hf_secret")
    with HubSource("me/private", token="hf_secret", retry=FAST) as source:
        assert read(source, tensor) == content(checkpoint, tensor)
        source.read_bytes("config.json")
    for request in server.requests:
        if "me/private" in request.path:
            assert request.token == (None if request.path.startswith("/cdn/") else "hf_secret")


# -- who may read what -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("repo", "revision", "token", "said"),
    [
        ("me/nothing", None, None, r"no such repository, or it is private \(HTTP 401\).*pass a token"),
        ("me/nothing", None, "hf_any", r"no such repository, or it is private \(HTTP 404\)"),
        ("me/private", None, None, r"no such repository, or it is private \(HTTP 401\)"),
        ("me/private", None, "invalid", r"does not accept the token \(HTTP 401\); check it with `hf auth whoami`"),
        ("me/private", None, "limited", r"the token may not read this repository \(HTTP 403\)"),
        ("me/gated", None, "hf_other", r"gated \(HTTP 403\); accept its conditions at http.*/me/gated"),
        (REPO, "no-branch", None, r"no such revision \(HTTP 404\); pick a branch, tag or commit"),
    ],
)
def test_who_may_read(
    server: HubServer, checkpoint: Path, repo: str, revision: str | None, token: str | None, said: str
) -> None:
    server.add("me/private", checkpoint, token="hf_secret")
    server.add("me/gated", checkpoint, token="hf_secret", gated=True)
    with pytest.raises(SourceError, match=f"^{repo}: .*{said}"):
        HubSource(repo, revision, token, retry=FAST)


def test_gated_files_of_a_public_page(server: HubServer, checkpoint: Path, tensor: TensorInfo) -> None:
    server.add("me/gated", checkpoint, token="hf_secret", gated=True)
    with HubSource("me/gated", retry=FAST) as source:
        assert source.files()
        for file in (tensor.file, "config.json"):
            with pytest.raises(SourceError, match=r"gated \(HTTP 401\); accept its conditions at .*me/gated, then"):
                source.read(file, 0, 10)
    with HubSource("me/gated", token="hf_secret", retry=FAST) as source:
        assert read(source, tensor) == content(checkpoint, tensor)


def test_a_listed_file_that_is_gone(server: HubServer, tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path / "model")
    server.add("me/gone", directory)
    with HubSource("me/gone", retry=FAST) as source:
        shard = next(name for name in source.files() if name.endswith(".safetensors"))
        (directory / shard).unlink()
        with pytest.raises(SourceError, match=r"me/gone: a file is listed but not there \(HTTP 404\)"):
            source.read(shard, 0, 100)


@pytest.mark.parametrize("name", ["a/b/c", "-bad/name", "me/na me", "", "./model"])
def test_names_that_are_no_hub_ids(server: HubServer, name: str) -> None:
    with pytest.raises(UsageError, match="neither a directory nor a Hub id like owner/name"):
        HubSource(name, retry=FAST)
    assert not [request for request in server.requests if request.path.startswith("/api/models")]


# -- the local cache -------------------------------------------------------------------------------------------


def test_small_files_are_kept_in_the_cache(server: HubServer) -> None:
    for _ in range(2):
        with HubSource(REPO, retry=FAST) as source:
            assert b"kimi_k2" in source.read_bytes("config.json")
    assert len([r for r in server.requests if r.method == "GET" and r.path.endswith("/config.json")]) == 1


def test_files_in_the_cache_are_read_from_there(
    server: HubServer, source: HubSource, checkpoint: Path, tensor: TensorInfo
) -> None:
    huggingface_hub.hf_hub_download(REPO, tensor.file, revision=source.identity.commit)
    server.requests.clear()
    assert read(source, tensor) == content(checkpoint, tensor)
    assert server.requests == []
    other = next(name for name in source.files() if name.endswith(".safetensors") and name != tensor.file)
    source.read(other, 0, 100)
    assert server.sent("/cdn/") == 100


def test_an_incomplete_file_in_the_cache_is_not_used(
    server: HubServer, source: HubSource, checkpoint: Path, tensor: TensorInfo
) -> None:
    path = Path(huggingface_hub.hf_hub_download(REPO, tensor.file, revision=source.identity.commit))
    with path.resolve().open("r+b") as file:
        file.truncate(1000)
    assert read(source, tensor) == content(checkpoint, tensor)


def test_a_cache_that_cannot_be_written(
    server: HubServer, source: HubSource, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "file" / "hub"))
    assert b"kimi_k2" in source.read_bytes("config.json")


def test_offline(server: HubServer, checkpoint: Path, tensor: TensorInfo, monkeypatch: pytest.MonkeyPatch) -> None:
    commit = server.repositories[REPO].commit
    huggingface_hub.snapshot_download(REPO)
    server.requests.clear()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    for revision in (None, "main", commit):
        with open_source(REPO, revision) as source:
            assert (source.identity.name, source.identity.commit) == (REPO, commit)
            assert validate(source).problems == []
            assert bytes(source.read(tensor.file, tensor.start, tensor.stop)) == content(checkpoint, tensor)
    for repo, revision in ((REPO, "v9"), ("me/nothing", None)):
        with pytest.raises(SourceError, match=rf"{repo}: HF_HUB_OFFLINE is set .* holds no config.json of revision"):
            open_source(repo, revision)
    assert server.requests == []


def test_offline_in_the_middle_of_a_run(source: HubSource, tensor: TensorInfo, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(SourceError, match="HF_HUB_OFFLINE is set and the file is not in the Hub cache"):
        read(source, tensor)
