"""Listings against a plain dict: any keys, delimiters, page sizes and origins, resumed until the end."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiergate.errors import InvariantError, RequestError
from tiergate.s3.listing import (
    Change,
    CommonPrefix,
    Doubt,
    Entry,
    ListingPage,
    Merge,
    Position,
    decode_token,
    encode_name,
    encode_token,
    list_objects_output,
    list_objects_v2_output,
    order,
    roll_up,
    start_position,
)
from tiergate.s3.operations import render

ALPHABET = "ab/-é\U0001f600\uffee\x01 "
KEYS = st.text(ALPHABET, min_size=1, max_size=7)
PREFIXES = st.text(ALPHABET, max_size=2)
DELIMITERS = st.sampled_from(["", "/", "/", "a", "//", "/-", "\U0001f600"])


def entry(key: str, source: str = "origin") -> Entry:
    return Entry(key, len(key), source, 0)


def flat(pages: Sequence[ListingPage]) -> list[tuple[str, str]]:
    found = [(prefix, "prefix") for page in pages for prefix in page.prefixes]
    found += [(each.key, each.etag) for page in pages for each in page.entries]
    return sorted(found, key=lambda each: order(each[0]))


def expected(objects: dict[str, str], prefix: str, delimiter: str) -> list[tuple[str, str]]:
    found: dict[str, str] = {}
    for key, source in objects.items():
        if key.startswith(prefix):
            rolled = roll_up(key, prefix, delimiter)
            found[key if rolled is None else rolled] = source if rolled is None else "prefix"
    return sorted(found.items(), key=lambda each: order(each[0]))


def origin_items(
    keys: set[str], prefix: str, delimiter: str, after: Position | None, strict: bool
) -> list[Entry | CommonPrefix]:
    """What an S3 lists beyond `after`; a strict one also skips the keys under a marker that is a prefix."""
    items: list[Entry | CommonPrefix] = []
    for key in sorted(keys, key=order):
        if not key.startswith(prefix) or (after and order(key) <= order(after.after)):
            continue
        if strict and after and after.is_prefix and key.startswith(after.after):
            continue
        rolled = roll_up(key, prefix, delimiter)
        item = entry(key) if rolled is None else CommonPrefix(rolled)
        if not items or items[-1] != item:
            items.append(item)
    return items


def list_once(
    origin: set[str],
    overlay: dict[str, bool],
    page: ListingPage,
    after: Position | None,
    chunk: int,
    rolled_by_origin: bool,
    strict: bool,
) -> None:
    items = origin_items(origin, page.prefix, page.delimiter if rolled_by_origin else "", after, strict)
    changes = (
        Change(key, entry(key, "ours") if alive else None)
        for key, alive in sorted(overlay.items(), key=lambda each: order(each[0]))
        if key.startswith(page.prefix) and (after is None or order(key) > order(after.after))
    )
    merge = Merge(changes)
    pieces = [items[start : start + chunk] for start in range(0, len(items), chunk)] or [[]]
    for index, piece in enumerate(pieces):
        for item in merge.feed(piece, last=index == len(pieces) - 1):
            if isinstance(item, Doubt):
                beyond = after.after if after else ""
                survivors = {
                    key for key in origin - item.deleted if key.startswith(item.prefix) and order(key) > order(beyond)
                }
                if survivors and not page.offer(CommonPrefix(item.prefix)):
                    return
            elif not page.offer(item):
                return


@given(
    origin=st.sets(KEYS, max_size=25),
    overlay=st.dictionaries(KEYS, st.booleans(), max_size=20),
    prefix=PREFIXES,
    delimiter=DELIMITERS,
    max_keys=st.integers(1, 6),
    chunk=st.integers(1, 5),
    rolled_by_origin=st.booleans(),
    strict=st.booleans(),
    resume=st.sampled_from(["token", "marker"]),
)
def test_pages_together_are_what_a_dict_would_list(
    origin: set[str],
    overlay: dict[str, bool],
    prefix: str,
    delimiter: str,
    max_keys: int,
    chunk: int,
    rolled_by_origin: bool,
    strict: bool,
    resume: str,
) -> None:
    objects = dict.fromkeys(origin, "origin")
    for key, alive in overlay.items():
        objects.pop(key, None)
        if alive:
            objects[key] = "ours"
    wanted = expected(objects, prefix, delimiter)
    pages: list[ListingPage] = []
    after: Position | None = None
    while True:
        page = ListingPage(prefix, delimiter, max_keys, after)
        list_once(origin, overlay, page, after, chunk, rolled_by_origin, strict)
        pages.append(page)
        seen = sum(each.key_count for each in pages)
        assert page.key_count <= max_keys
        assert page.truncated == (seen < len(wanted))
        if page.next is None:
            break
        assert page.key_count == max_keys
        after = (
            decode_token(encode_token(page.next))
            if resume == "token"
            else start_position(page.next.after, prefix, delimiter)
        )
    assert flat(pages) == wanted


@given(st.sets(KEYS, max_size=20), KEYS, DELIMITERS, st.booleans())
def test_start_after_any_text_lists_what_has_a_key_beyond_it(
    keys: set[str], marker: str, delimiter: str, rolled_by_origin: bool
) -> None:
    after = start_position(marker, "", delimiter)
    page = ListingPage("", delimiter, 1000, after)
    list_once(keys, {}, page, after, 3, rolled_by_origin, strict=False)
    beyond = {key: "origin" for key in keys if order(key) > order(marker)}
    if after and after.is_prefix:
        beyond = {key: source for key, source in beyond.items() if not key.startswith(marker)}
    assert flat([page]) == expected(beyond, "", delimiter)


def offer_all(page: ListingPage, items: Sequence[Entry | CommonPrefix]) -> list[bool]:
    return [page.offer(item) for item in items]


def test_full_page_absorbs_keys_of_its_last_prefix_before_it_is_truncated() -> None:
    page = ListingPage("", "/", 2, None)
    assert offer_all(page, [entry("a"), entry("b/1"), entry("b/2")]) == [True, True, True]
    assert (page.truncated, page.next) == (False, None)
    assert not page.offer(entry("c"))
    assert (page.truncated, page.next) == (True, Position("b/", True))


def test_max_keys_zero_is_empty_and_not_truncated() -> None:
    page = ListingPage("", "", 0, None)
    assert not page.offer(entry("a"))
    assert (page.key_count, page.truncated, page.next) == (0, False, None)
    assert list_objects_v2_output(page, "bkt")["MaxKeys"] == 0


def test_max_keys_above_a_thousand_is_clamped() -> None:
    page = ListingPage("", "", 5000, None)
    names = [f"{number:05}" for number in range(1001)]
    assert offer_all(page, [entry(name) for name in names]) == [True] * 1000 + [False]
    assert page.truncated
    assert list_objects_output(page, "bkt")["MaxKeys"] == 1000


def test_unsorted_items_and_changes_are_a_bug() -> None:
    page = ListingPage("", "", 10, None)
    page.offer(entry("b"))
    with pytest.raises(InvariantError):
        page.offer(entry("a"))
    with pytest.raises(InvariantError):
        page.offer(entry("b"))
    with pytest.raises(InvariantError):
        list(Merge([Change("b", None), Change("a", None)]).feed([], last=True))


def test_merge_draws_changes_only_as_far_as_the_origin_reaches() -> None:
    drawn: list[str] = []

    def changes() -> Iterator[Change]:
        for key in ("a", "c", "x", "y", "z"):
            drawn.append(key)
            yield Change(key, entry(key, "ours"))

    merge = Merge(changes())
    assert [each.key for each in merge.feed([entry("b"), entry("c")], last=False) if isinstance(each, Entry)] == [
        "a",
        "b",
        "c",
    ]
    assert drawn == ["a", "c", "x"]


def test_prefix_with_only_deletions_is_in_doubt_and_with_a_live_key_is_not() -> None:
    changes = [Change("a/1", None), Change("a/2", None), Change("b/1", None), Change("b/2", entry("b/2"))]
    items = list(Merge(changes).feed([CommonPrefix("a/"), CommonPrefix("b/"), CommonPrefix("c/")], last=True))
    assert items == [Doubt("a/", frozenset({"a/1", "a/2"})), CommonPrefix("b/"), CommonPrefix("c/")]


@given(KEYS, st.booleans())
def test_token_round_trip_is_url_safe(after: str, is_prefix: bool) -> None:
    position = Position(after, is_prefix)
    token = encode_token(position)
    assert decode_token(token) == position
    assert set(token) <= set("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_=")


@pytest.mark.parametrize(
    "token",
    [
        "",
        "1ueGcxLPRx1Tr/XYExHnhbYLgveDs2J/wm36Hy4vbOwM=",
        "not base64!",
        "é",
        "e30=",
        "W10=",
        "bnVsbA==",
        "eyJ2IjoyLCJhIjoiYSIsInAiOnRydWV9",
        "eyJ2IjoxLCJhIjoiYSIsInAiOjF9",
        "eyJ2IjoxLCJhIjoiIiwicCI6dHJ1ZX0=",
        "A" * 10_000,
        "W1tb" * 2_000,
    ],
)
def test_foreign_or_bad_token_is_refused(token: str) -> None:
    with pytest.raises(RequestError) as caught:
        decode_token(token)
    assert caught.value.code == "InvalidArgument"
    assert caught.value.message == "The continuation token provided is incorrect"


@pytest.mark.parametrize(
    ("name", "encoded"),
    [("a b+c/*-_.~", "a+b%2Bc/*-_.%7E"), ("€&\x01%", "%E2%82%AC%26%01%25"), ("a//b/", "a//b/")],
)
def test_encode_name_is_that_of_s3(name: str, encoded: str) -> None:
    assert encode_name(name) == encoded


def page_of(keys: Sequence[str], delimiter: str = "", max_keys: int = 1000) -> ListingPage:
    page = ListingPage("", delimiter, max_keys, None)
    for key in keys:
        if not page.offer(Entry(key, 1, "e", 0, owner_id="me", extras={"ChecksumType": "FULL_OBJECT"})):
            break
    return page


def test_list_objects_v2_output_echoes_and_renders() -> None:
    page = page_of(["a b", "d/1", "e"], "/", 2)
    output = list_objects_v2_output(page, "bkt", "a a", "token", fetch_owner=False, encoding_type="url")
    assert output["Contents"] == [
        {
            "Key": "a+b",
            "LastModified": 0,
            "ETag": "e",
            "Size": 1,
            "StorageClass": "STANDARD",
            "ChecksumType": "FULL_OBJECT",
        }
    ]
    assert output["CommonPrefixes"] == [{"Prefix": "d/"}]
    assert (output["KeyCount"], output["MaxKeys"], output["IsTruncated"]) == (2, 2, True)
    assert (output["StartAfter"], output["ContinuationToken"]) == ("a+a", "token")
    assert decode_token(output["NextContinuationToken"]) == Position("d/", True)
    assert (output["Delimiter"], output["EncodingType"], output["Prefix"]) == ("/", "url", "")
    assert b"<ListBucketResult" in render("ListObjectsV2", output)[1]
    owned = list_objects_v2_output(page, "bkt", fetch_owner=True)
    assert owned["Contents"][0]["Owner"] == {"ID": "me"}
    assert not {"StartAfter", "ContinuationToken", "EncodingType"} & owned.keys()


def test_list_objects_output_has_marker_and_owner_and_with_a_delimiter_next_marker() -> None:
    output = list_objects_output(page_of(["a", "b c", "d"], "/", 2), "bkt", "0 1", "url", "us")
    assert (output["Marker"], output["NextMarker"]) == ("0+1", "b+c")
    assert output["Contents"][0]["Owner"] == {"ID": "me"}
    undivided = list_objects_output(page_of(["a", "b c", "d"], max_keys=2), "bkt")
    assert (undivided["IsTruncated"], "NextMarker" in undivided) == (True, False)
    nobodys = ListingPage("", "", 9, None)
    nobodys.offer(Entry("a", 1, "e", 0))
    assert list_objects_output(nobodys, "bkt", owner_id="us")["Contents"][0]["Owner"] == {"ID": "us"}
    assert "Owner" not in list_objects_output(nobodys, "bkt")["Contents"][0]
    whole = list_objects_output(page_of(["a"]), "bkt")
    assert whole["Marker"] == ""
    assert not {"NextMarker", "Delimiter", "EncodingType"} & whole.keys()
    assert b"<Marker/>" in render("ListObjects", whole)[1]


@pytest.mark.parametrize("build", [list_objects_output, list_objects_v2_output])
def test_unknown_encoding_type_is_refused(build: Callable[..., dict[str, Any]]) -> None:
    with pytest.raises(RequestError) as caught:
        build(page_of([]), "bkt", encoding_type="base64")
    assert caught.value.code == "InvalidArgument"
