"""Requests between nodes, signed with the secret of the cluster. Pure.

A signature names the sender, the receiver, the time, and everything of the request but a streamed body: that is proved
by the checksums of its blocks, which the receiver answers with. A request that is sent again within `SKEW_S` is
accepted again; none of the routes does more the second time than it did the first. Whoever can change what is on the
wire needs mutual TLS against him, not this.
"""

import hashlib
import hmac
from dataclasses import dataclass
from urllib.parse import quote, unquote

from tiergate.config import Secret
from tiergate.errors import RequestError

SCHEME = "TIERGATE-HMAC-SHA256"

SKEW_S = 300.0
"""How far the clocks of two nodes may be apart."""

STREAMED = "streamed"
"""Stands for the digest of a body that is not known when the request is signed."""

MAX_HEADER_CHARS = 2048


@dataclass(frozen=True, slots=True)
class Signable:
    """What of a request is signed. `target`: path and query as they are on the wire; `payload`: see `digest`."""

    method: str
    target: str
    sender: str
    receiver: str
    payload: str


def digest(body: bytes) -> str:
    """What a signature says of a whole body."""
    return hashlib.sha256(body).hexdigest()


def authorization(secret: Secret, request: Signable, now_s: float, nonce: str) -> str:
    """The `Authorization` header of a request. `nonce` makes it unlike all others."""
    time = str(int(now_s))
    signature = _signature(secret, request, time, nonce)
    return f"{SCHEME} {quote(request.sender, safe='')},{time},{nonce},{request.payload},{signature}"


def verify(secret: Secret, header: str, method: str, target: str, receiver: str, now_s: float) -> Signable:
    """The request that somebody who knows the secret signed, for `receiver`, about now. Whether `payload` is what came
    is for whoever reads it.

    Raises:
        RequestError: AccessDenied, RequestTimeTooSkewed.
    """
    scheme, _, rest = header.partition(" ")
    fields = rest.split(",")
    is_text = len(header) <= MAX_HEADER_CHARS and header.isascii() and target.isascii()
    if not is_text or scheme != SCHEME or len(fields) != 5:
        raise RequestError("AccessDenied", "the request is not signed as requests between nodes are")
    sender, time, nonce, payload, signature = fields
    request = Signable(method, target, unquote(sender), receiver, payload)
    expected = _signature(secret, request, time, nonce)
    if not hmac.compare_digest(expected.encode(), signature.encode()):
        raise RequestError("AccessDenied", "the signature does not match: another secret, or meant for another node")
    if abs(now_s - int(time)) > SKEW_S:
        raise RequestError("RequestTimeTooSkewed", "the clocks of the nodes are too far apart, or the request is old")
    return request


def _signature(secret: Secret, request: Signable, time: str, nonce: str) -> str:
    fields = (
        SCHEME,
        request.method,
        request.target,
        quote(request.sender, safe=""),
        quote(request.receiver, safe=""),
        time,
        nonce,
        request.payload,
    )
    return hmac.new(secret.reveal().encode(), "\n".join(fields).encode(), hashlib.sha256).hexdigest()
