"""The origin client when the origin misbehaves: each fault is injected at a chosen request."""

import asyncio
import hashlib
from collections.abc import AsyncIterator, Callable

import pytest
from tests.contracts.conftest import BUCKET

from tiergate.clock import SystemClock
from tiergate.config.values import ConditionalWrites
from tiergate.errors import (
    OriginCredentialsError,
    OriginExhaustedError,
    OriginRefusedError,
    OriginTemporaryError,
)
from tiergate.model import ObjectName
from tiergate.origin.client import Condition, OriginClient, OriginSettings
from tiergate.testing.origins import (
    Action,
    Answer,
    Corrupt,
    Cut,
    FaultyOrigin,
    Gate,
    Hold,
    MotoOrigin,
    Truncate,
)

pytestmark = [
    pytest.mark.usefixtures("keys"),
    pytest.mark.parametrize("server", [MotoOrigin], ids=["moto"], indirect=True),
]

NAME = ObjectName(BUCKET, "dir/object")
DATA = bytes(range(256)) * 8000
ATTEMPTS_COUNT = 3


class QuickClock(SystemClock):
    """Real time, but sleeps are only noted."""

    def __init__(self) -> None:
        self.slept_s: list[float] = []

    async def sleep(self, seconds: float) -> None:
        self.slept_s.append(seconds)


@pytest.fixture
def clock() -> QuickClock:
    return QuickClock()


def settings_for(
    proxy: FaultyOrigin, read_timeout_s: float = 20.0, mode: ConditionalWrites = ConditionalWrites.AUTO
) -> OriginSettings:
    return OriginSettings(
        endpoint=proxy.endpoint,
        attempts_count=ATTEMPTS_COUNT,
        read_timeout_s=read_timeout_s,
        conditional_writes=mode,
    )


@pytest.fixture
async def origin(proxy: FaultyOrigin, clock: QuickClock) -> AsyncIterator[OriginClient]:
    async with OriginClient(settings_for(proxy), "node-1", clock) as client:
        yield client


def chunks_of(data: bytes) -> Callable[[], AsyncIterator[memoryview]]:
    async def pieces() -> AsyncIterator[memoryview]:
        for start in range(0, len(data), 100_000):
            yield memoryview(data)[start : start + 100_000]

    return pieces


async def put(origin: OriginClient, data: bytes = DATA) -> str:
    return (await origin.put_object(NAME, len(data), chunks_of(data), {})).etag


async def read(origin: OriginClient, size_bytes: int = len(DATA)) -> bytes:
    async with origin.get_object(NAME, 0, size_bytes) as (_, pieces):
        return b"".join([piece async for piece in pieces])


@pytest.mark.parametrize(
    "fault",
    [
        Answer(500, "InternalError"),
        Answer(503, "SlowDown"),
        Answer(503, "SlowDown", early=True),
        Answer(500, "InternalError", after_origin=True),
        Answer(400, "RequestTimeout"),
        Cut(),
        Cut(after_origin=True),
    ],
    ids=str,
)
async def test_put_with_passing_fault_is_sent_again_whole(
    origin: OriginClient, proxy: FaultyOrigin, fault: Action
) -> None:
    proxy.inject(fault, operation="PutObject", key=NAME.key)

    assert await put(origin) == hashlib.md5(DATA).hexdigest()

    sent = proxy.seen("PutObject")
    assert len(sent) == 2
    assert sent[1].body_sha256 == hashlib.sha256(DATA).hexdigest()
    assert await read(origin) == DATA


@pytest.mark.parametrize("fault", [Answer(503, "SlowDown"), Cut()], ids=str)
async def test_fault_that_stays_exhausts_the_tries(
    origin: OriginClient, proxy: FaultyOrigin, clock: QuickClock, fault: Action
) -> None:
    proxy.inject(fault, times=None)
    with pytest.raises(OriginExhaustedError):
        await origin.head_object(NAME)
    assert len(proxy.seen("HeadObject")) == ATTEMPTS_COUNT
    assert len(clock.slept_s) == ATTEMPTS_COUNT - 1


async def test_retry_after_is_honoured(origin: OriginClient, proxy: FaultyOrigin, clock: QuickClock) -> None:
    proxy.inject(Answer(503, "SlowDown", (("Retry-After", "7"),)), operation="PutObject")
    await put(origin, b"x")
    assert clock.slept_s == [7.0]


async def test_nobody_listening_exhausts_the_tries(clock: QuickClock) -> None:
    settings = OriginSettings(endpoint="http://127.0.0.1:9", attempts_count=2)
    async with OriginClient(settings, "node-1", clock) as origin:
        with pytest.raises(OriginExhaustedError):
            await origin.head_object(NAME)
    assert len(clock.slept_s) == 1


async def test_origin_that_does_not_answer_times_out_and_is_tried_again(proxy: FaultyOrigin, clock: QuickClock) -> None:
    gate = Gate()
    async with OriginClient(settings_for(proxy, read_timeout_s=0.3), "node-1", clock) as origin:
        proxy.inject(Hold(gate), operation="PutObject")
        try:
            assert await put(origin, b"late") == hashlib.md5(b"late").hexdigest()
        finally:
            gate.release()
    assert len(proxy.seen("PutObject")) == 2


async def test_origin_that_takes_no_body_times_out(proxy: FaultyOrigin, clock: QuickClock) -> None:
    gate = Gate()
    big = bytes(64 << 20)
    async with OriginClient(settings_for(proxy, read_timeout_s=0.5), "node-1", clock) as origin:
        proxy.inject(Hold(gate), operation="PutObject", times=None)
        try:
            with pytest.raises(OriginExhaustedError):
                await put(origin, big)
        finally:
            gate.release()


async def test_body_cut_short_is_temporary(origin: OriginClient, proxy: FaultyOrigin) -> None:
    await put(origin)
    proxy.inject(Truncate(1000), operation="GetObject")
    with pytest.raises(OriginTemporaryError):
        await read(origin)
    assert len(proxy.seen("GetObject")) == 1
    assert await read(origin) == DATA


async def test_body_that_stops_coming_is_temporary(proxy: FaultyOrigin, clock: QuickClock) -> None:
    async def stuck(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = "HTTP/1.1 206 Partial\r\nContent-Length: 100\r\nContent-Range: bytes 0-99/100\r\n"
        head += 'ETag: "e"\r\nLast-Modified: Sun, 29 Nov 2026 17:00:00 GMT\r\n\r\nfirst'
        writer.write(head.encode())
        await writer.drain()
        await stop.wait()
        writer.close()

    stop = asyncio.Event()
    listener = await asyncio.start_server(stuck, "127.0.0.1", 0)
    endpoint = f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
    settings = OriginSettings(endpoint=endpoint, read_timeout_s=0.3)
    async with listener, OriginClient(settings, "node-1", clock) as origin:
        async with origin.get_object(NAME, 0, 100) as (there, pieces):
            assert there.size_bytes == 100
            assert await anext(pieces) == b"first"
            with pytest.raises(OriginTemporaryError):
                await anext(pieces)
        stop.set()


async def test_corrupt_byte_reaches_the_reader_at_its_place(origin: OriginClient, proxy: FaultyOrigin) -> None:
    await put(origin)
    proxy.inject(Corrupt(70_000), operation="GetObject")
    got = await read(origin)
    assert [at for at in range(len(DATA)) if got[at] != DATA[at]] == [70_000]


@pytest.mark.parametrize("code", ["InvalidAccessKeyId", "ExpiredToken", "SignatureDoesNotMatch"])
async def test_refused_credentials_have_their_own_error(origin: OriginClient, proxy: FaultyOrigin, code: str) -> None:
    proxy.inject(Answer(403, code), operation="PutObject")
    with pytest.raises(OriginCredentialsError) as refused:
        await put(origin, b"x")
    assert (refused.value.status, refused.value.code) == (403, code)
    assert len(proxy.seen("PutObject")) == 1


@pytest.mark.parametrize(
    "code", ["ExpiredToken", "InvalidAccessKeyId", "SignatureDoesNotMatch", "RequestTimeTooSkewed"]
)
async def test_head_refused_for_our_credentials_is_told_from_a_denial(
    origin: OriginClient, proxy: FaultyOrigin, code: str
) -> None:
    await put(origin)
    proxy.inject(Answer(403), operation="HeadObject", times=2)
    proxy.inject(Answer(403, code), operation="GetObject")
    for _ in range(2):
        with pytest.raises(OriginCredentialsError) as refused:
            await origin.head_object(NAME)
        assert refused.value.code == code
    (question,) = proxy.seen("GetObject")
    assert question.headers["range"] == "bytes=0-0"
    assert (await origin.head_object(NAME)) is not None


@pytest.mark.parametrize("answer", [None, Answer(403, "AccessDenied")], ids=["may-get", "may-not-get"])
async def test_head_denied_by_the_bucket_s_policy_stays_denied(
    origin: OriginClient, proxy: FaultyOrigin, answer: Answer | None
) -> None:
    await put(origin)
    proxy.inject(Answer(403), operation="HeadObject", times=2)
    if answer is not None:
        proxy.inject(answer, operation="GetObject", times=None)
    for _ in range(2):
        with pytest.raises(OriginRefusedError) as refused:
            await origin.head_object(NAME)
        assert not isinstance(refused.value, OriginCredentialsError)
        assert (refused.value.status, refused.value.code) == (403, "AccessDenied")
    assert len(proxy.seen("GetObject")) == 1


async def test_why_a_head_was_refused_is_asked_again_after_a_while(
    proxy: FaultyOrigin, clock: QuickClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = 0.0
    monkeypatch.setattr(clock, "monotonic_s", lambda: now_s)
    async with OriginClient(settings_for(proxy), "node-1", clock) as origin:
        await put(origin)
        proxy.inject(Answer(403), operation="HeadObject", times=None)
        proxy.inject(Answer(403, "ExpiredToken"), operation="GetObject")
        with pytest.raises(OriginCredentialsError):
            await origin.head_object(NAME)
        now_s = 100.0
        with pytest.raises(OriginRefusedError) as refused:
            await origin.head_object(NAME)
        assert refused.value.code == "AccessDenied"


async def test_bucket_s_head_refused_for_our_credentials(origin: OriginClient, proxy: FaultyOrigin) -> None:
    proxy.inject(Answer(400), operation="HeadBucket")
    proxy.inject(Answer(400, "ExpiredToken"), operation="GetBucketLocation")
    with pytest.raises(OriginCredentialsError):
        await origin.get_bucket(BUCKET, 0.0)


async def test_refused_credentials_are_looked_up_again(
    proxy: FaultyOrigin, clock: QuickClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    later_s = 0.0
    monkeypatch.setattr(clock, "monotonic_s", lambda: later_s)
    async with OriginClient(settings_for(proxy), "node-1", clock) as origin:
        await put(origin, b"x")
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "rotated")
        later_s = 100.0
        proxy.inject(Answer(403, "InvalidAccessKeyId"), operation="PutObject")
        with pytest.raises(OriginCredentialsError):
            await put(origin, b"x")
        await put(origin, b"x")
    used = [each.headers["authorization"].split("Credential=")[1][:7] for each in proxy.seen("PutObject")]
    assert used == ["test/20", "test/20", "rotated"]


async def test_no_credentials_is_a_matter_of_credentials(
    proxy: FaultyOrigin, clock: QuickClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/nonexistent")
    monkeypatch.setenv("AWS_CONFIG_FILE", "/nonexistent")
    async with OriginClient(settings_for(proxy), "node-1", clock) as origin:
        with pytest.raises(OriginCredentialsError):
            await origin.head_object(NAME)
    assert proxy.requests == []


@pytest.mark.parametrize(("status", "code"), [(501, "NotImplemented"), (400, "InvalidArgument")], ids=["501", "400"])
async def test_origin_without_conditions_is_found_out_once(
    origin: OriginClient, proxy: FaultyOrigin, status: int, code: str
) -> None:
    proxy.inject(Answer(status, code), where=lambda seen: "if-none-match" in seen.headers, times=None)
    for _ in range(2):
        await origin.put_object(NAME, 1, chunks_of(b"x"), {}, Condition.if_absent())
    conditional = ["if-none-match" in each.headers for each in proxy.seen("PutObject")]
    assert conditional == [True, False, False]
    assert not origin.conditional_writes


async def test_conditions_switched_on_are_never_left_out(proxy: FaultyOrigin, clock: QuickClock) -> None:
    proxy.inject(Answer(501, "NotImplemented"), operation="PutObject")
    async with OriginClient(settings_for(proxy, mode=ConditionalWrites.ON), "n", clock) as origin:
        with pytest.raises(OriginRefusedError) as refused:
            await origin.put_object(NAME, 1, chunks_of(b"x"), {}, Condition.if_absent())
    assert refused.value.status == 501
    assert len(proxy.seen("PutObject")) == 1


@pytest.mark.parametrize(("status", "code"), [(412, "PreconditionFailed"), (409, "ConditionalRequestConflict")])
async def test_failed_condition_is_refused_and_not_taken_for_unknown(
    origin: OriginClient, proxy: FaultyOrigin, status: int, code: str
) -> None:
    proxy.inject(Answer(status, code), operation="PutObject")
    with pytest.raises(OriginRefusedError) as refused:
        await origin.put_object(NAME, 1, chunks_of(b"x"), {}, Condition.if_match("e"))
    assert (refused.value.status, refused.value.code) == (status, code)
    assert origin.conditional_writes


async def upload(origin: OriginClient) -> tuple[str, list[tuple[int, str]]]:
    upload_id = await origin.create_multipart_upload(NAME, {})
    return upload_id, [(1, await origin.upload_part(NAME, upload_id, 1, 4, chunks_of(b"part"), {}))]


@pytest.mark.parametrize(
    ("code", "kind"),
    [("InternalError", OriginExhaustedError), ("SlowDown", OriginExhaustedError), ("NoSuchUpload", None)],
)
async def test_error_within_a_200_is_an_error(clock: QuickClock, code: str, kind: type[Exception] | None) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"</CompleteMultipartUpload>")
        body = f'   \n<?xml version="1.0"?><Error><Code>{code}</Code></Error>'.encode()
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
        await writer.drain()
        writer.close()

    listener = await asyncio.start_server(answer, "127.0.0.1", 0)
    endpoint = f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
    async with (
        listener,
        OriginClient(OriginSettings(endpoint=endpoint, attempts_count=2), "n", clock) as origin,
    ):
        with pytest.raises(kind or OriginRefusedError) as error:
            await origin.complete_multipart_upload(NAME, "id", [(1, "e")], {})
    if isinstance(error.value, OriginRefusedError):
        assert (error.value.status, error.value.code) == (404, "NoSuchUpload")
        assert clock.slept_s == []


async def test_completion_whose_answer_was_lost_is_not_called_refused(
    origin: OriginClient, proxy: FaultyOrigin
) -> None:
    upload_id, parts = await upload(origin)
    proxy.inject(Cut(after_origin=True), operation="CompleteMultipartUpload")
    proxy.inject(Answer(404, "NoSuchUpload"), operation="CompleteMultipartUpload", nth=2)
    with pytest.raises(OriginTemporaryError):
        await origin.complete_multipart_upload(NAME, upload_id, parts, {})
    there = await origin.head_object(NAME)
    assert there is not None
    assert there.etag.endswith("-1")


async def test_moved_bucket_is_asked_in_its_region_from_then_on(origin: OriginClient, proxy: FaultyOrigin) -> None:
    moved = Answer(301, "PermanentRedirect", (("x-amz-bucket-region", "eu-west-3"),))
    proxy.inject(moved, operation="PutObject")
    await put(origin, b"x")
    await put(origin, b"x")
    regions = [each.headers["authorization"].split("/")[2] for each in proxy.seen("PutObject")]
    assert regions == ["us-east-1", "eu-west-3", "eu-west-3"]


async def test_bucket_that_keeps_moving_is_refused(origin: OriginClient, proxy: FaultyOrigin) -> None:
    for region, nth in (("eu-west-3", 1), ("eu-west-2", 2)):
        moved = Answer(301, "PermanentRedirect", (("x-amz-bucket-region", region),))
        proxy.inject(moved, operation="PutObject", nth=nth)
    with pytest.raises(OriginRefusedError) as refused:
        await put(origin, b"x")
    assert refused.value.code == "PermanentRedirect"


async def test_error_of_the_body_s_source_comes_out_unchanged_and_is_not_retried(
    origin: OriginClient, proxy: FaultyOrigin
) -> None:
    class SourceError(Exception):
        pass

    async def broken() -> AsyncIterator[memoryview]:
        yield memoryview(bytes(200_000))
        raise SourceError

    with pytest.raises(SourceError):
        await origin.put_object(NAME, 400_000, broken, {})
    await asyncio.to_thread(proxy.wait_finished, "PutObject")
    assert [each.status for each in proxy.seen("PutObject")] == [None]


async def test_body_of_another_length_than_announced_never_lands(origin: OriginClient, proxy: FaultyOrigin) -> None:
    await put(origin, b"old")
    for size_bytes in (4, 6):
        with pytest.raises(ValueError, match="a body of"):
            await origin.put_object(NAME, size_bytes, chunks_of(b"fives"), {})
    assert await read(origin, 3) == b"old"


async def test_cancelled_put_lets_go_of_its_body(origin: OriginClient, proxy: FaultyOrigin) -> None:
    closed = asyncio.Event()

    async def endless() -> AsyncIterator[memoryview]:
        try:
            while True:
                yield memoryview(bytes(1 << 20))
        finally:
            closed.set()

    gate = Gate()
    proxy.inject(Hold(gate), operation="PutObject")
    task = asyncio.create_task(origin.put_object(NAME, 1 << 30, endless, {}))
    await gate.reached()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert closed.is_set()
    gate.release()


async def test_early_refusal_stops_the_body(origin: OriginClient, proxy: FaultyOrigin) -> None:
    asked = 0
    piece = bytes(1 << 20)

    async def pieces() -> AsyncIterator[memoryview]:
        nonlocal asked
        for _ in range(1024):
            asked += 1
            yield memoryview(piece)

    proxy.inject(Answer(403, "AccessDenied", early=True), operation="PutObject", times=None)
    with pytest.raises((OriginRefusedError, OriginExhaustedError)):
        await origin.put_object(NAME, 1 << 30, pieces, {})
    assert asked < 1024


async def test_versioning_that_may_not_be_read_counts_as_versioned(origin: OriginClient, proxy: FaultyOrigin) -> None:
    proxy.inject(Answer(403, "AccessDenied"), operation="GetBucketVersioning")
    bucket = await origin.get_bucket(BUCKET, 1.0)
    assert bucket is not None
    assert bucket.versioned


async def test_third_part_of_one_key_can_be_addressed(origin: OriginClient, proxy: FaultyOrigin) -> None:
    upload_id, _ = await upload(origin)
    proxy.inject(Answer(500, "InternalError"), operation="UploadPart", key=NAME.key, nth=3)
    for number in range(2, 6):
        await origin.upload_part(NAME, upload_id, number, 4, chunks_of(b"part"), {})
    statuses = [(each.query["partNumber"], each.status) for each in proxy.seen("UploadPart")]
    assert statuses == [("1", 200), ("2", 200), ("3", 200), ("4", 500), ("4", 200), ("5", 200)]
    await origin.abort_multipart_upload(NAME, upload_id)
