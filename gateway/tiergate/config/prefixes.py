"""Reads `[[prefix]]` tables: settings for the keys under a prefix."""

import difflib
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

from tiergate.config.settings import KEEP_COUNT, LARGEST_COPIES_COUNT, PROMOTE_IDLE_S, PrefixSettings
from tiergate.config.values import (
    EtagMode,
    FenceMode,
    Persist,
    choice_of,
    parse_count,
    parse_duration,
    parse_flag,
    parse_markers,
    parse_persist,
    parse_text,
    show,
)

_SCHEME = "s3://"


@dataclass(frozen=True, slots=True)
class PrefixTable:
    """One table as it was given; None and the markers are still to be joined with the node's."""

    bucket: str
    prefix: str
    immutable: bool
    exclusive: bool
    etag: EtagMode
    fence: FenceMode | None
    markers: tuple[str, ...]
    replicas_count: int | None
    persist: Persist | None
    is_run: bool
    keep_count: int
    skip_superseded: bool
    promote_idle_s: float
    reuse: bool


def _copies(value: object) -> int:
    count = parse_count(value)
    if not 1 <= count <= LARGEST_COPIES_COUNT:
        raise ValueError(f"{show(value)} is not from 1 to {LARGEST_COPIES_COUNT}")
    return count


def _kept(value: object) -> int:
    count = parse_count(value)
    if count < 1:
        raise ValueError(f"{show(value)} is not at least 1: the newest complete checkpoint is never dropped")
    return count


_KEYS: dict[str, Callable[[object], object]] = {
    "uri": parse_text,
    "immutable": parse_flag,
    "exclusive": parse_flag,
    "etag": choice_of(EtagMode),
    "fence": choice_of(FenceMode),
    "markers": parse_markers,
    "replicas": _copies,
    "persist": parse_persist,
    "keep": _kept,
    "skip_superseded": parse_flag,
    "promote_idle": parse_duration,
    "reuse": parse_flag,
}

KEYS = frozenset(_KEYS)
"""What a table may hold."""

_OF_A_RUN = ("skip_superseded", "promote_idle")
"""Keys that mean nothing without `persist`."""


def parse_prefixes(raw: object) -> tuple[PrefixTable, ...]:
    """Tables from TOML, or from texts that each hold an inline table (or an array of them).

    Raises:
        ValueError: what is wrong with the first faulty table.
    """
    tables: list[PrefixTable] = []
    for item in [raw] if isinstance(raw, str) else cast("Sequence[object]", raw if _is_list(raw) else [raw]):
        for table in _from_text(item) if isinstance(item, str) else [item]:
            tables.append(_parse_table(table))
    seen: set[tuple[str, str]] = set()
    for one in tables:
        if (one.bucket, one.prefix) in seen:
            raise ValueError(f"{show(_SCHEME + one.bucket + '/' + one.prefix)} is given twice")
        seen.add((one.bucket, one.prefix))
    return tuple(tables)


def settle_prefixes(
    tables: Sequence[PrefixTable], fence: FenceMode, markers: tuple[str, ...], replicas_count: int | None
) -> tuple[PrefixSettings, ...]:
    """The prefixes with what they take over from the node."""
    return tuple(
        PrefixSettings(
            bucket=table.bucket,
            prefix=table.prefix,
            immutable=table.immutable,
            exclusive=table.exclusive,
            etag=table.etag,
            fence=table.fence or fence,
            markers=tuple(dict.fromkeys((*markers, *table.markers))),
            replicas_count=table.replicas_count or replicas_count,
            persist=table.persist,
            is_run=table.is_run,
            keep_count=table.keep_count,
            skip_superseded=table.skip_superseded,
            promote_idle_s=table.promote_idle_s,
            reuse=table.reuse,
        )
        for table in tables
    )


def _is_list(value: object) -> bool:
    return isinstance(value, list | tuple)


def _from_text(text: str) -> list[object]:
    try:
        value: object = tomllib.loads(f"prefix = {text}")["prefix"]
    except tomllib.TOMLDecodeError as error:
        raise ValueError(
            f"{show(text)} is not an inline table such as {{uri = 's3://bucket/run/', immutable = true}}"
        ) from error
    return cast("list[object]", value) if isinstance(value, list) else [value]


def _parse_table(raw: object) -> PrefixTable:
    if not isinstance(raw, dict):
        raise ValueError(f"{show(raw)} is not a table with a uri")
    table = cast("dict[str, object]", raw)
    values: dict[str, object] = {}
    for key, value in table.items():
        if key not in _KEYS:
            close = difflib.get_close_matches(key, _KEYS, n=1)
            raise ValueError(f"{show(key)} is no key of a prefix{f', did you mean {close[0]}?' if close else ''}")
        try:
            values[key] = _KEYS[key](value)
        except ValueError as error:
            raise ValueError(f"{key}: {error}") from error
    uri = cast("str", values.get("uri", ""))
    bucket, _, prefix = uri.removeprefix(_SCHEME).partition("/")
    if not uri.startswith(_SCHEME) or not bucket:
        raise ValueError(f"uri: {show(uri)} is not s3://BUCKET/PREFIX")
    if "persist" not in values and (lonely := [key for key in _OF_A_RUN if key in values]):
        raise ValueError(f"{lonely[0]}: it means something with persist only")
    is_run = "persist" in values or "keep" in values
    if is_run and prefix and not prefix.endswith("/"):
        raise ValueError(f"uri: {show(uri)} does not end with a slash, as that of a run with persist or keep does")
    return PrefixTable(
        bucket=bucket,
        prefix=prefix,
        immutable=cast("bool", values.get("immutable", False)),
        exclusive=cast("bool", values.get("exclusive", False)),
        etag=cast("EtagMode", values.get("etag", EtagMode.AUTO)),
        fence=cast("FenceMode | None", values.get("fence")),
        markers=cast("tuple[str, ...]", values.get("markers", ())),
        replicas_count=cast("int | None", values.get("replicas")),
        persist=cast("Persist | None", values.get("persist")),
        is_run=is_run,
        keep_count=cast("int", values.get("keep", KEEP_COUNT)),
        skip_superseded=cast("bool", values.get("skip_superseded", False)),
        promote_idle_s=cast("float", values.get("promote_idle", PROMOTE_IDLE_S)),
        reuse=cast("bool", values.get("reuse", False)),
    )
