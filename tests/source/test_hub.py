"""The real huggingface_hub client against a local server that speaks the Hub's API and misbehaves on demand."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from email.utils import formatdate
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub import constants

from chord_convert.source import LocalSource, hub, open_source
from chord_convert.source.headers import TensorInfo, read_headers
from chord_convert.source.hub import HubSource
from chord_convert.source.retry import Retry, asked_wait
from chord_convert.validate import validate
from chord_runtime.errors import SourceError, UsageError
from tests.checkpoints import write_checkpoint
from tests.hub_server import Fault, HubServer

REPO = "moonshotai/Kimi-Small"
FAST = Retry(attempts=4, first=0.005, longest=0.02, longest_asked=3.0)
NAME = "model.layers.1.mlp.experts.0.down_proj.weight_packed"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("hub") / "model", experts=32, hidden=512)


@pytest.fixture
def server(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    with HubServer() as server:
        server.add(REPO, checkpoint)
        server.point_client_here(monkeypatch, tmp_path)
        yield server


@pytest.fixture
def tensor(checkpoint: Path) -> TensorInfo:
    """A tensor of 16 KB."""
    return read_headers(LocalSource(checkpoint))[NAME]


@pytest.fixture
def source(server: HubServer) -> Iterator[HubSource]:
    with HubSource(REPO, retry=FAST) as source:
        yield source


def content(checkpoint: Path, tensor: TensorInfo) -> bytes:
    return (checkpoint / tensor.file).read_bytes()[tensor.start : tensor.stop]


def read(source: HubSource, tensor: TensorInfo) -> bytes:
    return bytes(source.read(tensor.file, tensor.start, tensor.stop))


def ranges(server: HubServer) -> list[str | None]:
    return [request.range for request in server.requests if request.path.startswith("/cdn/")]


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
        source.read_json("config.json")
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
        source.read_json("config.json")
    for request in server.requests:
        if "me/private" in request.path:
            assert request.token == (None if request.path.startswith("/cdn/") else "hf_secret")


# -- a connection that breaks, a server that is busy -----------------------------------------------------------


def test_resumes_where_the_connection_broke(
    source: HubSource, server: HubServer, tensor: TensorInfo, checkpoint: Path
) -> None:
    server.faults += [Fault("drop", after=5000), Fault("drop", after=3000)]
    assert read(source, tensor) == content(checkpoint, tensor)
    begins = [tensor.start, tensor.start + 5000, tensor.start + 8000]
    assert ranges(server) == [f"bytes={begin}-{tensor.stop - 1}" for begin in begins]
    deadline = time.monotonic() + 10  # the server counts after it has sent
    while server.sent("/cdn/") != tensor.nbytes and time.monotonic() < deadline:
        time.sleep(0.01)
    assert server.sent("/cdn/") == tensor.nbytes


def test_any_number_of_drops_as_long_as_bytes_come(source: HubSource, server: HubServer, checkpoint: Path) -> None:
    file = max(checkpoint.glob("*.safetensors"), key=lambda path: path.stat().st_size)
    assert file.stat().st_size > 10 * 200_000
    server.faults.append(Fault("drop", after=200_000, times=10))
    assert bytes(source.read(file.name, 0, file.stat().st_size)) == file.read_bytes()
    assert len(ranges(server)) == 11


def test_a_body_that_is_too_short_is_completed(
    source: HubSource, server: HubServer, tensor: TensorInfo, checkpoint: Path
) -> None:
    server.faults.append(Fault("short", after=700))
    assert read(source, tensor) == content(checkpoint, tensor)
    assert ranges(server)[1] == f"bytes={tensor.start + 700}-{tensor.stop - 1}"


@pytest.mark.parametrize("status", [408, 429, 500, 502, 503, 504])
@pytest.mark.parametrize("where", ["GET /cdn/", "HEAD /resolve/"])
def test_passing_errors_are_tried_again(
    source: HubSource, server: HubServer, tensor: TensorInfo, checkpoint: Path, status: int, where: str
) -> None:
    method, path = where.split()
    server.faults.append(Fault("status", path, times=3, method=method, status=status))
    assert read(source, tensor) == content(checkpoint, tensor)


def test_the_listing_is_tried_again(server: HubServer) -> None:
    server.faults.append(Fault("status", "/api/models", times=3, status=503))
    assert HubSource(REPO, retry=FAST).files()


def test_waits_as_long_as_the_server_asks(
    source: HubSource, server: HubServer, tensor: TensorInfo, checkpoint: Path
) -> None:
    server.faults.append(Fault("status", status=429, headers={"Retry-After": "1"}))
    begin = time.monotonic()
    assert read(source, tensor) == content(checkpoint, tensor)
    assert time.monotonic() - begin >= 1.0


def test_long_waits_are_told(
    source: HubSource, server: HubServer, tensor: TensorInfo, caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(hub, "_TELL_SECONDS", 1.0)
    server.faults += [Fault("status", status=503), Fault("status", status=429, headers={"Retry-After": "1"})]
    read(source, tensor)
    (record,) = [record for record in caplog.records if record.name == "chord_convert.source.hub"]
    assert record.getMessage() == (
        f"{REPO}: {tensor.file}: bytes {tensor.start}:{tensor.stop}: HTTP status 429; try 3 of 4 in 1 s"
    )


def test_does_not_wait_for_an_hour(source: HubSource, server: HubServer, tensor: TensorInfo) -> None:
    server.faults.append(Fault("status", status=429, headers={"Retry-After": "3600"}))
    with pytest.raises(SourceError, match=r"gave up after 1 tries.*HTTP status 429 and asks to wait 3600 s"):
        read(source, tensor)


def test_gives_up_and_says_where(source: HubSource, server: HubServer, tensor: TensorInfo) -> None:
    server.faults.append(Fault("status", times=100, status=503))
    with pytest.raises(SourceError) as caught:
        read(source, tensor)
    text = str(caught.value)
    assert text.startswith(f"{REPO}: {tensor.file}: bytes {tensor.start}:{tensor.stop}: gave up after 4 tries")
    assert "HTTP status 503" in text
    assert len(ranges(server)) == 4


def test_gives_up_on_drops_that_bring_nothing(source: HubSource, server: HubServer, tensor: TensorInfo) -> None:
    server.faults.append(Fault("drop", after=0, times=100))
    with pytest.raises(SourceError, match="gave up after 4 tries"):
        read(source, tensor)


def test_a_server_that_stalls(
    source: HubSource, server: HubServer, tensor: TensorInfo, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_DOWNLOAD_TIMEOUT", 0.2)
    server.faults.append(Fault("stall", after=1))
    assert read(source, tensor) == content(checkpoint, tensor)


def test_nobody_answers(server: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(SourceError, match=r"asking for its files: gave up after 4 tries.*ConnectError"):
        HubSource(REPO, retry=FAST)


def test_closing_ends_a_wait(server: HubServer, tensor: TensorInfo) -> None:
    source = HubSource(REPO, retry=Retry(attempts=4, first=60.0, longest=60.0))
    server.faults.append(Fault("status", times=100, status=503))
    timer = threading.Timer(0.3, source.close)
    timer.start()
    begin = time.monotonic()
    with pytest.raises(SourceError, match="reading was stopped"):
        read(source, tensor)
    assert time.monotonic() - begin < 10
    timer.join()


def test_many_readers_at_once(source: HubSource, server: HubServer, checkpoint: Path) -> None:
    tensors = list(read_headers(source).values())[::3]
    server.faults += [Fault("drop", after=100, times=5), Fault("status", times=5, status=503)]
    wrong: list[str] = []

    def work(part: list[TensorInfo]) -> None:
        wrong.extend(info.name for info in part if read(source, info) != content(checkpoint, info))

    threads = [threading.Thread(target=work, args=(tensors[number::8],)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert len([request for request in server.requests if request.method == "HEAD"]) == 4


# -- a file that is not the one it was -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (Fault("etag", "/resolve/", method="HEAD"), "ETag .* where the commit lists"),
        (Fault("total"), r"found \d+ bytes in all where the commit lists \d+"),
        (Fault("shift"), "Content-Range 'bytes .*' for byte"),
        (Fault("long", after=9), "more bytes than were asked for"),
        (Fault("status", status=416), "HTTP status 416"),
        (Fault("ignore-range"), "the server ignores range requests"),
        (Fault("gzip"), "the server compresses ranges"),
        (Fault("status", status=400), "found HTTP status 400"),
    ],
    ids=lambda value: f"{value.kind}{value.status}" if isinstance(value, Fault) else "",
)
def test_answers_that_cannot_be_trusted(
    source: HubSource, server: HubServer, tensor: TensorInfo, fault: Fault, said: str
) -> None:
    server.faults.append(Fault(**{**vars(fault), "times": 1}))
    with pytest.raises(SourceError, match=rf"{REPO}: {tensor.file}: .*{said}"):
        read(source, tensor)


def test_a_whole_file_in_one_answer_is_as_good(source: HubSource, server: HubServer, checkpoint: Path) -> None:
    file = next(path for path in checkpoint.glob("*.safetensors"))
    size = file.stat().st_size
    server.faults.append(Fault("ignore-range"))
    assert bytes(source.read(file.name, 0, size)) == file.read_bytes()
    server.faults += [Fault("drop", after=1000), Fault("ignore-range")]
    with pytest.raises(SourceError, match="the server ignores range requests"):
        source.read(file.name, 0, size)


def test_another_etag_in_the_middle_of_a_run(source: HubSource, server: HubServer, tensor: TensorInfo) -> None:
    read(source, tensor)
    server.faults.append(Fault("etag"))
    with pytest.raises(SourceError, match="the file is not the one this run began with: found ETag"):
        read(source, tensor)


def test_a_file_changed_on_the_server(server: HubServer, tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path / "model")
    server.add("me/moving", directory)
    with HubSource("me/moving", retry=FAST) as source:
        shard = next(name for name in source.files() if name.endswith(".safetensors"))
        with (directory / shard).open("ab") as file:
            file.write(b"more")
        with pytest.raises(SourceError, match=r"found \d+ bytes where the commit lists \d+; run again"):
            source.read(shard, 0, 100)


def test_an_expired_address_is_asked_for_again(
    source: HubSource, server: HubServer, tensor: TensorInfo, checkpoint: Path
) -> None:
    read(source, tensor)
    server.expire_locations()
    assert read(source, tensor) == content(checkpoint, tensor)
    assert [request.status for request in server.requests if request.path.startswith("/cdn/")] == [206, 403, 206]


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
            assert source.read_json("config.json")["model_type"] == "kimi_k2"
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
    assert source.read_json("config.json")["model_type"] == "kimi_k2"


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


# -- how long to wait ------------------------------------------------------------------------------------------


def test_backoff_grows_to_its_limit_and_ends() -> None:
    retry = Retry(attempts=10, first=1.0, longest=60.0)
    for failures in range(1, 10):
        for _ in range(50):
            delay = retry.delay(failures, None)
            assert delay is not None
            assert 0.5 * min(60, 2 ** (failures - 1)) <= delay <= min(60, 2 ** (failures - 1))
    assert retry.delay(10, None) is None
    assert len({retry.delay(3, None) for _ in range(50)}) > 10
    asked = retry.delay(1, 33.0)
    assert asked == 33.0


def test_what_a_server_asks_for() -> None:
    assert asked_wait({"retry-after": "120"}) == 120
    assert asked_wait({"retry-after": " 7 "}) == 7
    dated = asked_wait({"retry-after": formatdate(time.time() + 50, usegmt=True)})
    assert dated is not None
    assert 48 <= dated <= 50
    assert asked_wait({"retry-after": formatdate(time.time() - 50, usegmt=True)}) == 0
    assert asked_wait({"retry-after": "soon"}) is None
    assert asked_wait({"ratelimit": '"resolvers";r=0;t=55'}) == 55
    assert asked_wait({"ratelimit": '"resolvers";r=12;t=55'}) is None
    assert asked_wait({}) is None
