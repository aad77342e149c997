"""The memory daemon's protocol, as far as it needs no node: paths, methods, headers, networks, statuses."""

import ipaddress
import json

import pytest

from tiergate.checkpoints.shards import ShardName
from tiergate.errors import (
    InvariantError,
    MemoryFullError,
    NotFoundError,
    OriginRefusedError,
    OverloadedError,
    RequestError,
    TooFewCopiesError,
)
from tiergate.server.daemon import Ask, RefusedError, asked, claimed_checksum, is_within, number, shard_meta, status_of


@pytest.mark.parametrize(
    ("method", "path", "ask"),
    [
        ("GET", "/health", Ask("health")),
        ("GET", "/v1/cp/namespaces/job-1_a", Ask("get_namespace", "job-1_a")),
        ("POST", "/v1/cp/namespaces/job", Ask("create_namespace", "job")),
        ("DELETE", "/v1/cp/namespaces/job", Ask("drop_namespace", "job")),
        ("POST", "/v1/cp/checkpoints/job/0/100", Ask("put_shard", "job", ShardName("job", 0, 100))),
        ("GET", "/v1/cp/checkpoints/job/8/0", Ask("get_shard", "job", ShardName("job", 8, 0))),
        ("DELETE", "/v1/cp/checkpoints/job/8/7", Ask("delete_shard", "job", ShardName("job", 8, 7))),
        ("GET", "/v1/cp/checkpoints/job/latest", Ask("latest", "job")),
        ("POST", "/v1/cp/cluster/reset", Ask("reset")),
    ],
)
def test_every_row_of_the_table(method: str, path: str, ask: Ask) -> None:
    assert asked(method, path) == ask


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/", 404),
        ("GET", "/v1/cp", 404),
        ("GET", "/health/", 404),
        ("GET", "/v1/cp/checkpoints/job", 404),
        ("GET", "/v1/cp/checkpoints/job/1", 404),
        ("GET", "/v1/cp/checkpoints/job/1/2/3", 404),
        ("GET", "/v2/cp/namespaces/job", 404),
        ("POST", "/health", 405),
        ("PUT", "/v1/cp/namespaces/job", 405),
        ("PUT", "/v1/cp/checkpoints/job/1/2", 405),
        ("GET", "/v1/cp/cluster/reset", 405),
        ("DELETE", "/v1/cp/checkpoints/job/latest", 405),
        ("GET", "/v1/cp/namespaces/", 400),
        ("GET", "/v1/cp/namespaces/a.b", 400),
        ("GET", "/v1/cp/namespaces/..", 400),
        ("GET", "/v1/cp/namespaces/" + 256 * "a", 400),
        ("GET", "/v1/cp/checkpoints/j\u00f6b/1/2", 400),
        ("GET", "/v1/cp/checkpoints/job/-1/2", 400),
        ("GET", "/v1/cp/checkpoints/job/one/2", 400),
        ("GET", "/v1/cp/checkpoints/job/1/", 400),
        ("GET", "/v1/cp/checkpoints/job/1/\u0662", 400),
        ("GET", "/v1/cp/checkpoints/job/1/" + 19 * "9", 400),
    ],
)
def test_whatever_else_is_asked_is_refused(method: str, path: str, status: int) -> None:
    with pytest.raises(RefusedError) as caught:
        asked(method, path)
    assert caught.value.status == status


def test_a_number_of_a_query() -> None:
    assert number("limit", "0") == 0
    for text in (None, "", "x", "1.5", "-1", "+1", " 1"):
        with pytest.raises(RefusedError, match="limit is not a number"):
            number("limit", text)
    with pytest.raises(RefusedError, match="num_ranks is less than 1"):
        number("num_ranks", "0", 1)


def test_what_the_header_says() -> None:
    assert claimed_checksum(None) is None
    assert claimed_checksum(shard_meta("abc=")) == "abc="
    assert claimed_checksum('{"checksum": "abc="}') == "abc="
    assert json.loads(shard_meta("abc=")) == {"checksum": "abc=", "algorithm": "xxh3_128"}


@pytest.mark.parametrize(
    "header",
    [
        "",
        "abc=",
        "[]",
        "null",
        "{}",
        '{"checksum": 1}',
        '{"checksum": "abc=", "algorithm": "md5"}',
        '{"checksum": "abc=", "algorithm": null}',
    ],
)
def test_a_header_that_says_something_else_is_refused(header: str) -> None:
    with pytest.raises(RefusedError) as caught:
        claimed_checksum(header)
    assert caught.value.status == 400


def test_networks() -> None:
    networks = [ipaddress.ip_network("10.0.0.0/8"), ipaddress.ip_network("fd00::/8")]
    for inside in ("10.1.2.3", "::ffff:10.1.2.3", "fd00::1", "fd00::1%eth0"):
        assert is_within(inside, networks), inside
    for outside in ("11.1.2.3", "::ffff:11.1.2.3", "fe80::1", "127.0.0.1", "", None, "somewhere"):
        assert not is_within(outside, networks), outside


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (RefusedError(409, "there is one"), 409),
        (NotFoundError("NoSuchKey"), 404),
        (NotFoundError("NoSuchBucket"), 503),
        (RequestError("BadDigest"), 400),
        (RequestError("EntityTooLarge"), 413),
        (MemoryFullError("full"), 507),
        (TooFewCopiesError("few"), 503),
        (OverloadedError("busy"), 503),
        (OriginRefusedError(403, "AccessDenied"), 502),
        (InvariantError("a bug"), 500),
        (ValueError("a bug"), 500),
    ],
)
def test_statuses(error: Exception, status: int) -> None:
    assert status_of(error) == status
