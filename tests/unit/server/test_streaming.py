"""Answers that tell how far some work is."""

import asyncio
import logging

import aiohttp
import pytest
from aiohttp import web

from tiergate.server import streaming
from tiergate.server.streaming import Stream


async def test_work_that_nobody_follows_any_more_ends_without_a_fault(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(streaming, "PROGRESS_INTERVAL_S", 0.01)
    stream, ended = Stream("search"), asyncio.Event()

    async def search() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    async def answer(request: web.Request) -> web.StreamResponse:
        return await stream.answer(request, search(), lambda is_over, fault: {"is_over": is_over, "fault": fault})

    app = web.Application()
    app.router.add_get("/", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        with caplog.at_level(logging.INFO):
            async with aiohttp.ClientSession() as session, session.get(f"http://127.0.0.1:{port_of(runner)}/") as told:
                assert await told.content.readline()
                told.close()
                async with asyncio.timeout(30):
                    await ended.wait()
    finally:
        await runner.cleanup()
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


def port_of(runner: web.AppRunner) -> int:
    port: int = runner.addresses[0][1]
    return port
