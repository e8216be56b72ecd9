"""A Hub that misbehaves: connections that break, servers that are busy, files that are not those they were."""

from __future__ import annotations

import threading
import time
from email.utils import formatdate
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub import constants

from chord_convert.source import hub
from chord_convert.source.headers import TensorInfo
from chord_convert.source.hub import HubSource
from chord_convert.source.retry import Retry, asked_wait
from chord_convert.validate import validate
from chord_runtime.errors import SourceError
from tests.checkpoints import write_checkpoint
from tests.hub_server import Fault, HubServer
from tests.source.hub import FAST, REPO, content, ranges, read

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
    tensors = list(validate(source).require().tensors.values())[::3]
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
    heads = [request.path for request in server.requests if request.method == "HEAD"]
    assert len([path for path in heads if path.endswith(".safetensors")]) == 4


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
