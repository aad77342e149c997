"""Requests of our own: the table, and what no request gets past."""

from typing import cast

import pytest
from aiohttp import ClientSession
from aiohttp.test_utils import RawTestServer

from tiergate.clock import SystemClock
from tiergate.config import Address, Machine, load
from tiergate.engine.calls import Answer, Call
from tiergate.engine.service import Service
from tiergate.observe.metrics import Metrics
from tiergate.s3.servicemodel import Level
from tiergate.s3.sigv4 import SecretFor
from tiergate.server.member import reachable
from tiergate.server.own import OwnRequests, Verb, told
from tiergate.server.pipeline import Pipeline


async def hello(call: Call) -> Answer:
    return told({"bucket": call.target.bucket})


def server_of(secret_for: SecretFor | None = None) -> RawTestServer:
    machine = Machine(ram_bytes=1 << 30, cores_count=1, user_id=1)
    settings = load(config_file=None, environ={}, flags={}, machine=machine).settings
    own = OwnRequests({"hello": Verb("GET", Level.BUCKET, hello)})
    return RawTestServer(
        Pipeline(cast(Service, None), settings, secret_for, SystemClock(), Metrics(), "node-1", own).handle
    )


@pytest.mark.parametrize(
    ("method", "target", "status", "code"),
    [
        ("GET", "/bucket?x-tiergate-hello", 200, '{"bucket": "bucket"}'),
        ("GET", "/bucket?x-tiergate-other", 501, "<Code>NotImplemented</Code>"),
        ("POST", "/bucket?x-tiergate-hello", 405, "<Code>MethodNotAllowed</Code>"),
        ("GET", "/?x-tiergate-hello", 405, "<Code>MethodNotAllowed</Code>"),
        ("GET", "/bucket/key?x-tiergate-hello", 405, "<Code>MethodNotAllowed</Code>"),
    ],
)
async def test_verbs_are_answered_by_method_and_level(method: str, target: str, status: int, code: str) -> None:
    async with (
        server_of() as server,
        ClientSession() as session,
        session.request(method, str(server.make_url("/"))[:-1] + target) as answer,
    ):
        assert answer.status == status
        assert code in await answer.text()


async def test_unsigned_form_is_no_way_in() -> None:
    form = {"Content-Type": "multipart/form-data; boundary=b"}
    async with (
        server_of(lambda _: None) as server,
        ClientSession() as session,
        session.post(f"{server.make_url('/bucket')}?x-tiergate-hello", headers=form, data=b"--b--") as answer,
    ):
        assert answer.status == 403
        assert "<Code>AccessDenied</Code>" in await answer.text()


@pytest.mark.parametrize(
    ("listen", "peers", "found"),
    [
        (Address("0.0.0.0", 9000), Address("10.0.0.1", 7), "10.0.0.1:9000"),
        (Address("::", 9000), Address("fd00::1", 7), "[fd00::1]:9000"),
        (Address("10.0.0.1", 9000), Address("10.0.0.1", 7), "10.0.0.1:9000"),
        (Address("127.0.0.1", 9000), Address("127.0.0.1", 7), "127.0.0.1:9000"),
        (Address("127.0.0.1", 9000), Address("10.0.0.1", 7), ""),
    ],
)
def test_members_name_an_address_that_others_reach(listen: Address, peers: Address, found: str) -> None:
    assert reachable(listen, peers) == found
