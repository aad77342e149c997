"""S3 requests as bytes: composed by hand, signed with botocore's own code, sent over a plain socket.

No HTTP library stands in between, so a test says exactly what is on the wire and sees exactly what comes back.
"""

import base64
import hashlib
import hmac
import socket
import struct
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import Protocol, Self
from urllib.parse import quote, urlsplit
from xml.etree import ElementTree

from botocore.auth import S3SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials

REGION = "us-east-1"
UNSIGNED = "UNSIGNED-PAYLOAD"
STREAMING = "STREAMING-AWS4-HMAC-SHA256-PAYLOAD"
STREAMING_TRAILER = "STREAMING-AWS4-HMAC-SHA256-PAYLOAD-TRAILER"
STREAMING_UNSIGNED = "STREAMING-UNSIGNED-PAYLOAD-TRAILER"
TIMEOUT_S = 20.0
EMPTY_SHA256 = hashlib.sha256(b"").hexdigest()
_TIMESTAMP = "%Y%m%dT%H%M%SZ"


@dataclass(frozen=True, slots=True)
class Identity:
    """Who signs."""

    access_key: str
    secret_key: str


@dataclass(frozen=True, slots=True)
class Ask:
    """One request. `path` and `query` go out as they are; `late` headers are added after signing.

    `payload` is x-amz-content-sha256 (None: the body's real hash). `length` is Content-Length: True for the body's,
    None for no such header. `signed=False` sends neither signature nor date; `presign_s` signs the URL instead.
    """

    method: str = "GET"
    path: str = "/"
    query: str = ""
    headers: Mapping[str, str | bytes] = field(default_factory=dict)
    body: bytes = b""
    late: Sequence[tuple[str, str | bytes]] = ()
    payload: str | None = None
    length: int | bool | None = True
    version: str = "HTTP/1.1"
    signed: bool = True
    presign_s: int | None = None
    skew: timedelta = timedelta()
    identity: Identity | None = None


@dataclass(frozen=True, slots=True)
class Sealed:
    """A request head ready to be sent, and what later signatures of its body build on."""

    head: bytes
    signature: str
    timestamp: str
    identity: Identity

    @property
    def scope(self) -> str:
        return f"{self.timestamp[:8]}/{REGION}/s3/aws4_request"

    def sign_more(self, *lines: str) -> str:
        """The signature of a further string to sign of this request."""
        key = f"AWS4{self.identity.secret_key}".encode()
        for word in self.scope.split("/"):
            key = hmac.digest(key, word.encode(), "sha256")
        return hmac.digest(key, "\n".join(lines).encode(), "sha256").hex()


class _Signer(S3SigV4Auth):
    def __init__(self, identity: Identity, payload: str) -> None:
        super().__init__(Credentials(identity.access_key, identity.secret_key), "s3", REGION)
        self._payload = payload

    def payload(self, request: AWSRequest) -> str:
        return self._payload

    def seal(self, request: AWSRequest, timestamp: str) -> str:
        request.context["timestamp"] = timestamp
        return str(self.signature(self.string_to_sign(request, self.canonical_request(request)), request))

    def names(self, request: AWSRequest) -> str:
        return str(self.signed_headers(self.headers_to_sign(request)))

    def credential(self, request: AWSRequest) -> str:
        return str(self.scope(request))


def seal(ask: Ask, authority: str, identity: Identity) -> Sealed:
    """Sign a request and write its head."""
    identity = ask.identity or identity
    payload = ask.payload if ask.payload is not None else hashlib.sha256(ask.body).hexdigest()
    timestamp = (datetime.now(UTC) + ask.skew).strftime(_TIMESTAMP)
    headers: dict[str, str | bytes] = dict(ask.headers)
    query, signature = ask.query, ""
    if ask.presign_s is not None:
        query, signature = _presign(ask, authority, identity, timestamp)
    elif ask.signed:
        headers |= {"X-Amz-Date": timestamp, "X-Amz-Content-SHA256": payload}
        request = _request(ask.method, authority, ask.path, ask.query, headers)
        signer = _Signer(identity, payload)
        signature = signer.seal(request, timestamp)
        headers["Authorization"] = (
            f"AWS4-HMAC-SHA256 Credential={signer.credential(request)}, SignedHeaders={signer.names(request)}, "
            f"Signature={signature}"
        )
    pairs: list[tuple[str, str | bytes]] = [("Host", authority), *headers.items()]
    if ask.length is not None:
        pairs.append(("Content-Length", str(len(ask.body) if ask.length is True else int(ask.length))))
    pairs += ask.late
    target = ask.path + (f"?{query}" if query else "")
    lines = [f"{ask.method} {target} {ask.version}".encode("utf-8", "surrogateescape")]
    lines += [name.encode() + b": " + (value if isinstance(value, bytes) else value.encode()) for name, value in pairs]
    return Sealed(b"\r\n".join(lines) + b"\r\n\r\n", signature, timestamp, identity)


def _request(method: str, authority: str, path: str, query: str, headers: Mapping[str, str | bytes]) -> AWSRequest:
    url = f"http://{authority}{path}" + (f"?{query}" if query else "")
    text = {name: value.decode() if isinstance(value, bytes) else value for name, value in headers.items()}
    return AWSRequest(method=method, url=url, headers=text)


def _presign(ask: Ask, authority: str, identity: Identity, timestamp: str) -> tuple[str, str]:
    signer = _Signer(identity, UNSIGNED)
    plain = _request(ask.method, authority, ask.path, "", ask.headers)
    plain.context["timestamp"] = timestamp
    fields = {
        "X-Amz-Algorithm": "AWS4-HMAC-SHA256",
        "X-Amz-Credential": signer.credential(plain),
        "X-Amz-Date": timestamp,
        "X-Amz-Expires": str(ask.presign_s),
        "X-Amz-SignedHeaders": signer.names(plain),
    }
    pairs = [ask.query] if ask.query else []
    pairs += [f"{name}={quote(value, safe='-_.~')}" for name, value in fields.items()]
    query = "&".join(sorted("&".join(pairs).split("&")))
    signature = signer.seal(_request(ask.method, authority, ask.path, query, ask.headers), timestamp)
    return f"{query}&X-Amz-Signature={signature}", signature


@dataclass(frozen=True, slots=True)
class Reply:
    """One answer. `interim` are the 1xx statuses before it; `closes` says that the server ends the connection."""

    status: int
    headers: Mapping[str, str]
    body: bytes
    interim: tuple[int, ...]
    closes: bool

    @property
    def etag(self) -> str:
        return self.headers.get("etag", "")

    @property
    def document(self) -> ElementTree.Element:
        """The body as XML, names without namespace."""
        root = ElementTree.fromstring(self.body)
        for element in root.iter():
            element.tag = element.tag.rpartition("}")[2]
        return root

    def texts(self, path: str) -> list[str]:
        return [element.text or "" for element in self.document.findall(path)]

    def text(self, path: str) -> str:
        found = self.texts(path)
        assert found, f"no {path} in {self.body[:300]!r}"
        return found[0]

    @property
    def code(self) -> str:
        """The S3 error code in the body, empty without a body."""
        return self.text("Code") if self.body else ""

    def __str__(self) -> str:
        return f"{self.status} {dict(self.headers)} {self.body[:300]!r}"


class ClosedError(Exception):
    """The server closed the connection where an answer was due."""


class Wire:
    """One connection, driven by hand. `endpoint` is http://HOST:PORT. A header that comes twice is a fault, but where
    the server is not ours (`strict` is False)."""

    def __init__(self, endpoint: str, identity: Identity, timeout_s: float = TIMEOUT_S, strict: bool = True) -> None:
        self._strict = strict
        self.authority = urlsplit(endpoint).netloc
        self.identity = identity
        host, _, port = self.authority.partition(":")
        self.socket = socket.create_connection((host, int(port)), timeout_s)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._buffer = bytearray()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    # -- out
    def begin(self, ask: Ask) -> Sealed:
        """Send a request's head only."""
        sealed = seal(ask, self.authority, self.identity)
        self.socket.sendall(sealed.head)
        return sealed

    def send(self, ask: Ask) -> Sealed:
        """Send a request, not waiting for its answer."""
        sealed = seal(ask, self.authority, self.identity)
        self.socket.sendall(sealed.head + ask.body)
        return sealed

    def ask(self, ask: Ask) -> Reply:
        """Send a request and read its answer."""
        self.send(ask)
        return self.reply(ask.method)

    def pour(self, data: bytes) -> bool:
        """Send a body to a server that may have stopped listening; whether all of it went out."""
        try:
            self.socket.sendall(data)
        except (BrokenPipeError, ConnectionResetError):
            return False
        return True

    def finish(self) -> None:
        """Say that nothing more will be sent."""
        with suppress(OSError):
            self.socket.shutdown(socket.SHUT_WR)

    def reset(self) -> None:
        """End the connection with a reset, as a killed process does."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.socket.close()

    # -- in
    def reply(self, method: str = "GET") -> Reply:
        """Read one answer.

        Raises:
            ClosedError: the connection ended first.
        """
        interim: list[int] = []
        while True:
            line = self._line()
            assert line.startswith(b"HTTP/"), f"no status line: {line[:80]!r}"
            status, headers = int(line.split()[1]), self._headers()
            if status >= 200:
                break
            interim.append(status)
        says = headers.get("connection", "").lower()
        closes = says == "close" or (line.startswith((b"HTTP/1.0", b"HTTP/0.9")) and says != "keep-alive")
        body = b"" if method == "HEAD" or status in (204, 304) else self._body(headers, closes)
        return Reply(status, headers, body, tuple(interim), closes)

    def _body(self, headers: Mapping[str, str], closes: bool) -> bytes:
        if headers.get("transfer-encoding", "").lower() == "chunked":
            pieces = []
            while size := int(self._line().partition(b";")[0], 16):
                pieces.append(self._take(size))
                assert self._line() == b""
            self._headers()
            return b"".join(pieces)
        if "content-length" in headers:
            return self._take(int(headers["content-length"]))
        assert closes, "a body without length on a connection that stays open"
        return self.rest()

    def rest(self) -> bytes:
        """Everything until the server closes the connection (a reset counts as that)."""
        while True:
            try:
                self._fill()
            except (ClosedError, ConnectionResetError):
                found = bytes(self._buffer)
                self._buffer.clear()
                return found

    def is_silent(self, wait_s: float = 0.05) -> bool:
        """Whether the server sends nothing beyond the answers read so far."""
        if self._buffer:
            return False
        self.socket.settimeout(wait_s)
        try:
            self._fill()
        except TimeoutError:
            return True
        except ClosedError:
            return True
        finally:
            self.socket.settimeout(TIMEOUT_S)
        return False

    def _fill(self) -> None:
        data = self.socket.recv(1 << 18)
        if not data:
            raise ClosedError("the server closed the connection")
        self._buffer += data

    def _line(self) -> bytes:
        while (end := self._buffer.find(b"\r\n")) < 0:
            self._fill()
        line = bytes(self._buffer[:end])
        del self._buffer[: end + 2]
        return line

    def _take(self, size_bytes: int) -> bytes:
        while len(self._buffer) < size_bytes:
            self._fill()
        taken = bytes(self._buffer[:size_bytes])
        del self._buffer[:size_bytes]
        return taken

    def _headers(self) -> dict[str, str]:
        found: dict[str, str] = {}
        while line := self._line():
            name, _, value = line.decode("latin-1").partition(":")
            assert not self._strict or name.lower() not in found, f"{name} comes twice"
            found[name.lower()] = value.strip()
        return found


class Server(Protocol):
    """Whatever answers; its URL may change when it is started again."""

    endpoint: str


class Bucket:
    """Short words for a bucket's operations, each on a connection of its own."""

    def __init__(self, server: Server, identity: Identity, name: str) -> None:
        self.server, self.identity, self.name = server, identity, name

    def named(self, name: str) -> "Bucket":
        """Another bucket of the same server."""
        return Bucket(self.server, self.identity, name)

    @contextmanager
    def wire(self, timeout_s: float = TIMEOUT_S) -> Iterator[Wire]:
        with Wire(self.server.endpoint, self.identity, timeout_s) as wire:
            yield wire

    def path(self, key: str) -> str:
        return f"/{self.name}/{quote(key.encode(), safe='-_.~/')}"

    def ask(self, ask: Ask) -> Reply:
        with self.wire() as wire:
            return wire.ask(ask)

    def call(
        self,
        method: str,
        key: str = "",
        body: bytes = b"",
        headers: Mapping[str, str | bytes] | None = None,
        /,
        **query: str,
    ) -> Reply:
        path = self.path(key) if key else f"/{self.name}"
        return self.ask(Ask(method, path, query_of(**query), headers or {}, body))

    def put(self, key: str, body: bytes = b"", headers: Mapping[str, str | bytes] | None = None) -> Reply:
        reply = self.call("PUT", key, body, headers)
        assert reply.status == 200, f"PUT {key!r}: {reply}"
        return reply

    def get(self, key: str, headers: Mapping[str, str | bytes] | None = None, /, **query: str) -> Reply:
        return self.call("GET", key, b"", headers, **query)

    def head(self, key: str, headers: Mapping[str, str | bytes] | None = None, /, **query: str) -> Reply:
        return self.call("HEAD", key, b"", headers, **query)

    def delete(self, key: str) -> Reply:
        reply = self.call("DELETE", key)
        assert reply.status == 204, f"DELETE {key!r}: {reply}"
        return reply

    def page(self, prefix: str = "", /, **query: str) -> Reply:
        reply = self.call("GET", **({"list-type": "2", "prefix": prefix} | query))
        assert reply.status == 200, f"list {prefix!r}: {reply}"
        return reply

    def keys(self, prefix: str = "") -> list[str]:
        return self.page(prefix).texts("Contents/Key")

    def folders(self, prefix: str = "") -> list[str]:
        return self.page(prefix, delimiter="/").texts("CommonPrefixes/Prefix")

    def create_upload(self, key: str, headers: Mapping[str, str | bytes] | None = None) -> str:
        reply = self.call("POST", key, b"", headers, uploads="")
        assert reply.status == 200, str(reply)
        return reply.text("UploadId")

    def part(self, key: str, upload_id: str, number: int, body: bytes) -> str:
        reply = self.call("PUT", key, body, partNumber=str(number), uploadId=upload_id)
        assert reply.status == 200, str(reply)
        return reply.etag

    def complete(
        self,
        key: str,
        upload_id: str,
        parts: Sequence[tuple[int, str]],
        headers: Mapping[str, str | bytes] | None = None,
    ) -> Reply:
        return self.call("POST", key, part_list(parts), headers, uploadId=upload_id)

    def multipart(self, key: str, bodies: Sequence[bytes]) -> str:
        """Upload an object in parts; returns its ETag."""
        upload_id = self.create_upload(key)
        parts = [(number, self.part(key, upload_id, number, body)) for number, body in enumerate(bodies, 1)]
        reply = self.complete(key, upload_id, parts)
        assert reply.status == 200, str(reply)
        return reply.text("ETag")


def query_of(**parameters: str) -> str:
    """A query string in canonical order."""
    return "&".join(sorted(f"{name}={quote(value, safe='-_.~')}" for name, value in parameters.items()))


def part_list(parts: Sequence[tuple[int | str, str]]) -> bytes:
    """The document of a CompleteMultipartUpload."""
    items = "".join(f"<Part><PartNumber>{number}</PartNumber><ETag>{etag}</ETag></Part>" for number, etag in parts)
    return f"<CompleteMultipartUpload>{items}</CompleteMultipartUpload>".encode()


def crc32_of(data: bytes) -> str:
    return base64.b64encode(zlib.crc32(data).to_bytes(4, "big")).decode()


def md5_of(data: bytes) -> str:
    return base64.b64encode(hashlib.md5(data).digest()).decode()


def framed(chunks: Sequence[bytes], trailers: Mapping[str, str] | None = None) -> bytes:
    """A body in unsigned aws-chunked framing."""
    pieces = [b"%x\r\n%b\r\n" % (len(chunk), chunk) for chunk in chunks]
    ends = "".join(f"{name}:{value}\r\n" for name, value in (trailers or {}).items())
    return b"".join(pieces) + b"0\r\n" + ends.encode() + b"\r\n"


def framed_signed(sealed: Sealed, chunks: Sequence[bytes], trailers: Mapping[str, str] | None = None) -> bytes:
    """A body in signed aws-chunked framing, for the request whose head is `sealed`."""
    previous, pieces = sealed.signature, []
    for chunk in (*chunks, b""):
        hashed = hashlib.sha256(chunk).hexdigest()
        previous = sealed.sign_more(
            "AWS4-HMAC-SHA256-PAYLOAD", sealed.timestamp, sealed.scope, previous, EMPTY_SHA256, hashed
        )
        head = f"{len(chunk):x};chunk-signature={previous}\r\n".encode()
        pieces.append(head + (chunk + b"\r\n" if chunk else b""))
    if trailers:
        lines = "".join(f"{name}:{value}\n" for name, value in trailers.items())
        hashed = hashlib.sha256(lines.encode()).hexdigest()
        last = sealed.sign_more("AWS4-HMAC-SHA256-TRAILER", sealed.timestamp, sealed.scope, previous, hashed)
        pieces.append(lines.replace("\n", "\r\n").encode() + f"x-amz-trailer-signature:{last}\r\n".encode())
    return b"".join(pieces) + b"\r\n"


def http_chunked(body: bytes, size_bytes: int = 7001) -> bytes:
    """A body in HTTP's own chunked transfer coding."""
    pieces = [body[start : start + size_bytes] for start in range(0, len(body), size_bytes)]
    return b"".join(b"%X\r\n%b\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n\r\n"


def with_late(ask: Ask, *pairs: tuple[str, str | bytes]) -> Ask:
    """The request with further headers that no signature covers."""
    return replace(ask, late=(*ask.late, *pairs))
