"""One tree of errors, by who must act. Foreign exceptions are translated at the edge that meets them.

`tiergate.s3.errors` renders these as S3 XML through one table; nobody decides by message text.
"""

from enum import StrEnum


class Retry(StrEnum):
    """What a caller may do after the error."""

    NEVER = "never"
    LATER = "later"
    ELSEWHERE = "elsewhere"


class TiergateError(Exception):
    """Base of all. `context` holds facts for the log (bucket, key, attempt, ...); never a secret."""

    retry = Retry.NEVER

    def __init__(self, message: str = "", **context: object) -> None:
        super().__init__(message)
        self.message = message
        self.context = context

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild, (type(self), self.args, self.__dict__.copy()))


def install_hint(extra: str) -> str:
    """What to do where packages of an extra are missing."""
    return f"install tiergate with its extra `{extra}`"


def _rebuild(kind: type[TiergateError], args: tuple[object, ...], state: dict[str, object]) -> TiergateError:
    error = kind.__new__(kind)
    error.args = args
    error.__dict__.update(state)
    return error


class RequestError(TiergateError):
    """The client must change its request. `code` is S3's own error code."""

    def __init__(self, code: str, message: str = "", **context: object) -> None:
        super().__init__(message or code, **context)
        self.code = code


class NotFoundError(RequestError):
    """Something named in the request does not exist (NoSuchKey, NoSuchBucket, NoSuchUpload)."""


class PreconditionError(RequestError):
    """A condition of the request does not hold (PreconditionFailed, NotModified,
    ConditionalRequestConflict)."""


class OverloadedError(TiergateError):
    """No room or no time now; the client should come back after `retry_after_s`."""

    retry = Retry.LATER

    def __init__(self, message: str, retry_after_s: int = 1, **context: object) -> None:
        super().__init__(message, **context)
        self.retry_after_s = retry_after_s


class MemoryFullError(OverloadedError):
    """The memory budget is used up by bytes that may not be evicted."""


class DirectoryUnavailableError(OverloadedError):
    """The cluster's directory does not answer, or nobody leads it. Nothing was changed."""


class OutcomeUnknownError(DirectoryUnavailableError):
    """A change was sent to the cluster's directory and no answer came in time: it may have happened, or may yet. What
    it names must be kept until the directory can be asked."""


class CompactedError(TiergateError):
    """The directory no longer keeps the history asked for: read anew, then go on from there."""

    retry = Retry.LATER


class ForeignDirectoryError(OverloadedError):
    """Another directory answers than the one that was joined: etcd was replaced, emptied, or went back to an earlier
    state. It cannot be believed until this node has told it what it holds."""


class OriginError(TiergateError):
    """The origin could not or would not do it."""


class OriginTemporaryError(OriginError):
    """A fault that may pass: connection trouble, a timeout, 500, 503, a short answer."""

    retry = Retry.LATER


class OriginExhaustedError(OriginError):
    """A temporary fault that outlasted all tries; nobody retries a retry."""

    retry = Retry.LATER


class OriginRefusedError(OriginError):
    """The origin said no, and will again. Carries its answer: `status`, `code`, `body` and `headers`."""

    def __init__(
        self,
        status: int,
        code: str,
        message: str = "",
        body: bytes = b"",
        headers: dict[str, str] | None = None,
        **context: object,
    ) -> None:
        super().__init__(message or f"{status} {code}", **context)
        self.status = status
        self.code = code
        self.body = body
        self.headers = headers or {}


class OriginCredentialsError(OriginRefusedError):
    """The origin does not take our credentials, or there are none. A rotation or an operator mends it, so
    whoever would give up after a refusal tries again later instead."""

    retry = Retry.LATER

    @property
    def fault(self) -> str:
        """What is wrong with them, for whoever can mend it."""
        return f"the origin refuses this node's own credentials ({self.code})"


class NoCredentialsError(OriginCredentialsError):
    """There are none, or their source does not answer: the origin was not asked."""

    @property
    def fault(self) -> str:
        return "this node has no credentials for the origin"


class IntegrityError(TiergateError):
    """Bytes do not match what was proved at ingest. The copy is dropped, never served."""


class ConflictError(TiergateError):
    """A directory guard failed: the record was changed since it was read. Re-read and decide again."""


class NotParkableError(ConflictError):
    """What policy would keep in memory stands on something that the origin has, or is owed."""


class PlanOverError(ConflictError):
    """What was decided for a set does not hold for this write: decide anew."""


class PartsChangedError(ConflictError):
    """A part of an upload was replaced or moved since the parts were read that are to become its version."""


class FencedError(TiergateError):
    """Ownership was lost: somebody newer owns this write."""


class HolderLostError(TiergateError):
    """A node that was to hold a copy is gone, or began anew: find another, then commit again."""

    retry = Retry.ELSEWHERE


class PeerError(TiergateError):
    """Another node does not answer, does not have what it was asked for, or has no room for it: ask another."""

    retry = Retry.ELSEWHERE


class TooFewCopiesError(OverloadedError):
    """Not enough other nodes could take a copy. Nothing was acknowledged."""


class MembershipOverError(OverloadedError):
    """This node is not a member of its cluster now: it lost its lease, and joins anew."""


class ConfigError(TiergateError):
    """The configuration is wrong; one line a fault."""

    @property
    def faults(self) -> list[str]:
        """Each fault, with where it comes from."""
        return self.message.splitlines()


class InvariantError(TiergateError):
    """A bug of ours. The request fails, the evidence is kept."""


def invariant(condition: bool, why: str, **context: object) -> None:
    """Check what must hold; survives `python -O`.

    Raises:
        InvariantError: when `condition` is false.
    """
    if not condition:
        raise InvariantError(why, **context)
