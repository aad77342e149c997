"""Room that processes outside write into, and pins on what they read: theirs for as long as they live."""

import os
from collections.abc import Callable

import pytest
from awscrt import checksums  # type: ignore[import-untyped]

from tiergate.errors import MemoryFullError, OverloadedError, RequestError
from tiergate.memory.audit import audit
from tiergate.memory.memory import Memory, MemoryStats
from tiergate.memory.sharing import GRANT_TAG, Granting
from tiergate.model import Body

BLOCK = 4096
PURPOSE = "bucket/key"
Content = Callable[[str, int], bytes]


def grant(memory: Memory, guest: Memory, uid: str, size_bytes: int, *, limit_count: int = 8) -> Granting:
    """Room for a process, laid out; `guest` stands for it."""
    granting = memory.sharing.begin_grant(uid, size_bytes, guest.token, PURPOSE, None, limit_count)
    for _ in granting.steps():
        assert audit(memory.store) == []
    return granting


def fill(guest: Memory, granting: Granting, data: bytes) -> None:
    """Write as a guest does: into the mapping, at the extents that it was told."""
    at = 0
    for offset, length in (extent for block in granting.blocks for extent in block):
        piece = data[at : at + length]
        guest.store.slabs.view(offset, len(piece))[:] = piece
        at += length


def commit(memory: Memory, guest: Memory, uid: str, size_bytes: int | None = None, holder: str = "v1") -> Body:
    granted = memory.sharing.granted(uid, guest.token, PURPOSE, size_bytes)
    granted.take(holder)
    assert audit(memory.store) == []
    granted.prove()
    for view in granted.views():
        granted.write(view)
    body = granted.seal()
    memory.confirm(holder, [uid])
    granted.close()
    return body


def read(memory: Memory, body: Body) -> bytes | None:
    pin = memory.pin(body.uid)
    if pin is None:
        return None
    with pin:
        blocks = [pin.block(index) for index in range(body.block_count)]
        return None if None in blocks else b"".join(bytes(view) for views in blocks for view in views or ())


def same(one: MemoryStats, other: MemoryStats) -> bool:
    """Whether nothing is left of what happened between the two."""
    names = ("used_bytes", "receiving_bytes", "reserved_bytes", "pinned_bytes", "bodies", "dirty_bytes")
    return all(getattr(one, name) == getattr(other, name) for name in names)


@pytest.fixture
def guest(memory: Memory) -> Memory:
    return memory.share()


@pytest.mark.parametrize("size_bytes", [1, 512, BLOCK, BLOCK + 1, 40 * BLOCK + 77])
def test_what_a_guest_wrote_is_a_body_like_any_other(
    memory: Memory, guest: Memory, content: Content, size_bytes: int
) -> None:
    data = content("b", size_bytes)
    before = memory.stats()
    fill(guest, grant(memory, guest, "b", size_bytes), data)
    assert read(memory, Body("b", size_bytes)) is None
    body = commit(memory, guest, "b")
    assert read(memory, body) == data
    for index in range(body.block_count):
        assert body.block_checksum(index) == checksums.crc64nvme(data[index * BLOCK : (index + 1) * BLOCK])
    assert memory.stats().pinned_bytes > 0
    assert memory.sharing.release(guest.token, [("b", GRANT_TAG)]) == 1
    assert read(memory, body) == data
    memory.drop("v1", ["b"])
    assert same(memory.stats(), before)
    assert audit(memory.store) == []


@pytest.mark.parametrize("size_bytes", [0, 1, BLOCK, 3 * BLOCK + 5])
def test_what_a_grant_has_beyond_its_body_is_given_back(
    memory: Memory, guest: Memory, content: Content, size_bytes: int
) -> None:
    data = content("b", size_bytes)
    fill(guest, grant(memory, guest, "b", 20 * BLOCK), data)
    body = commit(memory, guest, "b", size_bytes)
    assert (body.size_bytes, read(memory, body) or b"") == (size_bytes, data)
    assert memory.stats().used_bytes == -(-size_bytes // 512) * 512
    memory.sharing.release(guest.token, [("b", GRANT_TAG)])
    assert audit(memory.store) == []


def test_grants_of_a_dead_guest_are_given_back(memory: Memory, guest: Memory, content: Content) -> None:
    before = memory.stats()
    fill(guest, grant(memory, guest, "open", 3 * BLOCK), content("open", 3 * BLOCK))
    granting = memory.sharing.begin_grant("half", 40 * BLOCK, guest.token, PURPOSE, None, 8)
    next(iter(granting.steps()))
    memory.reap()
    assert memory.stats().receiving_bytes > 0, "it lives"
    guest.close()
    assert memory.reap() == 2
    assert same(memory.stats(), before)
    assert audit(memory.store) == []


def test_death_of_a_guest_whose_body_is_being_committed_changes_nothing(
    memory: Memory, guest: Memory, content: Content
) -> None:
    data = content("b", 3 * BLOCK)
    fill(guest, grant(memory, guest, "b", len(data)), data)
    granted = memory.sharing.granted("b", guest.token, PURPOSE, None)
    granted.take("v1")
    guest.close()
    memory.reap()
    granted.prove()
    for view in granted.views():
        granted.write(view)
    body = granted.seal()
    granted.close()
    assert read(memory, body) == data
    assert audit(memory.store) == []


def test_death_of_a_guest_before_its_grant_is_taken_is_told_and_its_bytes_stay_until_then(
    memory: Memory, guest: Memory, content: Content
) -> None:
    data = content("b", 3 * BLOCK)
    before = memory.stats()
    fill(guest, grant(memory, guest, "b", len(data)), data)
    granted = memory.sharing.granted("b", guest.token, PURPOSE, None)
    guest.close()
    memory.reap()
    other = memory.receive("other", 3 * BLOCK, "v2")
    other.write(bytes(3 * BLOCK))
    assert b"".join(map(bytes, granted.views())) == data
    with pytest.raises(RequestError) as found:
        granted.take("v1")
    assert found.value.code == "NoSuchGrant"
    granted.close()
    other.abort()
    assert same(memory.stats(), before)


def test_death_of_the_process_that_commits_leaves_the_guest_its_bytes(
    memory: Memory, guest: Memory, content: Content
) -> None:
    data = content("b", 5 * BLOCK)
    before = memory.stats()
    worker = memory.share()
    granting = grant(memory, guest, "b", len(data))
    fill(guest, granting, data)
    worker.sharing.granted("b", guest.token, PURPOSE, None).take("v1")
    worker.close()
    memory.reap()
    assert audit(memory.store) == []
    other = memory.receive("other", 5 * BLOCK, "v2")
    other.write(bytes(5 * BLOCK))
    kept = b"".join(bytes(guest.store.slabs.view(*extent)) for block in granting.blocks for extent in block)
    assert kept == data, "whoever wrote it may have to send it again"
    other.abort()
    assert memory.sharing.release(guest.token, [("b", GRANT_TAG)]) == 1
    assert same(memory.stats(), before)
    assert audit(memory.store) == []


def test_grant_that_is_not_used_is_given_back(memory: Memory, guest: Memory) -> None:
    before = memory.stats()
    grant(memory, guest, "b", 7 * BLOCK)
    assert memory.sharing.release(guest.token, [("b", GRANT_TAG), ("b", GRANT_TAG), ("other", "f00")]) == 1
    assert same(memory.stats(), before)
    assert audit(memory.store) == []


def test_what_a_process_was_never_told_of_is_given_back_by_its_name(memory: Memory, guest: Memory) -> None:
    before = memory.stats()
    stranger = memory.share()
    for uid, owner, tag in (("a", guest, "t1"), ("b", guest, "t1"), ("c", guest, "t2"), ("d", stranger, "t1")):
        granting = memory.sharing.begin_grant(uid, BLOCK, owner.token, PURPOSE, None, 8, tag)
        for _ in granting.steps():
            pass
    assert memory.sharing.release(guest.token, [("", "t1")]) == 2
    assert not memory.is_known("a")
    assert not memory.is_known("b")
    assert memory.is_known("c")
    assert memory.is_known("d")
    assert memory.sharing.release(guest.token, [("", "t2"), ("", "t3")]) == 1
    assert memory.sharing.release(stranger.token, [("", "t1")]) == 1
    assert same(memory.stats(), before)


def test_use_of_a_grant_is_refused_to_all_but_its_own(memory: Memory, guest: Memory) -> None:
    grant(memory, guest, "b", BLOCK)
    stranger = memory.share()
    for uid, token, purpose, size_bytes, code in (
        ("b", stranger.token, PURPOSE, None, "NoSuchGrant"),
        ("b", guest.token, "bucket/other", None, "NoSuchGrant"),
        ("c", guest.token, PURPOSE, None, "NoSuchGrant"),
        ("b", guest.token, PURPOSE, BLOCK + 1, "InvalidGrant"),
        ("c", guest.token, PURPOSE, BLOCK + 1, "NoSuchGrant"),
        ("", guest.token, PURPOSE, None, "NoSuchGrant"),
        ("a\0b", guest.token, PURPOSE, None, "NoSuchGrant"),
        ("\ud800", guest.token, PURPOSE, None, "NoSuchGrant"),
        ("b" * 2000, guest.token, PURPOSE, None, "NoSuchGrant"),
    ):
        with pytest.raises(RequestError) as found:
            memory.sharing.granted(uid, token, purpose, size_bytes)
        assert found.value.code == code
    commit(memory, guest, "b")
    with pytest.raises(RequestError) as found:
        memory.sharing.granted("b", guest.token, PURPOSE, None)
    assert found.value.code == "NoSuchGrant"


@pytest.mark.parametrize(
    ("uid", "tag"), [("\ud800", "t1"), ("a\0b", "t1"), ("b" * 2000, "t1"), ("b", "\ud800"), ("b", "")]
)
def test_release_of_what_has_no_name_is_refused(memory: Memory, guest: Memory, uid: str, tag: str) -> None:
    with pytest.raises(RequestError) as found:
        memory.sharing.release(guest.token, [(uid, tag)])
    assert found.value.code == "InvalidArgument"


def test_own_receptions_are_no_grants(memory: Memory) -> None:
    receiving = memory.receive("b", BLOCK, "v1")
    with pytest.raises(RequestError, match="no such grant"):
        memory.sharing.granted("b", memory.token, "", None)
    receiving.abort()
    assert audit(memory.store) == []


def test_grants_of_one_process_and_all_together_are_bounded(memory: Memory, guest: Memory) -> None:
    grant(memory, guest, "a", BLOCK, limit_count=2)
    grant(memory, guest, "b", BLOCK, limit_count=2)
    with pytest.raises(OverloadedError, match="too many"):
        grant(memory, guest, "c", BLOCK, limit_count=2)
    before = memory.stats()
    with pytest.raises(MemoryFullError):
        grant(memory, guest, "d", memory.stats().budget_bytes)
    assert same(memory.stats(), before)


@pytest.mark.parametrize(
    "token", ["", "../leases/x", "..", "/etc/passwd", "0123456789abcdef", "0123456789ABCDEF", "x" * 16]
)
def test_lease_must_be_the_name_of_a_living_one(memory: Memory, token: str) -> None:
    with pytest.raises(RequestError) as found:
        memory.sharing.check(token)
    assert found.value.code == "InvalidLease"
    memory.sharing.check(memory.token)


def put(memory: Memory, uid: str, data: bytes) -> Body:
    receiving = memory.receive(uid, len(data), uid)
    receiving.write(data)
    body = receiving.seal()
    memory.confirm(uid, [uid])
    memory.clean(uid, [uid])
    return body


def test_mapped_bytes_are_where_it_says_and_stay_until_released(
    memory: Memory, guest: Memory, content: Content
) -> None:
    one, two = content("one", 3 * BLOCK + 10), content("two", 5 * BLOCK)
    bodies = put(memory, "one", one), put(memory, "two", two)
    spans = [(bodies[0], BLOCK - 3, len(one)), (bodies[1], 0, 2 * BLOCK + 1)]
    extents = memory.sharing.map(guest.token, "a1", spans, 100)
    assert extents is not None
    wanted = one[BLOCK - 3 :] + two[: 2 * BLOCK + 1]
    assert b"".join(bytes(guest.store.slabs.view(*extent)) for extent in extents) == wanted
    assert memory.sharing.map(guest.token, "a2", spans, 100) == extents
    assert audit(memory.store) == []

    def press() -> None:
        """Let go of all that may go."""
        with pytest.raises(MemoryFullError):
            memory.receive("press", memory.stats().room_bytes - BLOCK, "v9")
        big = memory.receive("big", memory.stats().available_bytes // 2, "v9")
        big.write(os.urandom(BLOCK))
        big.abort()
        for uid in ("one", "two"):
            memory.drop(uid, [uid])

    press()
    assert memory.sharing.release(guest.token, [("one", "a1"), ("two", "a1")]) == 2
    assert b"".join(bytes(guest.store.slabs.view(*extent)) for extent in extents) == wanted, "the other pin holds it"
    assert memory.stats().pinned_bytes > 0
    guest.close()
    assert memory.reap() == 2
    assert memory.stats().used_bytes == 0
    assert audit(memory.store) == []


def test_what_is_not_all_in_memory_is_not_mapped(memory: Memory, guest: Memory, content: Content) -> None:
    data = content("b", 4 * BLOCK)
    body = Body("b", len(data))
    for index in (0, 2):
        receiving = memory.receive_block(body, index, "v1")
        assert receiving is not None
        receiving.write(data[index * BLOCK : (index + 1) * BLOCK])
        receiving.seal()
    assert memory.sharing.map(guest.token, "a1", [(body, 0, BLOCK)], 100) is not None
    assert memory.sharing.map(guest.token, "a2", [(body, 0, BLOCK + 1)], 100) is None
    assert memory.sharing.map(guest.token, "a3", [(body, 0, BLOCK), (Body("c", 5), 0, 5)], 100) is None
    assert memory.sharing.map(guest.token, "a4", [(body, 2 * BLOCK, 3 * BLOCK)], 1) is None, "too many pins"
    assert memory.sharing.release(guest.token, [("b", tag) for tag in ("a1", "a2", "a3", "a4")]) == 1
    assert memory.stats().pinned_bytes == 0
    assert audit(memory.store) == []
