"""Promise P4 judged from outside: was there an instant at which a marker in the origin was untrue?

What is compared are the acknowledgements a client got, in their order, with the requests that reached the origin
(`FaultyOrigin.requests`). A request takes effect at some instant between its start and its end, so the marker is held
to be there, and a member to change, at the worst of these instants.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import inf
from typing import NamedTuple

from tiergate.checkpoints.markers import is_within, scope_of
from tiergate.origin.stamp import STAMP_HEADER, parse_stamp
from tiergate.testing.rules import Seen


@dataclass(frozen=True, slots=True)
class Acked:
    """One acknowledged write of a key: the ETag it was answered with, empty for a deletion."""

    key: str
    etag: str


class Change(NamedTuple):
    """What a request did to a key of the origin, some time between two instants. `etag` is the one that clients were
    shown: that of the object's stamp, the origin's own where that names none (a write-through's), `FOREIGN` where
    neither tells. Empty for a deletion. `is_sure`: whether the origin said that it was done; else it may have been."""

    key: str
    etag: str
    from_s: float
    until_s: float
    is_sure: bool = True


FOREIGN = "foreign"


def changes_of(requests: Iterable[Seen], bucket: str) -> list[Change]:
    """The changes that the origin's objects saw, in the order of the requests; those among them that it may have seen,
    since its answer was lost, not those that it cannot, since the request never came whole."""
    begun: dict[str, str] = {}
    found: list[Change] = []
    for seen in requests:
        if seen.bucket != bucket or (seen.origin_status is not None and seen.origin_status >= 300):
            continue
        if seen.origin_status is None and (seen.fault is not None or not seen.is_whole):
            continue  # Answered in the origin's place, or torn.
        if seen.operation == "CreateMultipartUpload":
            begun[seen.upload_id] = _stamped_etag(seen)
        elif seen.operation in ("PutObject", "CopyObject"):
            found.append(_change(seen, _stamped_etag(seen) or seen.origin_etag or FOREIGN))
        elif seen.operation == "CompleteMultipartUpload":
            found.append(_change(seen, begun.get(seen.upload_id, "") or seen.origin_etag or FOREIGN))
        elif seen.operation == "DeleteObject":
            found.append(_change(seen, ""))
    return found


def _change(seen: Seen, etag: str) -> Change:
    until_s = inf if seen.finished_s is None else seen.finished_s
    return Change(seen.key, etag, seen.started_s, until_s, seen.origin_status is not None)


def _stamped_etag(seen: Seen) -> str:
    stamp = parse_stamp(seen.headers.get(STAMP_HEADER, ""))
    return stamp.etag if stamp else ""


class Write(NamedTuple):
    """What a client did to a key, some time between two instants, and the ETag it was answered with: empty for a
    deletion, `UNTOLD` where no answer told. `until_s` is infinite for a write that was not acknowledged: it may have
    happened at any time, or never."""

    key: str
    etag: str
    from_s: float
    until_s: float


UNTOLD = "?"


def false_completes(
    requests: Iterable[Seen], bucket: str, acked: Sequence[Acked], is_marker: Callable[[str], bool]
) -> list[str]:
    """The moments at which a marker was untrue, in words; empty when promise P4 was kept.

    `acked` holds every acknowledged write of one client that wrote one after the other, ETags different for different
    bytes, to a bucket that was empty before; `requests` begin before it.
    """
    writes = [Write(each.key, each.etag, index, index) for index, each in enumerate(acked)]
    return untrue_markers(requests, bucket, writes, is_marker)


def untrue_markers(
    requests: Iterable[Seen], bucket: str, writes: Sequence[Write], is_marker: Callable[[str], bool]
) -> list[str]:
    """As `false_completes`, for clients that wrote at the same time, by one clock: a marker speaks for what was
    acknowledged before its own write began."""
    changes = changes_of(requests, bucket)
    faults = []
    for put in changes:
        if is_marker(put.key) and put.etag:
            gone_s = _gone_s(changes, put)
            faults += _untrue_when_put(changes, writes, put)
            faults += _changed_meanwhile(changes, put, gone_s)
    return faults


def _gone_s(changes: Sequence[Change], put: Change) -> float:
    """When the marker was surely no longer there."""
    gone = [each for each in changes if each.key == put.key and not each.etag and each.from_s >= put.until_s]
    return min((each.until_s for each in gone if each.is_sure), default=inf)


def _untrue_when_put(changes: Sequence[Change], writes: Sequence[Write], put: Change) -> list[str]:
    """Members that were not there, or too old, when the marker may have appeared."""
    of_marker = [each for each in writes if each.key == put.key and each.etag in (put.etag, UNTOLD)]
    if not of_marker:
        return [f"{put.key} {put.etag} was never written"]
    # Of several writes of the same bytes, the one that asks for most.
    told = [each for each in of_marker if each.etag == put.etag]
    at_s = max(each.from_s for each in told) if told else min(each.from_s for each in of_marker)
    scope = scope_of(put.key)
    needed: dict[str, Write] = {}
    for each in writes:
        if is_within(each.key, scope) and each.key != put.key and each.until_s <= at_s:
            known = needed.get(each.key)
            if known is None or (known.until_s, known.from_s) <= (each.until_s, each.from_s):
                needed[each.key] = each
    faults = []
    for key, last in needed.items():
        states = _states(changes, key, put.from_s)
        good = {last.etag}
        good |= {each.etag for each in writes if each.key == key and each.until_s > last.from_s}
        if not any(state in good or (state and UNTOLD in good) for state in states) and FOREIGN not in states[1:]:
            shown = " or ".join(state or "absent" for state in states)
            faults.append(f"{put.key} appeared while {key} was {shown}, acknowledged: {sorted(good)}")
    return faults


def _states(changes: Sequence[Change], key: str, at_s: float) -> list[str]:
    """What a key may have been at a moment: what the origin last said, then what it may have done since."""
    states = [""]
    for each in changes:
        if each.key == key and each.until_s <= at_s:
            states = [each.etag] if each.is_sure else [*states, each.etag]
    return states


def _changed_meanwhile(changes: Sequence[Change], put: Change, gone_s: float) -> list[str]:
    """Members that the origin held already and that changed while the marker may have been there."""
    scope = scope_of(put.key)
    faults = []
    for each in changes:
        if each.key == put.key or not is_within(each.key, scope):
            continue
        if each.until_s <= put.from_s or each.from_s >= gone_s:
            continue
        before = [other for other in changes if other.key == each.key and other.until_s <= each.from_s]
        if before and before[-1].etag and before[-1].etag != each.etag:
            what = "replaced" if each.etag else "deleted"
            faults.append(f"{each.key} was {what} while {put.key} stood")
    return faults
