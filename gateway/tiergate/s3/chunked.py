"""The aws-chunked body encoding, without I/O.

https://docs.aws.amazon.com/AmazonS3/latest/API/sigv4-streaming.html
https://docs.aws.amazon.com/AmazonS3/latest/API/sigv4-streaming-trailers.html
"""

import hashlib
import hmac
import re
from collections.abc import Mapping, Sequence
from enum import Enum, auto

from tiergate.errors import RequestError, invariant
from tiergate.s3.canonical import ChunkSigner

MAX_LINE_BYTES = 1024
"""Longest chunk header or trailer line; S3's own are below 200."""

MAX_TRAILERS = 16
MAX_CHUNK_BYTES = 5 << 30
"""No body of one request is larger. https://docs.aws.amazon.com/AmazonS3/latest/userguide/qfacts.html"""

MIN_CHUNK_BYTES = 8192
"""S3 refuses a smaller chunk unless it is the last one with data."""

MALFORMED_TRAILER = (
    "The request contained trailing data that was not well-formed or did not conform to our published schema."
)
CRLF = b"\r\n"
TRAILER_SIGNATURE = "x-amz-trailer-signature"

_CHUNK = re.compile(rb"([0-9A-Fa-f]{1,16})[ \t]*(?:;(.*))?", re.DOTALL)
_CHUNK_SIGNATURE = re.compile(rb"chunk-signature=([0-9a-f]{64})")
_TRAILER = re.compile(rb"([!#$%&'*+.^_`|~0-9A-Za-z-]+):([^\r\n]*)")

Buffer = bytes | bytearray | memoryview


def is_chunked(payload: str) -> bool:
    """Whether a body is framed; x-amz-content-sha256 alone says so (Content-Encoding may be missing)."""
    return payload.startswith("STREAMING-")


def strip_aws_chunked(content_encoding: str) -> str | None:
    """The Content-Encoding to store: without `aws-chunked`. None when nothing is left."""
    encodings = (encoding.strip() for encoding in content_encoding.split(","))
    kept = [encoding for encoding in encodings if encoding and encoding.lower() != "aws-chunked"]
    return ", ".join(kept) if kept else None


class _Expect(Enum):
    HEADER = auto()
    DATA = auto()
    DATA_END = auto()
    TRAILER = auto()
    END = auto()


class ChunkedDecoder:
    """Takes the framing off a body as it arrives, in pieces of any size.

    `decoded_length` is x-amz-decoded-content-length (None: not checked). `signer` checks chunk signatures;
    None for the unsigned mode, and for signed framing when nobody checks signatures. `trailer_names` are the
    headers announced by x-amz-trailer. `min_chunk_bytes` is S3's smallest chunk that may have another one
    after it.

    Data is handed on before the signature of its chunk is known, so nothing may be made visible before
    `finish` returned. After an error every further call raises it again.
    """

    def __init__(
        self,
        decoded_length: int | None,
        signer: ChunkSigner | None,
        trailer_names: Sequence[str] = (),
        *,
        min_chunk_bytes: int = MIN_CHUNK_BYTES,
    ) -> None:
        self.trailers: dict[str, str] = {}
        """The trailers received, names in lower case, without the signature; complete after `finish`."""
        self.decoded_bytes = 0
        self._length = decoded_length
        self._signer = signer
        self._announced = {name.strip().lower() for name in trailer_names if name.strip()}
        if len(self._announced) > MAX_TRAILERS:
            raise _malformed_trailer("too many trailers")
        self._min_chunk_bytes = min_chunk_bytes
        self._expect = _Expect.HEADER
        self._line = bytearray()
        self._left_bytes = 0
        self._chunk_bytes: int | None = None
        self._hash = hashlib.sha256()
        self._signature = ""
        self._previous = signer.seed if signer else ""
        self._trailer_lines: list[bytes] = []
        self._trailer_signature: str | None = None
        self._blank_before_trailers = False
        self._trailers_closed = False
        self._error: RequestError | None = None

    def feed(self, data: Buffer) -> list[memoryview]:
        """Take the next bytes of the body, return the payload in them: slices of `data`, which must stay
        unchanged as long as they are used. In signed mode this hashes all data (SHA-256), so call it off the
        event loop.

        Raises:
            RequestError: IncompleteBody, InvalidChunkSizeError, MalformedTrailerError, SignatureDoesNotMatch.
        """
        if self._error:
            raise self._error
        view = memoryview(data)
        pieces: list[memoryview] = []
        position = 0
        try:
            while position < len(view):
                if self._expect is _Expect.DATA:
                    position = self._take_data(view, position, pieces)
                else:
                    position = self._take_line(view, position)
        except RequestError as error:
            self._error = error
            raise
        return pieces

    def finish(self) -> None:
        """The body has ended: check that it was whole, that every signature was right and every trailer came.

        Raises:
            RequestError: as `feed`.
        """
        if self._error:
            raise self._error
        try:
            self._check_end()
        except RequestError as error:
            self._error = error
            raise

    def _check_end(self) -> None:
        if self._expect not in (_Expect.TRAILER, _Expect.END) or self._line:
            raise _incomplete("the body ended inside a chunk or a line")
        if self._length is not None and self.decoded_bytes != self._length:
            raise _incomplete("x-amz-decoded-content-length does not match")
        missing = self._announced - set(self.trailers)
        if missing:
            raise _malformed_trailer("an announced trailer is missing", missing=sorted(missing))
        if self._signer and (self._announced or self._trailer_signature is not None):
            self._check_trailer_signature(self._signer)

    def _take_data(self, view: memoryview, position: int, pieces: list[memoryview]) -> int:
        end = min(len(view), position + self._left_bytes)
        piece = view[position:end]
        if self._signer:
            self._hash.update(piece)
        pieces.append(piece)
        self._left_bytes -= len(piece)
        self.decoded_bytes += len(piece)
        if not self._left_bytes:
            self._expect = _Expect.DATA_END
        return end

    def _take_line(self, view: memoryview, position: int) -> int:
        known = len(self._line)
        end = min(len(view), position + MAX_LINE_BYTES + len(CRLF) - known)
        self._line += view[position:end]
        found = self._line.find(CRLF, max(known - 1, 0))
        if found < 0:
            if self._expect is _Expect.DATA_END and self._line != CRLF[: len(self._line)]:
                raise _incomplete("a chunk is longer than its header says")
            if len(self._line) >= MAX_LINE_BYTES + len(CRLF):
                raise _incomplete("a line is too long")
            return end
        line = bytes(self._line[:found])
        self._line.clear()
        self._handle_line(line)
        return position + found + len(CRLF) - known

    def _handle_line(self, line: bytes) -> None:
        if self._expect is _Expect.HEADER:
            self._open_chunk(line)
        elif self._expect is _Expect.DATA_END:
            if line:
                raise _incomplete("a chunk is longer than its header says")
            self._close_chunk()
            self._expect = _Expect.HEADER
        elif self._expect is _Expect.TRAILER:
            self._take_trailer(line)
        else:
            # Some clients end the trailers and then the body, each with an empty line.
            if line or self._trailers_closed:
                raise _malformed_trailer("there is data after the end of the body")
            self._trailers_closed = True

    def _open_chunk(self, line: bytes) -> None:
        match = _CHUNK.fullmatch(line)
        if not match:
            raise _incomplete("a chunk header is malformed")
        size_bytes = int(match[1], 16)
        last = self._chunk_bytes
        if size_bytes and last is not None and last < self._min_chunk_bytes:
            message = f"Only the last chunk is allowed to have a size less than {self._min_chunk_bytes} bytes"
            raise RequestError("InvalidChunkSizeError", message, bad_chunk_size=last)
        if size_bytes > MAX_CHUNK_BYTES:
            raise RequestError("InvalidChunkSizeError", "The chunk is too large", bad_chunk_size=size_bytes)
        if self._length is not None and self.decoded_bytes + size_bytes > self._length:
            raise _incomplete("there is more data than x-amz-decoded-content-length says")
        if self._signer:
            signature = _CHUNK_SIGNATURE.fullmatch(match[2] or b"")
            if not signature:
                raise _bad_signature()
            self._signature = signature[1].decode()
        self._chunk_bytes = self._left_bytes = size_bytes
        if size_bytes:
            self._expect = _Expect.DATA
        else:
            self._close_chunk()
            self._expect = _Expect.TRAILER

    def _close_chunk(self) -> None:
        if not self._signer:
            return
        right = self._signer.chunk(self._previous, self._hash.hexdigest())
        if not hmac.compare_digest(right, self._signature):
            raise _bad_signature()
        self._previous = right
        self._hash = hashlib.sha256()

    def _take_trailer(self, line: bytes) -> None:
        if not line:
            # The last chunk is written with the empty line that ends its data by some clients, so an empty
            # line ends the trailers only when one was seen, or none is expected.
            if self._announced and not self._trailer_lines and not self._blank_before_trailers:
                self._blank_before_trailers = True
                return
            self._expect = _Expect.END
            return
        # One more form: minio-go ends each trailer with LF and the group with CRLF.
        for part in line.split(b"\n"):
            if part:
                self._keep_trailer(part)

    def _keep_trailer(self, line: bytes) -> None:
        match = _TRAILER.fullmatch(line)
        if not match:
            raise _malformed_trailer("a trailer is malformed")
        name, value = match[1].decode().lower(), match[2].strip().decode("utf-8", "surrogateescape")
        if name == TRAILER_SIGNATURE:
            if self._trailer_signature is not None:
                raise _malformed_trailer("the trailer signature is repeated")
            self._trailer_signature = value
            return
        if name not in self._announced:
            raise _malformed_trailer("a trailer was not announced", trailer=name)
        if name in self.trailers:
            raise _malformed_trailer("a trailer is repeated", trailer=name)
        self.trailers[name] = value
        self._trailer_lines.append(name.encode() + b":" + match[2].strip() + b"\n")

    def _check_trailer_signature(self, signer: ChunkSigner) -> None:
        given = (self._trailer_signature or "").encode("utf-8", "surrogateescape")
        matches = False
        for lines in (self._trailer_lines, sorted(self._trailer_lines)):  # SDKs differ; most send one
            right = signer.trailer(self._previous, b"".join(lines))
            matches |= hmac.compare_digest(right.encode(), given)
        if not matches:
            raise _bad_signature()


def encode_chunk(data: Buffer) -> tuple[bytes, Buffer, bytes]:
    """The pieces of one unsigned chunk, to write in order; `data` is not copied and must not be empty."""
    size_bytes = memoryview(data).nbytes
    invariant(size_bytes > 0, "an empty chunk would end the body")
    return b"%x\r\n" % size_bytes, data, CRLF


def encode_trailer(trailers: Mapping[str, str]) -> bytes:
    """What ends an unsigned body: the empty chunk and the trailers (STREAMING-UNSIGNED-PAYLOAD-TRAILER)."""
    lines = "".join(f"{name.lower()}:{value}\r\n" for name, value in trailers.items())
    return b"0\r\n" + lines.encode() + CRLF


def encoded_length(decoded_bytes: int, chunk_bytes: int, trailer_bytes: Mapping[str, int]) -> int:
    """The length of an unsigned body cut into chunks of `chunk_bytes` (the last may be shorter).

    `trailer_bytes` maps each trailer's name to the length of its value.
    """
    whole, rest = divmod(decoded_bytes, chunk_bytes)
    total = whole * _framed_bytes(chunk_bytes) + (_framed_bytes(rest) if rest else 0)
    trailers = sum(len(name) + 1 + value_bytes + len(CRLF) for name, value_bytes in trailer_bytes.items())
    return total + len(b"0\r\n") + trailers + len(CRLF)


def _framed_bytes(chunk_bytes: int) -> int:
    return len(f"{chunk_bytes:x}") + len(CRLF) + chunk_bytes + len(CRLF)


def _incomplete(why: str) -> RequestError:
    message = "The request body terminated unexpectedly"
    return RequestError("IncompleteBody", message, why=why)


def _malformed_trailer(why: str, **context: object) -> RequestError:
    return RequestError("MalformedTrailerError", MALFORMED_TRAILER, why=why, **context)


def _bad_signature() -> RequestError:
    message = (
        "The request signature we calculated does not match the signature you provided. "
        "Check your key and signing method."
    )
    return RequestError("SignatureDoesNotMatch", message)
