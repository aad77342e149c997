"""What the clients of a test did to the keys of a bucket, and saw of them: for all judges of it. Usable from any
thread."""

import hashlib
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable
from math import inf
from typing import Any

from botocore.exceptions import BotoCoreError, ClientError

from tiergate.clock import Clock, SystemClock
from tiergate.testing.completeness import UNTOLD, Write
from tiergate.testing.histories import Did, Done, Value
from tiergate.testing.objects import ACK_HEADER

Failure = BotoCoreError | ClientError


def value_of(body: bytes) -> Value:
    """How a body is known."""
    return Value(hashlib.sha256(body).hexdigest(), len(body))


def status_of(error: Failure) -> int:
    """The status that a call ended with; 0 if there was no answer."""
    if isinstance(error, ClientError):
        status: int = error.response["ResponseMetadata"]["HTTPStatusCode"]
        return status
    return 0


def is_refusal(error: Failure) -> bool:
    """Whether a call surely did nothing: it was answered so."""
    return 0 < status_of(error) < 500


def _repeats(error: Failure) -> int:
    if not isinstance(error, ClientError):
        return 0
    count: int = error.response["ResponseMetadata"].get("RetryAttempts", 0)
    return count


class Journal:
    """See the module. `tries_count`: how often its clients try a request."""

    def __init__(self, clock: Clock | None = None, tries_count: int = 1) -> None:
        self._clock = clock or SystemClock()
        self._tries_count = tries_count
        self._lock = threading.Lock()
        self._done: dict[str, list[Done]] = defaultdict(list)
        self._writes: list[Write] = []
        self._etags: dict[tuple[str, str], set[str]] = defaultdict(set)
        self._rules: list[str] = []
        self._failures: list[str] = []

    # -- noting
    def now_s(self) -> float:
        """A moment, to be given to `saw`."""
        return self._clock.monotonic_s()

    def write(self, key: str, body: Value | None, call: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Carry out a write (None: a deletion) and note it. Each try without an answer may have happened.

        Raises:
            ClientError, BotoCoreError: what the call raised; it is in `failures`, unless it was a refusal.
        """
        from_s = self.now_s()
        try:
            answer = call()
        except (BotoCoreError, ClientError) as error:
            if is_refusal(error):
                # Of the last try only: those before it had no answer.
                self._uncertain(key, body, from_s, _repeats(error))
            else:
                self._uncertain(key, body, from_s, self._tries_count)
                with self._lock:
                    self._failures.append(f"{self.now_s():.3f} write of {key}: {error}")
            raise
        until_s = self.now_s()
        said = answer["ResponseMetadata"]
        self._uncertain(key, body, from_s, said.get("RetryAttempts", 0))
        with self._lock:
            etag = answer["ETag"].strip('"') if body is not None else ""
            self._done[key].append(Done(Did.WROTE, body, from_s, until_s))
            self._writes.append(Write(key, etag, from_s, until_s))
            if body is not None:
                self._etags[key, body.digest].add(etag)
            if ACK_HEADER in said["HTTPHeaders"]:
                self._rules.append(said["HTTPHeaders"][ACK_HEADER])
        return answer

    def _uncertain(self, key: str, body: Value | None, from_s: float, count: int) -> None:
        with self._lock:
            self._done[key] += [Done(Did.WROTE, body, from_s, inf)] * count
            self._writes += [Write(key, UNTOLD if body else "", from_s, inf)] * count

    def saw(self, key: str, did: Did, value: Value | None, from_s: float) -> None:
        """Note what a request, begun at `from_s` and answered now, showed of a key."""
        done = Done(did, value, from_s, self.now_s())
        with self._lock:
            self._done[key].append(done)

    def failed(self, what: str) -> None:
        """Note that a client was not served."""
        with self._lock:
            self._failures.append(f"{self.now_s():.3f} {what}")

    # -- asking
    @property
    def keys(self) -> list[str]:
        """All keys that anybody touched."""
        with self._lock:
            return sorted(self._done)

    def history(self, key: str) -> list[Done]:
        """All that was done to, or seen of, a key."""
        with self._lock:
            return list(self._done[key])

    def writes(self, but: Iterable[str] = ()) -> list[Write]:
        """All writes as the judge of markers takes them."""
        left_out = set(but)
        with self._lock:
            return [each for each in self._writes if each.key not in left_out]

    def etags(self, key: str, value: Value) -> set[str]:
        """What a value of a key was acknowledged with; empty if no answer told."""
        with self._lock:
            return set(self._etags[key, value.digest])

    @property
    def rules(self) -> list[str]:
        """The acknowledgement rules that the answers named, in their order."""
        with self._lock:
            return list(self._rules)

    @property
    def failures(self) -> list[str]:
        """The requests that ended without a good answer, in words."""
        with self._lock:
            return list(self._failures)
