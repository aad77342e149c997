"""Checks a request's body against everything the request claims of it.

https://docs.aws.amazon.com/AmazonS3/latest/userguide/checking-object-integrity-upload.html
"""

from collections.abc import Collection, Iterable, Mapping

from tiergate.errors import RequestError, invariant
from tiergate.s3.checksums import ALGORITHMS, HEADER_PREFIX, Buffer, Checksum, decode_value
from tiergate.s3.chunked import MALFORMED_TRAILER

# Headers that share the prefix but hold no checksum.
_NO_VALUES = frozenset((f"{HEADER_PREFIX}algorithm", f"{HEADER_PREFIX}type", f"{HEADER_PREFIX}mode"))
_SDK_ALGORITHM = "x-amz-sdk-checksum-algorithm"
_SHA256_HEX_DIGITS = 64


def unknown_algorithms(headers: Iterable[tuple[str, str]]) -> set[str]:
    """Names of checksum algorithms in a request's headers that we cannot compute (lower case).

    A newer client may know more than we do: the caller forwards such a request instead of refusing it.
    """
    named: set[str] = set()
    for name, value in headers:
        lowered = name.lower()
        if lowered.startswith(HEADER_PREFIX) and lowered not in _NO_VALUES:
            named.add(lowered.removeprefix(HEADER_PREFIX))
        elif lowered == "x-amz-trailer":
            named.update(trailer.removeprefix(HEADER_PREFIX) for trailer in _checksum_trailers([value]))
        elif lowered in (_SDK_ALGORITHM, f"{HEADER_PREFIX}algorithm"):
            named.add(value.strip().lower())
    return named - set(ALGORITHMS)


def claimed_algorithm(headers: Mapping[str, str]) -> str:
    """The known algorithm of the checksum that a request brings, in a header or after its body; "" for none. Names of
    `headers` are in lower case."""
    trailers = _checksum_trailers([headers.get("x-amz-trailer", "")])
    return next((name for name in ALGORITHMS if HEADER_PREFIX + name in (*headers, *trailers)), "")


class BodyVerifier:
    """Computes what must be computed of one body and compares it with the request's claims.

    `headers` are the request's headers, `payload` its payload mode (`Verified.payload`). `also` names
    algorithms to compute besides (say `md5` for an exact ETag). `object_checksums=False` for requests whose
    x-amz-checksum- headers describe an object and not their own body (CompleteMultipartUpload).

    Every byte goes through `update_cheap` and, when `expensive` is true, through `update_expensive` too,
    which may run in a thread at the same time; each of the two takes the bytes in order. `finish` comes last.

    Raises:
        RequestError: InvalidDigest for a malformed Content-MD5; InvalidRequest for a malformed checksum,
        several of
            them, an unknown algorithm, or a checksum both in the headers and the trailer;
            MalformedTrailerError for a trailer that was announced for a body without one.
    """

    def __init__(
        self,
        headers: Iterable[tuple[str, str]],
        payload: str,
        *,
        also: Collection[str] = (),
        object_checksums: bool = True,
    ) -> None:
        given: dict[str, list[str]] = {}
        for name, value in headers:
            given.setdefault(name.lower(), []).append(value.strip())
        self._md5 = _read_content_md5(given)
        self._sha256 = payload.lower() if len(payload) == _SHA256_HEX_DIGITS else None
        self._claimed: tuple[str, bytes] | None = None
        self.trailer: str | None = None
        """The name of the checksum trailer that was announced, or None."""
        if object_checksums:
            self._claimed = _read_checksum_header(given)
            self.trailer = _read_trailer(given, payload, self._claimed is not None)
            _check_sdk_algorithm(given, self.algorithm)
        self._also = set(also)
        needed = set(also)
        needed.update({self.algorithm} if self.algorithm else ())
        needed.update({"md5"} if self._md5 else ())
        needed.update({"sha256"} if self._sha256 else ())
        checksums = {name: Checksum(name) for name in needed}
        self._cheap = {name: one for name, one in checksums.items() if one.algorithm.cheap}
        self._expensive = {name: one for name, one in checksums.items() if not one.algorithm.cheap}
        self._cheap_bytes = 0
        self._expensive_bytes = 0

    @property
    def algorithm(self) -> str:
        """The algorithm the client chose for the object (lower case), or empty."""
        if self._claimed:
            return self._claimed[0]
        return self.trailer.removeprefix(HEADER_PREFIX) if self.trailer else ""

    @property
    def expensive(self) -> bool:
        """Whether there is something to compute that is slower than moving the bytes."""
        return bool(self._expensive)

    def update(self, data: Buffer) -> None:
        """Both updates at once, for small bodies."""
        self.update_cheap(data)
        if self._expensive:
            self.update_expensive(data)

    def update_cheap(self, data: Buffer) -> None:
        """Take the next bytes into the fast checksums; for the event loop."""
        self._cheap_bytes += memoryview(data).nbytes
        for checksum in self._cheap.values():
            checksum.update(data)

    def update_expensive(self, data: Buffer) -> None:
        """Take the next bytes into the slow hashes; for a thread (the hashes let other threads run)."""
        self._expensive_bytes += memoryview(data).nbytes
        for checksum in self._expensive.values():
            checksum.update(data)

    def finish(self, trailers: Mapping[str, str] | None = None) -> dict[str, str]:
        """Compare, and return what was proved: algorithm to base64 value, for what the client claimed or
        `also` asked for. `trailers` are those of the body, names in lower case.

        Raises:
            RequestError: BadDigest, XAmzContentSHA256Mismatch, InvalidRequest, MalformedTrailerError.
            InvariantError: when the two updates did not see the same bytes.
        """
        invariant(
            not self._expensive or self._cheap_bytes == self._expensive_bytes,
            "the fast and the slow checksums saw different bodies",
            cheap_bytes=self._cheap_bytes,
            expensive_bytes=self._expensive_bytes,
        )
        computed = {**self._cheap, **self._expensive}
        if self._sha256 and computed["sha256"].digest().hex() != self._sha256:
            raise RequestError(
                "XAmzContentSHA256Mismatch",
                "The provided 'x-amz-content-sha256' header does not match what was computed.",
                client_computed=self._sha256,
                s3_computed=computed["sha256"].digest().hex(),
            )
        if self._md5 and computed["md5"].digest() != self._md5:
            raise RequestError("BadDigest", "The Content-MD5 you specified did not match what we received.")
        claimed = self._claimed or self._read_trailer_value(trailers or {})
        if claimed and computed[claimed[0]].digest() != claimed[1]:
            name = claimed[0].upper()
            raise RequestError(
                "BadDigest",
                f"The {name} you specified did not match the calculated checksum.",
                algorithm=name,
            )
        proven = self._also | ({self.algorithm} if self.algorithm else set())
        return {name: computed[name].digest_base64() for name in sorted(proven)}

    def digest(self, algorithm: str) -> bytes:
        """The raw digest of what was seen so far, of an algorithm that was claimed or asked for."""
        return (self._cheap.get(algorithm) or self._expensive[algorithm]).digest()

    def _read_trailer_value(self, trailers: Mapping[str, str]) -> tuple[str, bytes] | None:
        if self.trailer is None:
            return None
        if self.trailer not in trailers:
            raise _malformed_trailer(self.trailer)
        digest = decode_value(self.algorithm, trailers[self.trailer])
        if digest is None:
            raise RequestError("InvalidRequest", f"Value for {self.trailer} trailing header is invalid.")
        return self.algorithm, digest


def _read_content_md5(given: Mapping[str, list[str]]) -> bytes | None:
    values = given.get("content-md5")
    if values is None:
        return None
    digest = decode_value("md5", values[0]) if len(values) == 1 else None
    if digest is None:
        raise RequestError("InvalidDigest", "The Content-MD5 you specified was invalid.")
    return digest


def _read_checksum_header(given: Mapping[str, list[str]]) -> tuple[str, bytes] | None:
    names = [name for name in given if name.startswith(HEADER_PREFIX) and name not in _NO_VALUES]
    if not names:
        return None
    if len(names) > 1 or len(given[names[0]]) > 1:
        message = "Expecting a single x-amz-checksum- header. Multiple checksum Types are not allowed."
        raise RequestError("InvalidRequest", message)
    name = names[0]
    algorithm = name.removeprefix(HEADER_PREFIX)
    if algorithm not in ALGORITHMS:
        message = "The algorithm type you specified in x-amz-checksum- header is invalid."
        raise RequestError("InvalidRequest", message, header=name)
    digest = decode_value(algorithm, given[name][0])
    if digest is None:
        raise RequestError("InvalidRequest", f"Value for {name} header is invalid.")
    return algorithm, digest


def _checksum_trailers(values: Iterable[str]) -> list[str]:
    names = (name.strip().lower() for value in values for name in value.split(","))
    return [name for name in names if name.startswith(HEADER_PREFIX)]


def _read_trailer(given: Mapping[str, list[str]], payload: str, has_header: bool) -> str | None:
    names = _checksum_trailers(given.get("x-amz-trailer", []))
    if not names:
        return None
    if has_header or len(names) > 1:
        raise RequestError("InvalidRequest", "Expecting a single x-amz-checksum- header")
    if names[0].removeprefix(HEADER_PREFIX) not in ALGORITHMS:
        raise RequestError("InvalidRequest", "The value specified in the x-amz-trailer header is not supported")
    if not payload.endswith("-TRAILER"):
        raise _malformed_trailer(names[0])
    return names[0]


def _check_sdk_algorithm(given: Mapping[str, list[str]], algorithm: str) -> None:
    for value in given.get(_SDK_ALGORITHM, []):
        if value.lower() not in ALGORITHMS:
            types = ", ".join(name.upper() for name in ALGORITHMS)
            raise RequestError(
                "InvalidRequest",
                f"Checksum algorithm provided is unsupported. Please try again with any of the valid types: [{types}]",
            )
        if not algorithm:
            raise RequestError(
                "InvalidRequest",
                "x-amz-sdk-checksum-algorithm specified, but no corresponding x-amz-checksum-* "
                "or x-amz-trailer headers were found.",
            )
        if value.lower() != algorithm:
            raise RequestError("InvalidRequest", "Value for x-amz-sdk-checksum-algorithm header is invalid.")


def _malformed_trailer(name: str) -> RequestError:
    return RequestError("MalformedTrailerError", MALFORMED_TRAILER, trailer=name)
