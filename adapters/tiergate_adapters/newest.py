"""Which checkpoint a restart takes: the newest whole one under a place, over memory, peers and S3, proved to load. All
ranks get the same, or the same error."""

from __future__ import annotations

import json
import logging
import sys
import time
from dataclasses import dataclass
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from boto3.session import Session
from botocore.exceptions import BotoCoreError, HTTPClientError
from botocore.exceptions import ConnectionError as BotoConnectionError

from tiergate.checkpoints.documents import status_from
from tiergate.checkpoints.newest import UnseenTierError
from tiergate.checkpoints.sets import SetStatus, Tier
from tiergate_adapters.place import Place
from tiergate_adapters.route import ORIGIN_VARIABLE, Route
from tiergate_adapters.wire import Endpoint

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence
    from typing import Self

    from torch.distributed import ProcessGroup

__all__ = ["Checkpoint", "NoCheckpointError", "PassedOver", "UnseenTierError", "newest"]

PATIENCE_S = 60.0
"""So long is asked again while nobody can say: a node or S3 may be on its way back."""

FIRST_PAUSE_S, LAST_PAUSE_S = 0.5, 5.0

LOOK_TIMEOUT_S = 600.0
"""So long a gateway may look at a checkpoint before it answers."""


log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PassedOver:
    """A checkpoint that would be newer, and why it was not taken."""

    uri: str
    step: int | None
    reason: str

    def __str__(self) -> str:
        return f"{self.uri}: {self.reason}"


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A whole checkpoint, to load from `uri`. `step` is None where no name tells it. `tiers`: those that have all of it
    by themselves; none if it takes several. `passed_over`: newer ones that are damaged."""

    uri: str
    step: int | None
    status: SetStatus
    tiers: tuple[Tier, ...]
    passed_over: tuple[PassedOver, ...] = ()

    @classmethod
    def of(cls, document: Mapping[str, Any], passed_over: Sequence[PassedOver] = ()) -> Self:
        """The checkpoint of a document of `tiergate.checkpoints.documents`.

        Raises:
            KeyError, ValueError: it is none.
        """
        status = status_from(document)
        tiers = tuple(tier for tier, each in status.tiers.items() if each.objects_count == status.objects_count > 0)
        return cls(document["uri"].rstrip("/"), status.step, status, tiers, tuple(passed_over))


class NoCheckpointError(FileNotFoundError):
    """There is no whole checkpoint under a place: every tier was looked into. `passed_over`: those that are there, but
    damaged."""

    def __init__(self, place: str, passed_over: Sequence[PassedOver] = ()) -> None:
        damaged = f"; damaged: {'; '.join(map(str, passed_over))}" if passed_over else ""
        super().__init__(f"no whole checkpoint is under {place}{damaged}")
        self.place = place
        self.passed_over = tuple(passed_over)

    def __reduce__(self) -> tuple[type[NoCheckpointError], tuple[str, tuple[PassedOver, ...]]]:
        return NoCheckpointError, (self.place, self.passed_over)


def newest(
    uri: str,
    *,
    process_group: ProcessGroup | None = None,
    trust: Collection[str] = (),
    decision: str = "",
    deep: bool = False,
    patience_s: float = PATIENCE_S,
) -> Checkpoint:
    """The newest whole checkpoint under `uri` (s3://BUCKET/RUN), proved to load: all its objects are there, as long as
    its own list says, with heads that a loader can read. Step 0 is a step like any other. One that is damaged is passed
    over, with a warning, and quarantined: so it is for every rank and every later restart.

    All ranks of `process_group` (the default group, where torch.distributed is initialised) call this together: its
    first rank asks, and all get its answer. Processes without a group that must agree name their `decision` (a job's id
    and how often it was started): the first of them that is answered decides for the others, for some hours.

    `trust`: tiers ("memory", "s3") whose word is enough. Without it every tier must be seen. With "memory", S3 may be
    away; with "s3", nodes may be gone, or the gateway: then S3 is looked at from here, and what only memory has is not
    found. `deep`: all bytes are read, and compared with what was acknowledged. `patience_s`: so long is asked again
    while nobody can say.

    Raises:
        NoCheckpointError: every tier was seen, and there is none (a FileNotFoundError).
        UnseenTierError: nobody can say now. It does not mean that there is none.
        ValueError: `uri`, `trust` or `process_group` is none.
        RuntimeError: the gateway refuses to say, for a reason that stays: no key or a wrong one, no such bucket.
    """
    place = Place.of(uri)
    trusted = frozenset(map(Tier, trust))
    if trusted and decision and Tier.S3 in trusted:
        raise ValueError("what S3 alone says is agreed on by nobody: name a decision, or trust S3")

    def ask() -> dict[str, Any]:
        return _asked(place, trusted, decision, deep=deep, patience_s=patience_s)

    return _told(place, _shared(ask, process_group))


class _RefusedError(RuntimeError):
    """Asking again would not help; the message says why."""


def _told(place: Place, answer: Mapping[str, Any]) -> Checkpoint:
    """What an answer means."""
    if "error" in answer:
        raise _ERRORS[answer["error"]](answer["message"])
    passed_over = [PassedOver(each["uri"], each["step"], each["reason"]) for each in answer["passed_over"]]
    for each in passed_over:
        log.warning("a newer checkpoint is passed over: %s", each)
    if answer["checkpoint"] is None:
        raise NoCheckpointError(str(place), passed_over)
    return Checkpoint.of(answer["checkpoint"], passed_over)


_ERRORS: Mapping[str, Callable[[str], Exception]] = {"unseen": UnseenTierError, "refused": RuntimeError}


# -- who asks
def _shared(ask: Callable[[], dict[str, Any]], process_group: ProcessGroup | None) -> dict[str, Any]:
    """What all ranks are told: one asks."""
    if process_group is None and not _is_distributed():
        return _caught(ask)
    # Here and not above: without a group nobody needs torch.
    from torch import distributed

    rank = distributed.get_rank(process_group)
    if rank < 0:
        raise ValueError("this process is not in the process group")
    # Text, and no object of ours: ranks may differ in what they can unpickle.
    told = [json.dumps(_caught(ask)) if rank == 0 else ""]
    first = 0 if process_group is None else distributed.get_global_rank(process_group, 0)
    distributed.broadcast_object_list(told, src=first, group=process_group)
    answer: dict[str, Any] = json.loads(told[0])
    return answer


def _is_distributed() -> bool:
    """Whether torch.distributed is initialised; who never imported it has not initialised it."""
    distributed = sys.modules.get("torch.distributed")
    return distributed is not None and distributed.is_available() and distributed.is_initialized()


def _caught(ask: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """An answer, or why there is none: whatever it is, the other ranks wait for it."""
    try:
        return ask()
    except UnseenTierError as error:
        return {"error": "unseen", "message": error.message}
    except (_RefusedError, BotoCoreError) as error:
        log.error("the newest checkpoint cannot be asked for: %s", error)
        return {"error": "refused", "message": str(error)}
    except Exception as error:
        log.error("the newest checkpoint cannot be asked for", exc_info=error)
        return {"error": "refused", "message": f"{type(error).__name__}: {error}"}


# -- whom
def _asked(place: Place, trusted: Collection[Tier], decision: str, *, deep: bool, patience_s: float) -> dict[str, Any]:
    """A gateway's answer; S3's own where none answers, if that is trusted.

    Raises:
        UnseenTierError: nobody can say.
        _RefusedError, BotoCoreError: the gateway refuses, or cannot be asked.
    """
    told = {"trust": ",".join(sorted(trusted)), "decision": decision, "deep": str(int(deep))}
    query = {"x-tiergate-newest": "", "prefix": place.prefix, **told}
    route, end_s, pause_s = Route(), time.monotonic() + patience_s, FIRST_PAUSE_S
    while True:
        outcome = _first(route, place, query)
        if isinstance(outcome, dict):
            return outcome
        if outcome.is_away and Tier.S3 in trusted:
            return _s3_alone(route, place, outcome.why)
        if time.monotonic() + pause_s > end_s:
            raise UnseenTierError(f"which checkpoint under {place} is the newest cannot be said now: {outcome.why}")
        time.sleep(pause_s)
        pause_s = min(pause_s * 2, LAST_PAUSE_S)


@dataclass(frozen=True, slots=True)
class _Unsaid:
    """Why nobody said. `is_away`: no gateway answers, not even to say that it cannot say."""

    why: str
    is_away: bool


def _first(route: Route, place: Place, query: Mapping[str, str]) -> dict[str, Any] | _Unsaid:
    """What the first gateway that answers says.

    Raises:
        _RefusedError: it refuses for good, or cannot be asked.
        BotoCoreError: the AWS configuration is wrong.
    """
    reasons: list[str] = []
    credentials = Session().get_credentials()
    if credentials is None:
        raise _RefusedError("no AWS keys are found to ask the gateway with")
    for tier in route.gateways():
        try:
            client = route.client(tier)
        except ValueError as error:
            raise _RefusedError(f"a gateway's address is none: {error}") from error
        url = client.meta.endpoint_url
        endpoint = Endpoint(url, credentials, client.meta.region_name, read_timeout_s=LOOK_TIMEOUT_S)
        try:
            reply = endpoint.ask("POST", place.bucket, query=query, pauses_s=())
        except (HTTPClientError, BotoConnectionError) as error:
            reasons.append(f"no gateway answers at {url}: {error}")
            continue
        if not reply.is_gateways:
            reasons.append(f"what answers at {url} is no gateway: {reply.status} {reply.code}")
            continue
        found = reply.document()
        if found is not None:
            answer: dict[str, Any] = found
            return answer
        if reply.status < HTTPStatus.INTERNAL_SERVER_ERROR or reply.status == HTTPStatus.NOT_IMPLEMENTED:
            raise _RefusedError(f"the gateway refuses to say which checkpoint is the newest: {reply.message}")
        return _Unsaid(reply.message, is_away=False)
    return _Unsaid("; ".join(reasons) + route.alone(), is_away=True)


def _s3_alone(route: Route, place: Place, why: str) -> dict[str, Any]:
    """What S3 by itself says.

    Raises:
        UnseenTierError: it does not answer, or nobody knows where it is.
    """
    # Here and not above: most never need it.
    from tiergate_adapters import s3alone

    s3 = route.s3()
    if s3 is None:
        raise UnseenTierError(f"{why}; and {ORIGIN_VARIABLE} does not say where S3 is")
    log.warning("S3 alone is asked for the newest checkpoint of %s: %s", place, why)
    return s3alone.newest(place, route.client(s3))
