"""What S3 lacks of a set whose marker is about to be put there past the gateways, which would have held it back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tiergate.checkpoints.lists import DamagedSetError
from tiergate.checkpoints.markers import Markers, is_within, reach_of, scope_of
from tiergate.checkpoints.recognition import manifest_of, sets_of
from tiergate.model import ObjectName, Role

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

MARKERS = Markers(lambda bucket, key: (), 1 << 62)
"""Those of the frameworks. Patterns of a user's own are the gateway's to know."""


def speaks_for_others(bucket: str, key: str) -> bool:
    """Whether an object is a marker or a pointer."""
    return MARKERS.role_of(ObjectName(bucket, key), 0) in (Role.MARKER, Role.POINTER)


def lacking(client: Any, bucket: str, key: str, body: bytes, acknowledged: Mapping[str, int]) -> list[str]:
    """The keys that S3 does not have, or at another length: of those that a gateway acknowledged to this process under
    the scope of `key`, and of those that the set's own list names. `body` is the object's. A list that cannot be read
    as what it should be counts as lacking itself."""
    scope = scope_of(key)
    sizes = dict(_listed(client, bucket, reach_of(scope)))
    missing = [
        known
        for known, size_bytes in acknowledged.items()
        if known != key and is_within(known, scope) and sizes.get(known) != size_bytes
    ]

    def read(named: str, start: int = 0, end: int | None = None, /) -> bytes:
        if named == key:
            return body[start:end]
        found: bytes = client.get_object(Bucket=bucket, Key=named)["Body"].read()
        return found[start:end]

    sizes[key] = len(body)
    for name in sets_of(bucket, sizes, MARKERS):
        if name.marker != key:
            continue
        try:
            manifest = manifest_of(name, sizes, read)
        except DamagedSetError:
            return [*missing, key]
        missing += [each.key for each in manifest.members if each.key not in sizes or not each.fits(sizes[each.key])]
    return missing


def _listed(client: Any, bucket: str, prefix: str) -> Iterator[tuple[str, int]]:
    for page in client.get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=prefix):
        for each in page.get("Contents", ()):
            yield each["Key"], each["Size"]
