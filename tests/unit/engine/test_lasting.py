"""Answers that begin before their outcome is known."""

import asyncio
from collections.abc import AsyncIterator
from xml.etree import ElementTree

import pytest

from tiergate.engine import lasting
from tiergate.engine.calls import Answer, Outgoing
from tiergate.engine.lasting import SettledBody, patient
from tiergate.errors import RequestError

DOCUMENT = b'<?xml version="1.0" encoding="UTF-8"?>\n<Done><Key>k</Key></Done>'


class Pieces:
    def __init__(self, *pieces: bytes) -> None:
        self._pieces = pieces
        self.is_closed = False

    async def pieces(self) -> AsyncIterator[bytes | memoryview]:
        for piece in self._pieces:
            yield piece

    async def close(self) -> None:
        self.is_closed = True


class Settling:
    def __init__(self) -> None:
        self.count = 0

    async def __call__(self) -> None:
        self.count += 1


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lasting, "FIRST_S", 0.0)
    monkeypatch.setattr(lasting, "INTERVAL_S", 0.001)


async def test_last_piece_waits_until_all_is_settled() -> None:
    inner, settle = Pieces(b"a", b"b", b"c"), Settling()
    body = SettledBody(inner, settle)
    seen = [(bytes(piece), settle.count) async for piece in body.pieces()]
    assert seen == [(b"a", 0), (b"b", 0), (b"c", 1)]
    await body.close()
    assert inner.is_closed


@pytest.mark.parametrize("pieces", [(), (b"",)])
async def test_empty_body_is_settled_too(pieces: tuple[bytes, ...]) -> None:
    settle = Settling()
    assert b"".join([bytes(piece) async for piece in SettledBody(Pieces(*pieces), settle).pieces()]) == b""
    assert settle.count == 1


async def test_body_that_nobody_reads_to_its_end_is_settled_when_it_closes() -> None:
    inner, settle = Pieces(b"a", b"b"), Settling()
    body = SettledBody(inner, settle)
    assert await anext(body.pieces()) == b"a"
    await body.close()
    assert (settle.count, inner.is_closed) == (1, True)


async def test_quick_outcome_is_answered_as_it_is() -> None:
    async def work() -> Answer:
        return Answer(200, {"a": "b"}, DOCUMENT)

    assert await patient(work(), "origin", "/b/k", "id") == Answer(200, {"a": "b"}, DOCUMENT)


async def test_quick_refusal_is_raised() -> None:
    async def work() -> Answer:
        raise RequestError("InvalidPart")

    with pytest.raises(RequestError):
        await patient(work(), "origin", "/b/k", "id")


async def begun(work: "asyncio.Event", outcome: Answer | RequestError) -> tuple[Answer, Outgoing]:
    async def lasts() -> Answer:
        await work.wait()
        if isinstance(outcome, RequestError):
            raise outcome
        return outcome

    answer = await patient(lasts(), "origin", "/b/k", "id")
    assert not isinstance(answer.body, bytes)
    return answer, answer.body


@pytest.mark.usefixtures("quick")
async def test_slow_outcome_keeps_the_connection_alive_and_is_well_formed() -> None:
    work = asyncio.Event()
    answer, body = await begun(work, Answer(200, {}, DOCUMENT))
    assert (answer.status, answer.size_bytes, answer.headers["x-tiergate-ack"]) == (200, None, "origin")
    found = b""
    async for piece in body.pieces():
        found += bytes(piece)
        if found.endswith(b"  "):
            work.set()
    assert found.startswith(lasting.DECLARATION + b"  ")
    assert ElementTree.fromstring(found).findtext("Key") == "k"
    await body.close()


@pytest.mark.usefixtures("quick")
async def test_slow_failure_is_an_error_document_under_200() -> None:
    work = asyncio.Event()
    _, body = await begun(work, RequestError("InvalidPart"))
    work.set()
    error = ElementTree.fromstring(b"".join([bytes(piece) async for piece in body.pieces()]))
    assert (error.tag, error.findtext("Code"), error.findtext("RequestId")) == ("Error", "InvalidPart", "id")


@pytest.mark.usefixtures("quick")
async def test_work_ends_with_the_client_that_asked_for_it() -> None:
    _, body = await begun(asyncio.Event(), Answer(200))
    pieces = body.pieces()
    assert await anext(pieces) == lasting.DECLARATION
    await body.close()
    assert [task for task in asyncio.all_tasks() if task is not asyncio.current_task()] == []
