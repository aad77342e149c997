"""Signatures of requests between nodes."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiergate.config import Secret
from tiergate.errors import RequestError
from tiergate.replication.auth import MAX_HEADER_CHARS, SKEW_S, STREAMED, Signable, authorization, digest, verify

SECRET = Secret("a secret of this cluster")
NOW_S = 1_800_000_000.0
REQUEST = Signable("PUT", "/peer/v1/bodies/u?holder=v", "node a,b", "node-b", STREAMED)
HEADER = authorization(SECRET, REQUEST, NOW_S, "0123")


def code_of(
    header: str = HEADER,
    secret: Secret = SECRET,
    method: str = REQUEST.method,
    target: str = REQUEST.target,
    receiver: str = REQUEST.receiver,
    now_s: float = NOW_S,
) -> str:
    try:
        verify(secret, header, method, target, receiver, now_s)
    except RequestError as error:
        return error.code
    return ""


def test_what_was_signed_is_found_again() -> None:
    assert verify(SECRET, HEADER, REQUEST.method, REQUEST.target, REQUEST.receiver, NOW_S + SKEW_S - 1) == REQUEST


def test_the_secret_shows_nowhere() -> None:
    assert SECRET.reveal() not in HEADER


@pytest.mark.parametrize(
    "code",
    [
        code_of(secret=Secret("another")),
        code_of(method="GET"),
        code_of(target=REQUEST.target + "x"),
        code_of(receiver="node-c"),
        code_of(HEADER.replace("node%20a", "node%20b")),
        code_of(HEADER.replace(STREAMED, digest(b""))),
        code_of(HEADER.replace("0123", "0124")),
        code_of(HEADER.replace(str(int(NOW_S)), str(int(NOW_S) + 1))),
        code_of(""),
        code_of(HEADER + "," + "0" * MAX_HEADER_CHARS),
    ],
)
def test_anything_else_is_refused(code: str) -> None:
    assert code == "AccessDenied"


@pytest.mark.parametrize("apart_s", [SKEW_S + 2, -SKEW_S - 2])
def test_clocks_too_far_apart_are_told(apart_s: float) -> None:
    assert code_of(now_s=NOW_S + apart_s) == "RequestTimeTooSkewed"


@given(st.text(max_size=300), st.text(max_size=50))
def test_any_text_is_refused_in_order(header: str, target: str) -> None:
    assert code_of(header=header, target=target) == "AccessDenied"


@given(st.text(max_size=40), st.text(max_size=40))
def test_names_do_not_run_into_each_other(sender: str, receiver: str) -> None:
    request = replace(REQUEST, sender=sender, receiver=receiver)
    header = authorization(SECRET, request, NOW_S, "0123")
    assert verify(SECRET, header, request.method, request.target, receiver, NOW_S) == request
