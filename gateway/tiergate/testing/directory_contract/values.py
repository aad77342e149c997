"""The names, versions and requests that the contract's tests are written with."""

from collections.abc import Sequence
from dataclasses import replace

from tiergate.directory.base import Committed, Directory, Intent
from tiergate.model import (
    NO_BASE,
    UNKNOWN_BASE,
    Body,
    Holder,
    ObjectName,
    Part,
    Pending,
    Plan,
    Record,
    Role,
    Upload,
    Version,
)

BUCKET = "bucket"
SHARD = ObjectName(BUCKET, "run/step_1/__0_0.distcp")
MARKER = ObjectName(BUCKET, "run/step_1/.metadata")
RUN_MARKER = ObjectName(BUCKET, "run/.metadata")


def object_name(key: str, bucket: str = BUCKET) -> ObjectName:
    """A name in the bucket that most tests use."""
    return ObjectName(bucket, key)


def make_version(uid: str, size_bytes: int = 10, *, foreign: bool = False) -> Version:
    """A version of one part, with something in every field that must come back as it was."""
    body = Body(f"body-{uid}", size_bytes, b"\x01\x02\x03\x04\x05\x06\x07\x08")
    part = Part(1, body, f"etag-{uid}", 1_700_000_000, {"crc32": "AAAAAA=="})
    return Version(
        uid=uid,
        size_bytes=size_bytes,
        etag=f"etag-{uid}",
        modified_s=1_700_000_000,
        parts=(part,),
        headers={"content-type": "application/x-tensor"},
        metadata={"step": "ü"},
        tagging="a=b",
        checksums={"crc64nvme": "AAAAAAAAAAA="},
        checksum_type="FULL_OBJECT",
        foreign=foreign,
    )


def make_intent(
    role: Role = Role.SMALL,
    *,
    start_revision: int = 0,
    now_s: float = 1000.0,
    base: str = UNKNOWN_BASE,
    guard: int | None = None,
    conditional: bool = False,
    holders: tuple[Holder, ...] = (),
    parked: bool = False,
    plan: Plan | None = None,
    points_to: tuple[str, ...] = (),
) -> Intent:
    """An unconditional write of a small object, unless said otherwise."""
    return Intent(role, start_revision, now_s, base, guard, conditional, holders, parked, plan, points_to)


def make_upload(upload_id: str, name: ObjectName = SHARD, started_s: float = 5.0) -> Upload:
    """A client's upload without parts."""
    return Upload(upload_id, name, make_version(upload_id, 0), started_s, "crc32", "COMPOSITE")


def make_part(number: int, uid: str) -> Part:
    """A part of an upload."""
    return Part(number, Body(uid, 10), f"etag-{uid}", 7, {"crc32": "BBBBBB=="})


def make_completed(uid: str, *parts: Part) -> Version:
    """What an upload of these parts becomes."""
    return replace(make_version(uid), parts=parts)


async def put(
    directory: Directory, name: ObjectName, uid: str, intent: Intent | None = None, size_bytes: int = 10
) -> Committed:
    """Commit a version of its own kind."""
    return await directory.put(name, make_version(uid, size_bytes), intent or make_intent())


async def record_of(directory: Directory, name: ObjectName) -> Record:
    """The record of a key that must have one."""
    record = (await directory.get(name)).record
    assert record is not None
    return record


async def pending_of(directory: Directory, name: ObjectName) -> Pending:
    """The pending write of a key that must have one."""
    pending = (await directory.get(name)).pending
    assert pending is not None
    return pending


async def put_clean(directory: Directory, name: ObjectName, uid: str, etag: str, role: Role = Role.SMALL) -> None:
    """A version that was committed and written back."""
    await put(directory, name, uid, make_intent(role))
    await directory.begin(name, uid, NO_BASE)
    assert await directory.persisted(name, uid, etag, 2000.0) is not None


def keys_of(found: Sequence[Record | Pending | Upload]) -> list[str]:
    """The keys, in the order found."""
    return [item.name.key for item in found]


AWKWARD_KEYS = sorted(
    {
        "a",
        "a/",
        "a/b",
        "a0",
        "ab",
        "é",
        "\uffff",
        "\U0001f600",
        "~",
        " ",
        *("p/" + "x" * length for length in (398, 399, 400, 401, 468, 469, 470, 471, 472, 473, 500, 1022)),
        *("p/" + "x" * 470 + tail for tail in ("0", "1", "/0", "/00", "é", "\U0001f600", "x" * 500 + "!")),
        *("q/" + "é" * length for length in (200, 233, 234, 235, 236, 500, 511)),
        *("q/" + "é" * 300 + tail for tail in ("a", "b", "/a", "/b/c")),
    },
    key=str.encode,
)
"""Keys around the bound of what LMDB can order: equal prefixes, multi-byte characters, up to 1,024 bytes."""
