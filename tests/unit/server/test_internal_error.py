"""A bug of ours: said as InternalError, counted, and nothing of it told to the client."""

from typing import cast

import pytest
from aiohttp import ClientSession
from aiohttp.test_utils import RawTestServer

from tiergate.clock import SystemClock
from tiergate.config import Machine, load
from tiergate.engine.calls import Answer, Call
from tiergate.engine.service import Service
from tiergate.errors import InvariantError
from tiergate.observe.metrics import Metrics
from tiergate.server.pipeline import Pipeline


class Broken:
    """A service with a bug."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def owns(self, operation: str) -> bool:
        return True

    async def answer(self, call: Call) -> Answer:
        raise self._error


def counted(metrics: Metrics, name: str) -> float:
    return sum(series.values[0] for series in metrics.store.read() if series.name == name)


@pytest.mark.parametrize("error", [InvariantError("the secret reason"), ZeroDivisionError("the secret reason")])
async def test_bug_is_an_internal_error_and_counted(error: Exception) -> None:
    machine = Machine(ram_bytes=1 << 30, cores_count=1, user_id=1)
    settings = load(config_file=None, environ={}, flags={}, machine=machine).settings
    metrics = Metrics()
    pipeline = Pipeline(cast(Service, Broken(error)), settings, None, SystemClock(), metrics, "node-1")
    server = RawTestServer(pipeline.handle)
    async with server, ClientSession() as session, session.get(server.make_url("/bucket/key")) as answer:
        assert answer.status == 500
        text = await answer.text()
    assert "<Code>InternalError</Code>" in text
    assert "secret reason" not in text
    assert counted(metrics, "tiergate_http_broken_invariants_total") == 1
