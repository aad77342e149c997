"""One process's view of the node's memory: receiving, pinning, holding, evicting, recovering."""

import errno
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from awscrt import checksums  # type: ignore[import-untyped]

from tiergate import model
from tiergate.clock import Clock
from tiergate.errors import ConfigError, IntegrityError, InvariantError, MemoryFullError
from tiergate.memory.audit import audit
from tiergate.memory.memory import Memory, MemoryLimits
from tiergate.model import Body

BLOCK = 4096
Content = Callable[[str, int], bytes]


def put(memory: Memory, uid: str, data: bytes, holder: str = "v1", *, confirm: bool = True) -> Body:
    receiving = memory.receive(uid, len(data), holder)
    receiving.write(data)
    body = receiving.seal()
    if confirm:
        memory.confirm(holder, [uid])
    return body


def put_clean(memory: Memory, uid: str, data: bytes, holder: str = "v1") -> Body:
    body = put(memory, uid, data, holder)
    memory.clean(holder, [uid])
    return body


def read(memory: Memory, body: Body) -> bytes | None:
    """The whole body, None unless all of it is there."""
    pin = memory.pin(body.uid)
    if pin is None:
        return None
    with pin:
        blocks = [pin.block(index) for index in range(body.block_count)]
        if None in blocks:
            return None
        return b"".join(bytes(view) for views in blocks for view in views or ())


# -- receiving


@pytest.mark.parametrize("size_bytes", [0, 1, 511, 512, BLOCK - 1, BLOCK, BLOCK + 1, 11 * BLOCK + 77])
def test_receive_any_size_is_read_back_with_block_checksums(memory: Memory, content: Content, size_bytes: int) -> None:
    data = content("b", size_bytes)
    body = put(memory, "b", data)
    assert body.size_bytes == size_bytes
    assert read(memory, body) == data
    assert memory.holds_whole(body)
    for index in range(body.block_count):
        assert body.block_checksum(index) == checksums.crc64nvme(data[index * BLOCK : (index + 1) * BLOCK])
    assert len(body.blocks) == 8 * body.block_count


@pytest.mark.parametrize("piece_bytes", [1, 7, 512, 4095, 4097, 9000])
def test_write_in_pieces_of_any_size_gives_the_same_body(memory: Memory, content: Content, piece_bytes: int) -> None:
    data = content("b", 3 * BLOCK + 5)
    receiving = memory.receive("b", len(data), "v1")
    for start in range(0, len(data), piece_bytes):
        receiving.write(memoryview(data)[start : start + piece_bytes])
        assert receiving.received_bytes == min(len(data), start + piece_bytes)
    body = receiving.seal()
    assert read(memory, body) == data
    assert body.blocks == put(memory, "other", data).blocks


def test_receive_unsealed_is_invisible(memory: Memory, content: Content) -> None:
    receiving = memory.receive("b", BLOCK, "v1")
    receiving.write(content("b", BLOCK))
    assert memory.pin("b") is None
    assert not memory.holds_whole(Body("b", BLOCK))
    assert not memory.hold("b", "v2", dirty=True)
    assert memory.stats().receiving_bytes == BLOCK
    receiving.abort()
    empty = memory.receive("e", 0, "v1")
    assert memory.pin("e") is None
    empty.abort()
    assert memory.stats().used_bytes == 0


def test_seal_short_body_raises_and_abort_gives_all_back(memory: Memory) -> None:
    receiving = memory.receive("b", 30 * BLOCK, "v1")
    receiving.write(bytes(BLOCK + 1))
    with pytest.raises(InvariantError):
        receiving.seal()
    receiving.abort()
    receiving.abort()
    stats = memory.stats()
    assert (stats.used_bytes, stats.reserved_bytes, stats.bodies) == (0, 0, 0)


def test_write_more_than_declared_raises(memory: Memory) -> None:
    receiving = memory.receive("b", 5, "v1")
    with pytest.raises(InvariantError):
        receiving.write(bytes(6))
    receiving.abort()
    with pytest.raises(InvariantError):
        receiving.write(b"x")


def test_abort_after_seal_unconfirmed_gives_back_confirmed_keeps(memory: Memory, content: Content) -> None:
    first = memory.receive("a", BLOCK, "v1")
    first.write(content("a", BLOCK))
    first.seal()
    first.abort()
    assert memory.pin("a") is None
    second = memory.receive("b", BLOCK, "v2")
    second.write(content("b", BLOCK))
    body = second.seal()
    memory.confirm("v2")
    second.abort()
    assert read(memory, body) == content("b", BLOCK)


def test_receive_whole_reservation_refused_leaves_nothing(memory: Memory) -> None:
    put(memory, "a", bytes(40 * BLOCK))
    put_clean(memory, "c", bytes(8 * BLOCK), "v2")
    with pytest.raises(MemoryFullError):
        memory.receive("b", 25 * BLOCK, "v3")
    assert memory.holds_whole(Body("c", 8 * BLOCK))
    stats = memory.stats()
    assert (stats.bodies, stats.reserved_bytes, stats.evictions) == (2, 0, 0)
    assert stats.available_bytes == 24 * BLOCK
    memory.receive("b", 24 * BLOCK, "v3").abort()


def test_receive_whole_bodies_leave_the_spare_room_to_fills(tmp_path: Path, limits: MemoryLimits, clock: Clock) -> None:
    memory = Memory.open(tmp_path / "spare", replace(limits, spare_bytes=4 * BLOCK), clock)
    with pytest.raises(MemoryFullError):
        memory.receive("a", 61 * BLOCK, "v1")
    put(memory, "a", bytes(60 * BLOCK))
    assert memory.stats().available_bytes == 0
    unsized = memory.receive_unsized("b", "v2", 10 * BLOCK)
    with pytest.raises(MemoryFullError):
        unsized.write(bytes(BLOCK))
    unsized.abort()
    for index in range(4):
        filling = memory.receive_block(Body("c", 5 * BLOCK), index, "v3")
        assert filling is not None
        filling.write(bytes(BLOCK))
        filling.seal()
    with pytest.raises(MemoryFullError):
        memory.receive_block(Body("c", 5 * BLOCK), 4, "v3")
    memory.close()


def test_receive_reservations_count_before_a_byte_came(memory: Memory) -> None:
    big = memory.receive("a", 60 * BLOCK, "v1")
    with pytest.raises(MemoryFullError):
        memory.receive("b", 5 * BLOCK, "v2")
    small = memory.receive("c", 4 * BLOCK, "v3")
    big.write(bytes(60 * BLOCK))
    small.write(bytes(4 * BLOCK))
    big.seal()
    small.seal()
    assert memory.stats().used_bytes == 64 * BLOCK


def test_receive_unsized_trims_its_last_block(memory: Memory, content: Content) -> None:
    data = content("b", 2 * BLOCK + 600)
    receiving = memory.receive_unsized("b", "v1", 20 * BLOCK)
    receiving.write(data)
    body = receiving.seal()
    assert read(memory, body) == data
    assert memory.stats().used_bytes == 2 * BLOCK + 1024
    assert body.blocks == put(memory, "other", data).blocks


def test_receive_unsized_empty_seals(memory: Memory) -> None:
    body = memory.receive_unsized("b", "v1", BLOCK).seal()
    assert body == Body("b", 0)
    assert read(memory, body) == b""


def test_receive_unsized_past_limit_raises_memory_full(memory: Memory) -> None:
    receiving = memory.receive_unsized("b", "v1", BLOCK + 10)
    receiving.write(bytes(BLOCK + 10))
    with pytest.raises(MemoryFullError):
        receiving.write(b"x")
    receiving.abort()
    assert memory.stats().used_bytes == 0


def test_receive_unsized_without_room_raises_and_aborts(memory: Memory) -> None:
    put(memory, "a", bytes(60 * BLOCK))
    receiving = memory.receive_unsized("b", "v1", 100 * BLOCK)
    with pytest.raises(MemoryFullError):
        receiving.write(bytes(5 * BLOCK))
    receiving.abort()
    assert memory.stats().used_bytes == 60 * BLOCK


# -- eviction and pins


def test_evict_takes_least_recently_used_clean_bodies_only(memory: Memory, content: Content) -> None:
    bodies = {uid: put_clean(memory, uid, content(uid, 15 * BLOCK), f"v{uid}") for uid in "abc"}
    dirty = put(memory, "d", content("d", 15 * BLOCK), "vd")
    assert read(memory, bodies["a"]) is not None
    put(memory, "e", content("e", 15 * BLOCK), "ve")
    held = {uid: memory.holds_whole(body) for uid, body in bodies.items()}
    assert held == {"a": True, "b": False, "c": True}
    assert read(memory, dirty) == content("d", 15 * BLOCK)
    assert memory.stats().evictions == 1


def test_pinned_reader_keeps_old_bytes_through_overwrite_drop_and_pressure(memory: Memory, content: Content) -> None:
    data = content("old", 10 * BLOCK)
    put(memory, "old", data)
    pin = memory.pin("old")
    assert pin is not None
    views = [view for index in range(5) for view in pin.block(index) or ()]
    put(memory, "new", content("new", 10 * BLOCK), "v2")
    memory.drop("v1", ["old"])
    for turn in range(20):
        put_clean(memory, f"press{turn}", content(f"press{turn}", 30 * BLOCK), f"p{turn}")
    with pytest.raises(MemoryFullError):
        memory.receive("huge", 45 * BLOCK, "vh")
    assert b"".join(bytes(view) for view in views) == data[: 5 * BLOCK]
    late = [view for index in range(5, 10) for view in pin.block(index) or ()]
    assert b"".join(bytes(view) for view in late) == data[5 * BLOCK :]
    assert memory.stats().pinned_bytes == 10 * BLOCK
    pin.release()
    pin.release()
    assert memory.pin("old") is None
    memory.receive("huge", 45 * BLOCK, "vh").abort()


def test_pinned_clean_body_is_not_evicted(memory: Memory, content: Content) -> None:
    body = put_clean(memory, "a", content("a", 40 * BLOCK))
    with memory.pin("a") or pytest.fail("not pinned"):
        with pytest.raises(MemoryFullError):
            memory.receive("b", 30 * BLOCK, "v2")
        assert memory.holds_whole(body)
    memory.receive("b", 30 * BLOCK, "v2").abort()
    assert not memory.holds_whole(body)


def test_pins_of_two_processes_both_protect(memory: Memory, content: Content) -> None:
    other = memory.share()
    put(memory, "a", content("a", BLOCK))
    assert not memory.is_pinned("a")
    mine, theirs, again = memory.pin("a"), other.pin("a"), memory.pin("a")
    assert mine is not None
    assert theirs is not None
    assert again is not None
    memory.drop("v1", ["a"])
    mine.release()
    again.release()
    assert memory.is_pinned("a")
    assert [bytes(view) for view in theirs.block(0) or ()] == [content("a", BLOCK)]
    theirs.release()
    assert not memory.is_pinned("a")
    assert memory.stats().bodies == 0
    other.close()


def test_pin_block_views_are_read_only_and_end_with_the_pin(memory: Memory) -> None:
    put(memory, "a", bytes(10))
    pin = memory.pin("a")
    assert pin is not None
    views = pin.block(0) or []
    assert [(view.readonly, len(view)) for view in views] == [(True, 10)]
    assert pin.block(1) is None
    pin.release()
    with pytest.raises(InvariantError):
        pin.block(0)


# -- filling single blocks


def fill(memory: Memory, body: Body, index: int, data: bytes, holder: str = "v1") -> None:
    receiving = memory.receive_block(body, index, holder)
    assert receiving is not None
    receiving.write(data[index * BLOCK : (index + 1) * BLOCK])
    receiving.seal()


def test_receive_block_fills_a_body_piece_by_piece(memory: Memory, content: Content) -> None:
    data = content("a", 2 * BLOCK + 9)
    body = Body("a", len(data))
    fill(memory, body, 1, data)
    pin = memory.pin("a")
    assert pin is not None
    assert pin.block(0) is None
    assert not memory.holds_whole(body)
    assert not memory.hold("a", "v2", dirty=False)
    fill(memory, body, 0, data)
    fill(memory, body, 2, data)
    assert [bytes(view) for view in pin.block(0) or ()] == [data[:BLOCK]]
    pin.release()
    assert memory.holds_whole(body)
    assert read(memory, body) == data
    assert memory.stats().evictable_bytes == 2 * BLOCK + 512


def test_receive_block_unsealed_is_invisible_to_a_pin(memory: Memory, content: Content) -> None:
    data = content("a", 2 * BLOCK)
    body = Body("a", len(data))
    fill(memory, body, 0, data)
    receiving = memory.receive_block(body, 1, "v1")
    assert receiving is not None
    receiving.write(data[BLOCK:])
    pin = memory.pin("a")
    assert pin is not None
    assert pin.block(1) is None
    receiving.seal()
    assert [bytes(view) for view in pin.block(1) or ()] == [data[BLOCK:]]
    pin.release()


def test_receive_block_twice_is_refused_until_aborted(memory: Memory, content: Content) -> None:
    other = memory.share()
    body = Body("a", 2 * BLOCK)
    first = memory.receive_block(body, 0, "v1")
    assert first is not None
    assert other.receive_block(body, 0, "v1") is None
    first.abort()
    first.abort()
    assert memory.stats().bodies == 0
    fill(other, body, 0, content("a", 2 * BLOCK))
    assert memory.receive_block(body, 0, "v1") is None
    other.close()


def test_receive_block_wrong_bytes_raises_integrity_and_gives_back(memory: Memory, content: Content) -> None:
    data = content("a", BLOCK + 3)
    proved = put(memory, "a", data)
    memory.drop("v1", ["a"])
    receiving = memory.receive_block(proved, 1, "v1")
    assert receiving is not None
    receiving.write(b"bad")
    with pytest.raises(IntegrityError):
        receiving.seal()
    short = memory.receive_block(proved, 0, "v1")
    assert short is not None
    short.write(data[:100])
    with pytest.raises(IntegrityError):
        short.seal()
    assert memory.stats().bodies == 0
    fill(memory, proved, 0, data)
    fill(memory, proved, 1, data)
    assert read(memory, proved) == data


def test_receive_block_evicts_others_never_its_own_body(memory: Memory, content: Content) -> None:
    data = content("a", 64 * BLOCK)
    body = Body("a", 65 * BLOCK)
    other = put_clean(memory, "o", content("o", BLOCK), "vo")
    for index in range(64):
        fill(memory, body, index, data)
    assert not memory.holds_whole(other)
    with pytest.raises(MemoryFullError):
        memory.receive_block(body, 64, "v1")
    pin = memory.pin("a")
    assert pin is not None
    assert [bytes(view) for view in pin.block(3) or ()] == [data[3 * BLOCK : 4 * BLOCK]]
    pin.release()


# -- holders


def test_hold_shares_bytes_until_the_last_holder_goes(memory: Memory, content: Content) -> None:
    body = put(memory, "a", content("a", BLOCK))
    assert memory.hold("a", "v2", dirty=True)
    memory.confirm("v2", ["a"])
    memory.clean("v1", ["a"])
    assert memory.stats().dirty_bytes == BLOCK
    memory.drop("v1", ["a"])
    assert read(memory, body) == content("a", BLOCK)
    memory.clean("v2", ["a"])
    assert memory.stats().evictable_bytes == BLOCK
    assert memory.hold("a", "v2", dirty=True)
    assert memory.stats().dirty_bytes == BLOCK
    assert memory.hold("a", "v2", dirty=False)
    assert memory.stats().dirty_bytes == BLOCK
    memory.drop("v2", ["a"])
    assert memory.stats().used_bytes == 0


def test_hold_all_is_all_or_nothing(memory: Memory, content: Content) -> None:
    put(memory, "a", content("a", BLOCK))
    assert not memory.hold_all(["a", "absent"], "v2", dirty=True)
    memory.drop("v1", ["a"])
    assert memory.stats().bodies == 0


def test_clean_and_drop_of_strangers_do_nothing(memory: Memory, content: Content) -> None:
    put(memory, "a", content("a", BLOCK))
    memory.clean("v9", ["a", "absent"])
    memory.drop("v9", ["a", "absent"])
    assert memory.stats().dirty_bytes == BLOCK


# -- recovery


def die(memory: Memory) -> None:
    """What the kernel does for a process that is killed."""
    memory.store.lease.release()


def test_reap_gives_back_what_the_dead_were_doing_and_spares_the_living(memory: Memory, content: Content) -> None:
    dead, alive = memory.share(), memory.share()
    put(memory, "a", content("a", 2 * BLOCK))
    for other in (dead, alive):
        name = other.store.lease.token
        other.receive(f"r{name}", 9 * BLOCK, "vr").write(bytes(BLOCK))
        assert other.receive_block(Body(f"f{name}", 2 * BLOCK), 0, "vf") is not None
        assert other.pin("a") is not None
    before = memory.stats()
    die(dead)
    memory.reap()
    memory.reap()
    after = memory.stats()
    assert before.receiving_bytes == 2 * after.receiving_bytes
    assert before.reserved_bytes == 2 * after.reserved_bytes
    assert after.bodies == 3
    memory.drop("v1", ["a"])
    assert memory.stats().pinned_bytes == 2 * BLOCK
    die(alive)
    memory.reap()
    assert memory.stats().bodies == 0
    assert [path.name for path in (memory.store.folder / "leases").iterdir()] == [memory.store.lease.token]


def test_reconcile_keeps_known_and_claimed_drops_the_rest(memory: Memory, content: Content) -> None:
    dead = memory.share()
    for uid in ("known", "unknown", "claimed", "orphan", "crossed"):
        owner = dead if uid in ("orphan", "crossed") else memory
        put(owner, uid, content(uid, BLOCK), f"v-{uid}", confirm=uid in ("known", "unknown"))
    die(dead)
    memory.reconcile({"v-known", "v-crossed"}, memory.mark())
    held = {uid for uid in ("known", "unknown", "claimed", "orphan", "crossed") if memory.holds_whole(Body(uid, BLOCK))}
    assert held == {"known", "claimed", "crossed"}
    memory.reconcile({"v-known"}, memory.mark())
    assert not memory.holds_whole(Body("crossed", BLOCK))


def test_reconcile_spares_what_was_confirmed_after_the_mark(memory: Memory, content: Content) -> None:
    put(memory, "a", content("a", BLOCK), "v1", confirm=False)
    mark = memory.mark()
    live: set[str] = set()  # The directory is read here, just before v1 is committed.
    memory.confirm("v1")
    memory.reconcile(live, mark)
    assert memory.holds_whole(Body("a", BLOCK))


def test_reconcile_spares_a_claim_whose_process_died_after_the_mark(memory: Memory, content: Content) -> None:
    other = memory.share()
    put(other, "a", content("a", BLOCK), "v1", confirm=False)
    mark = memory.mark()
    die(other)
    memory.reconcile(set(), mark)
    assert memory.holds_whole(Body("a", BLOCK))
    memory.reconcile(set(), memory.mark())
    assert not memory.holds_whole(Body("a", BLOCK))


# -- limits


def test_open_again_finds_bodies_and_goes_on(
    tmp_path: Path, limits: MemoryLimits, clock: Clock, content: Content
) -> None:
    first = Memory.open(tmp_path / "m", limits, clock)
    body = put(first, "a", content("a", 5 * BLOCK))
    first.close()
    second = Memory.open(tmp_path / "m", limits, clock)
    assert read(second, body) == content("a", 5 * BLOCK)
    assert audit(second.store) == []
    second.close()


def test_open_folder_of_another_layout_is_refused(tmp_path: Path, limits: MemoryLimits, clock: Clock) -> None:
    (tmp_path / "layout").write_text("tiergate memory 99\n")
    with pytest.raises(ConfigError, match="layout"):
        Memory.open(tmp_path, limits, clock)


def test_open_folder_with_foreign_files_is_refused(tmp_path: Path, limits: MemoryLimits, clock: Clock) -> None:
    (tmp_path / "photo.jpg").write_text("mine")
    with pytest.raises(ConfigError, match="not empty"):
        Memory.open(tmp_path, limits, clock)


def test_open_unusable_folder_raises_config_error(tmp_path: Path, limits: MemoryLimits, clock: Clock) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="memory folder"):
        Memory.open(tmp_path / "file" / "m", limits, clock)


def test_open_full_file_system_raises_config_error(
    tmp_path: Path, limits: MemoryLimits, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "posix_fallocate", no_space)
    with pytest.raises(ConfigError, match="No space"):
        Memory.open(tmp_path / "m", limits, clock)


def test_open_with_less_budget_than_grown_is_refused(tmp_path: Path, limits: MemoryLimits, clock: Clock) -> None:
    first = Memory.open(tmp_path / "m", limits, clock)
    put(first, "a", bytes(64 * BLOCK))
    first.close()
    less = MemoryLimits(limits.budget_bytes - 32 * BLOCK, limits.index_bytes, limits.slab_bytes)
    with pytest.raises(ConfigError, match="budget"):
        Memory.open(tmp_path / "m", less, clock)


@pytest.mark.parametrize(
    "limits",
    [MemoryLimits(1 << 20, 1 << 20, 512), MemoryLimits(1 << 30, 1, 512), MemoryLimits(1 << 30, 1 << 20, 0)],
)
def test_open_contradicting_limits_raises_config_error(tmp_path: Path, clock: Clock, limits: MemoryLimits) -> None:
    with pytest.raises(ConfigError):
        Memory.open(tmp_path / "m", limits, clock)


def no_space(*_: Any) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_grow_full_file_system_evicts_then_raises_memory_full(
    memory: Memory, clock: Any, content: Content, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = put_clean(memory, "a", content("a", 8 * BLOCK))
    with monkeypatch.context() as patched:
        patched.setattr(os, "posix_fallocate", no_space)
        put(memory, "b", content("b", 6 * BLOCK), "v2")
        assert not memory.holds_whole(body)
        with pytest.raises(MemoryFullError):
            put(memory, "c", content("c", 6 * BLOCK), "v3")
    memory.reap()
    assert memory.stats().slab_bytes == 8 * BLOCK
    clock.now_s += 60
    put(memory, "d", content("d", 6 * BLOCK), "v4")


def test_receive_full_index_evicts_then_refuses_and_still_lets_go(memory: Memory) -> None:
    uids = [f"empty-body-number-{number:08}" for number in range(100_000)]

    def put_all() -> None:
        for uid in uids:
            put(memory, uid, b"", "a-holder-of-forty-characters-or-so")

    with pytest.raises(MemoryFullError):
        put_all()
    uids = uids[: memory.stats().bodies]
    assert len(uids) > 1000
    stats = memory.stats()
    assert stats.index_used_bytes < stats.index_bytes
    memory.clean("a-holder-of-forty-characters-or-so", uids)
    for number in range(3000):
        put_clean(memory, f"later-{number}", b"", "v2")
    assert memory.stats().evictions > 0
    memory.drop("a-holder-of-forty-characters-or-so", uids)


def test_pack_many_sizes_wastes_under_a_tenth(tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    # A DCP save in miniature, a thousandth in all lengths but alignment: parts of 5, 8 and 50 MiB, some
    # small files; of two alternating checkpoints one is dropped while the next one arrives.
    monkeypatch.setattr(model, "BLOCK_BYTES", 64 << 10)
    memory = Memory.open(tmp_path / "m", MemoryLimits(81 << 20, 1 << 20, 1 << 20), clock)
    sizes = [(80 << 10) + 5, (128 << 10) + 777, (800 << 10) + 99, 8000, 900] * 12
    for step in range(30):
        for number, size_bytes in enumerate(sizes):
            put(memory, f"{step}-{number}", bytes(size_bytes), f"s{step}")
        if step >= 4:
            memory.drop(f"s{step - 4}", [f"{step - 4}-{number}" for number in range(len(sizes))])
    stats = memory.stats()
    held = 4 * sum(sizes)
    assert stats.used_bytes < held * 1.1
    assert stats.slab_bytes < (held + sum(sizes)) * 1.1 + (1 << 20)
    assert audit(memory.store) == []
    memory.close()
