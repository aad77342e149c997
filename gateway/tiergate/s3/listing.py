"""Listings: the merge of what the origin lists with what it does not hold yet, and pages with exact limits.

Everything is ordered by the UTF-8 bytes of keys. No I/O: the caller brings pages of the origin and changes of
the directory, in that order, and takes what comes out.
"""

import base64
import binascii
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote_plus

from tiergate.errors import RequestError, invariant

MAX_KEYS = 1_000
"""https://docs.aws.amazon.com/AmazonS3/latest/API/API_ListObjectsV2.html: a page never holds more."""

_TOKEN_VERSION = 1
_MAX_TOKEN_CHARS = 8_192


@dataclass(frozen=True, slots=True)
class Entry:
    """A key in a listing. `extras` are further members of S3's Object shape (ChecksumType, RestoreStatus,
    ...)."""

    key: str
    size_bytes: int
    etag: str
    modified_s: int
    storage_class: str = "STANDARD"
    owner_id: str | None = None
    extras: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class CommonPrefix:
    """Keys that the origin rolled up: at least one begins with `prefix`, which ends in the delimiter."""

    prefix: str


@dataclass(frozen=True, slots=True)
class Doubt:
    """A common prefix of the origin under which the directory knows only deletions, of `deleted`.

    Whether it still stands depends on whether the origin holds any other key there, beyond the position the
    listing began at: the caller finds out, and offers CommonPrefix(prefix) to the page, or nothing.
    """

    prefix: str
    deleted: frozenset[str]


@dataclass(frozen=True, slots=True)
class Change:
    """What the directory knows of a key: its entry, or None for a deleted one."""

    key: str
    entry: Entry | None


@dataclass(frozen=True, slots=True)
class Position:
    """Where a listing goes on: after key `after`, or, if it is a common prefix, after all keys that begin
    with it."""

    after: str
    is_prefix: bool


def order(key: str) -> bytes:
    """What listings sort by."""
    return key.encode()


def roll_up(key: str, prefix: str, delimiter: str) -> str | None:
    """The common prefix that `key` disappears in, or None when the key is listed itself."""
    if not delimiter:
        return None
    found = key.find(delimiter, len(prefix))
    return None if found < 0 else key[: found + len(delimiter)]


def start_position(after: str, prefix: str, delimiter: str) -> Position | None:
    """The position of a client's marker or start-after; None for an empty one.

    A marker that is itself a common prefix (as in NextMarker) skips all keys under it.
    """
    if not after:
        return None
    return Position(after, after.startswith(prefix) and roll_up(after, prefix, delimiter) == after)


def encode_token(position: Position) -> str:
    """A position as an opaque continuation token."""
    document = {"v": _TOKEN_VERSION, "a": position.after, "p": position.is_prefix}
    return base64.urlsafe_b64encode(json.dumps(document, separators=(",", ":")).encode()).decode()


def decode_token(token: str) -> Position:
    """The position in a continuation token.

    Raises:
        RequestError: InvalidArgument, when it is none of ours.
    """
    try:
        if len(token) > _MAX_TOKEN_CHARS:
            raise ValueError(len(token))
        document = json.loads(base64.b64decode(token, altchars=b"-_", validate=True))
        match document:
            case {"v": 1, "a": str(after), "p": bool(is_prefix), **rest} if not rest and after:
                after.encode()
                return Position(after, is_prefix)
            case _:
                raise ValueError(token)
    except (ValueError, binascii.Error, RecursionError) as error:
        raise RequestError(
            "InvalidArgument",
            "The continuation token provided is incorrect",
            argument_name="continuation-token",
            argument_value=token,
        ) from error


class Merge:
    """One sorted stream out of the origin's pages and the directory's changes; for equal keys the directory
    wins.

    `changes` are sorted, without repetition, and begin where the origin's first page begins; they are drawn
    only as far as the origin's pages reach.
    """

    def __init__(self, changes: Iterable[Change]) -> None:
        self._changes = iter(changes)
        self._next = next(self._changes, None)

    def feed(self, page: Sequence[Entry | CommonPrefix], last: bool) -> Iterator[Entry | CommonPrefix | Doubt]:
        """What is listed up to the end of the origin's `page`, or to the very end if it is the `last` one.

        Exhaust it before the next page is fed.
        """
        for item in page:
            if isinstance(item, CommonPrefix):
                yield from self._before(order(item.prefix))
                yield self._settle(item)
            else:
                yield from self._before(order(item.key))
                change = self._next
                if change is None or change.key != item.key:
                    yield item
                    continue
                self._advance()
                if change.entry is not None:
                    yield change.entry
        if last:
            yield from self._before(None)

    def _before(self, bound: bytes | None) -> Iterator[Entry]:
        while (change := self._next) is not None and (bound is None or order(change.key) < bound):
            self._advance()
            if change.entry is not None:
                yield change.entry

    def _settle(self, item: CommonPrefix) -> CommonPrefix | Doubt:
        deleted: set[str] = set()
        alive = False
        while (change := self._next) is not None and change.key.startswith(item.prefix):
            self._advance()
            if change.entry is None:
                deleted.add(change.key)
            else:
                alive = True
        return Doubt(item.prefix, frozenset(deleted)) if deleted and not alive else item

    def _advance(self) -> None:
        before = self._next
        self._next = next(self._changes, None)
        if before is not None and self._next is not None:
            invariant(order(before.key) < order(self._next.key), "changes are not sorted", key=self._next.key)


class ListingPage:
    """One page of a listing. Offer it sorted items until it declines one, or until there are no more.

    After that `entries` and `prefixes` are the page, `truncated` says whether anything is left, and `next` is
    where the next page begins (None unless truncated). Items outside the prefix or not after `after` are
    passed over, so that the source need not be exact.
    """

    def __init__(self, prefix: str, delimiter: str, max_keys: int, after: Position | None = None) -> None:
        self.prefix = prefix
        self.delimiter = delimiter
        self.max_keys = min(max_keys, MAX_KEYS)
        self.entries: list[Entry] = []
        self.prefixes: list[str] = []
        self.truncated = False
        self._after = after
        self._last: Position | None = None

    @property
    def key_count(self) -> int:
        """Keys and common prefixes together."""
        return len(self.entries) + len(self.prefixes)

    @property
    def next(self) -> Position | None:
        """Where the next page begins."""
        return self._last if self.truncated else None

    def offer(self, item: Entry | CommonPrefix) -> bool:
        """Take `item`, or decline it and all that would follow: then the page is complete.

        Raises:
            InvariantError: when items are not sorted.
        """
        if self.max_keys == 0:
            return False
        name = item.prefix if isinstance(item, CommonPrefix) else item.key
        if not name.startswith(self.prefix):
            return order(name) < order(self.prefix)
        rolled = roll_up(name, self.prefix, self.delimiter)
        if self._skips(item, name):
            return True
        if rolled is not None and self._last == Position(rolled, True):
            return True
        shown = Position(name if rolled is None else rolled, rolled is not None)
        invariant(
            self._last is None or order(self._last.after) < order(shown.after),
            "listed items are not sorted",
            item=name,
        )
        if self.key_count >= self.max_keys:
            self.truncated = True
            return False
        self._last = shown
        if isinstance(item, CommonPrefix) or rolled is not None:
            self.prefixes.append(shown.after)
        else:
            self.entries.append(item)
        return True

    def _skips(self, item: Entry | CommonPrefix, name: str) -> bool:
        after = self._after
        if after is None:
            return False
        if after.is_prefix and name.startswith(after.after):
            return True
        if isinstance(item, CommonPrefix) and after.after.startswith(name):
            # The origin rolled up keys on both sides of the position, and says that one of them is beyond it.
            return after.after == name
        return order(name) <= order(after.after)


def encode_name(name: str) -> str:
    """A key as `encoding-type=url` wants it: like an HTML form, but with slashes kept."""
    return quote_plus(name, safe="/*").replace("~", "%7E")


def list_objects_output(
    page: ListingPage,
    bucket: str,
    marker: str | None = None,
    encoding_type: str | None = None,
    owner_id: str | None = None,
) -> dict[str, Any]:
    """The output of ListObjects, with owners: `owner_id` is that of entries which name none. As in S3, NextMarker
    comes with a delimiter only: without one, the last key is as good."""
    encode = _encoder(encoding_type)
    output = _common(page, bucket, encoding_type)
    _add_owners(output, page, owner_id)
    output["Marker"] = encode(marker or "")
    if page.next is not None and page.delimiter:
        output["NextMarker"] = encode(page.next.after)
    return output


def list_objects_v2_output(
    page: ListingPage,
    bucket: str,
    start_after: str | None = None,
    continuation_token: str | None = None,
    fetch_owner: bool = False,
    encoding_type: str | None = None,
    owner_id: str | None = None,
) -> dict[str, Any]:
    """The output of ListObjectsV2; with `fetch_owner` each entry has its owner, `owner_id` where it names none."""
    encode = _encoder(encoding_type)
    output = _common(page, bucket, encoding_type)
    if fetch_owner:
        _add_owners(output, page, owner_id)
    output["KeyCount"] = page.key_count
    if start_after is not None:
        output["StartAfter"] = encode(start_after)
    if continuation_token is not None:
        output["ContinuationToken"] = continuation_token
    if page.next is not None:
        output["NextContinuationToken"] = encode_token(page.next)
    return output


def _common(page: ListingPage, bucket: str, encoding_type: str | None) -> dict[str, Any]:
    encode = _encoder(encoding_type)
    output: dict[str, Any] = {
        "Name": bucket,
        "Prefix": encode(page.prefix),
        "MaxKeys": page.max_keys,
        "IsTruncated": page.truncated,
        "Contents": [_content(entry, encode(entry.key)) for entry in page.entries],
        "CommonPrefixes": [{"Prefix": encode(prefix)} for prefix in page.prefixes],
    }
    if page.delimiter:
        output["Delimiter"] = encode(page.delimiter)
    if encoding_type:
        output["EncodingType"] = encoding_type
    return output


def _add_owners(output: dict[str, Any], page: ListingPage, owner_id: str | None) -> None:
    for entry, content in zip(page.entries, output["Contents"], strict=True):
        owner = entry.owner_id or owner_id
        if owner:
            content["Owner"] = {"ID": owner}


def _content(entry: Entry, name: str) -> dict[str, Any]:
    return {
        "Key": name,
        "LastModified": entry.modified_s,
        "ETag": entry.etag,
        "Size": entry.size_bytes,
        "StorageClass": entry.storage_class,
        **entry.extras,
    }


def _encoder(encoding_type: str | None) -> Callable[[str], str]:
    if not encoding_type:
        return str
    if encoding_type != "url":
        raise RequestError(
            "InvalidArgument",
            "Invalid Encoding Method specified in Request",
            argument_name="encoding-type",
            argument_value=encoding_type,
        )
    return encode_name
