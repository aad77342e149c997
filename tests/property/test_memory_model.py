"""The memory against a model of it: two processes that receive, fill, pin, hold, clean, drop, die and
recover.

The model knows which bytes every body has and what must be there; the audit checks the inventory against
itself after each step.
"""

import random
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from tiergate import model
from tiergate.clock import SystemClock
from tiergate.errors import IntegrityError, MemoryFullError
from tiergate.memory.audit import audit
from tiergate.memory.memory import BlockReceiving, Level, Memory, MemoryLimits, Pin, Rank, Receiving
from tiergate.memory.rows import aligned
from tiergate.model import Body

BLOCK = 2048
BLOCKS = 24
HOLDERS = ("v1", "v2", "v3")


def content(uid: str, size_bytes: int) -> bytes:
    return random.Random(uid).randbytes(size_bytes)


@dataclass
class Kept:
    """What the model knows of a sealed body. `holders`: whether dirty; `claims`: which process vouches."""

    body: Body
    present: set[int]
    holders: dict[str, bool] = field(default_factory=dict)
    claims: dict[str, int] = field(default_factory=dict)


@dataclass
class Reading:
    process: int
    uid: str
    pin: Pin
    blocks: set[int]


@dataclass
class Reception:
    process: int
    uid: str
    size_bytes: int
    holder: str
    receiving: Receiving
    sealed: bool = False


@dataclass
class Fill:
    process: int
    body: Body
    index: int
    holder: str
    receiving: BlockReceiving


class MemoryModel(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.kept: dict[str, Kept] = {}
        self.receptions: list[Reception] = []
        self.fills: list[Fill] = []
        self.readings: list[Reading] = []
        self.ranks: dict[str, Rank] = {}
        self.number = 0

    @initialize()
    def start(self) -> None:
        limits = MemoryLimits((1 << 20) + BLOCKS * BLOCK, 1 << 20, 5 * BLOCK)
        self.root = Memory.open(self.folder / "m", limits, SystemClock())
        self.processes = [self.root.share(), self.root.share()]

    def teardown(self) -> None:
        if hasattr(self, "root"):
            for process in self.processes:
                process.close()
            self.root.close()
        shutil.rmtree(self.folder)

    # -- what the model says

    def is_idle(self, uid: str) -> bool:
        """Nobody reads or fills the body."""
        at_work = {reading.uid for reading in self.readings} | {fill.body.uid for fill in self.fills}
        return uid not in at_work

    def may_vanish(self, uid: str) -> bool:
        is_pinned = uid in self.ranks and self.ranks[uid].level is Level.PINNED and bool(self.kept[uid].holders)
        return self.is_idle(uid) and not is_pinned and not any(self.kept[uid].holders.values())

    def firm_bytes(self) -> int:
        """What no eviction can free: needed bodies, and all that is promised."""
        total = sum(aligned(reception.size_bytes) for reception in self.receptions if not reception.sealed) + sum(
            aligned(fill.body.block_size_bytes(fill.index)) for fill in self.fills
        )
        for uid, kept in self.kept.items():
            if not self.may_vanish(uid):
                total += sum(aligned(kept.body.block_size_bytes(index)) for index in kept.present)
        return total

    def settle(self) -> None:
        """Forget what was evicted, which only idle clean bodies may be, and what nobody needs."""
        self.check_order()
        for uid, kept in list(self.kept.items()):
            gone = bool(kept.present or not kept.body.size_bytes) and not self.is_visible(uid)
            if not kept.holders and self.is_idle(uid):
                assert not self.is_visible(uid), f"{uid} leaked"
                del self.kept[uid]
                self.ranks.pop(uid, None)
            elif gone:
                assert self.may_vanish(uid), f"{uid} was lost"
                del self.kept[uid]
                self.ranks.pop(uid, None)

    def check_order(self) -> None:
        """Sets went whole, and those whose turn it was."""
        idle = [uid for uid, kept in self.kept.items() if kept.holders and kept.present and self.may_vanish(uid)]
        stayed = [uid for uid in idle if self.is_visible(uid)]
        for uid in set(idle) - set(stayed):
            rank = self.ranks.get(uid)
            late = rank.level if rank else Level.FIRST
            for other in (self.ranks.get(each) for each in stayed):
                assert rank is None or other != rank, "a set went in part"
                if other is None:
                    assert late is Level.FIRST
                elif rank is None:
                    assert other.level is not Level.FIRST
                else:
                    assert (other.level, other.order) >= (rank.level, rank.order)

    def is_visible(self, uid: str) -> bool:
        pin = self.root.pin(uid)
        if pin is not None:
            pin.release()
        return pin is not None

    def present(self, body: Body) -> set[int]:
        pin = self.root.pin(body.uid)
        if pin is None:
            return set()
        with pin:
            found = set()
            for index in range(body.block_count):
                views = pin.block(index)
                if views is not None:
                    found.add(index)
                    data = content(body.uid, body.size_bytes)[index * BLOCK : (index + 1) * BLOCK]
                    assert b"".join(views) == data
            return found

    @contextmanager
    def full_only_if(self, charge: int) -> Iterator[None]:
        firm = self.firm_bytes()
        try:
            yield
        except MemoryFullError:
            assert firm + charge > BLOCKS * BLOCK, "refused although there was room"
        else:
            assert firm + charge <= BLOCKS * BLOCK, "promised what there is not"

    # -- receiving

    @rule(process=st.integers(0, 1), size_bytes=st.integers(0, 12 * BLOCK), holder=st.sampled_from(HOLDERS))
    def receive(self, process: int, size_bytes: int, holder: str) -> None:
        self.number += 1
        uid = f"b{self.number}"
        with self.full_only_if(aligned(size_bytes)):
            receiving = self.processes[process].receive(uid, size_bytes, holder)
            self.receptions.append(Reception(process, uid, size_bytes, holder, receiving))
        self.settle()

    @precondition(lambda self: self.receptions)
    @rule(data=st.data(), share=st.floats(0, 1))
    def write(self, data: st.DataObject, share: float) -> None:
        reception = data.draw(st.sampled_from(self.receptions))
        at = reception.receiving.received_bytes
        if not reception.sealed:
            end = at + int((reception.size_bytes - at) * share)
            reception.receiving.write(content(reception.uid, reception.size_bytes)[at:end])
        self.settle()

    @precondition(lambda self: self.receptions)
    @rule(data=st.data())
    def seal(self, data: st.DataObject) -> None:
        reception = data.draw(st.sampled_from(self.receptions))
        if reception.sealed:
            return
        reception.receiving.write(content(reception.uid, reception.size_bytes)[reception.receiving.received_bytes :])
        self.settle()
        body = reception.receiving.seal()
        reception.sealed = True
        self.kept[reception.uid] = Kept(
            body,
            set(range(body.block_count)),
            {reception.holder: True},
            {reception.holder: reception.process},
        )

    @precondition(lambda self: self.receptions)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        reception = data.draw(st.sampled_from(self.receptions))
        self.receptions.remove(reception)
        reception.receiving.abort()
        kept = self.kept.get(reception.uid)
        if kept is not None and kept.claims.get(reception.holder) == reception.process:
            del kept.holders[reception.holder], kept.claims[reception.holder]
        self.settle()

    @rule(process=st.integers(0, 1), holder=st.sampled_from(HOLDERS))
    def confirm(self, process: int, holder: str) -> None:
        self.processes[process].confirm(holder)
        for kept in self.kept.values():
            if kept.claims.get(holder) == process:
                del kept.claims[holder]

    # -- filling

    @precondition(lambda self: self.kept)
    @rule(data=st.data(), process=st.integers(0, 1), holder=st.sampled_from(HOLDERS), fresh=st.booleans())
    def begin_fill(self, data: st.DataObject, process: int, holder: str, fresh: bool) -> None:
        body = self.kept[data.draw(st.sampled_from(sorted(self.kept)))].body
        if fresh or not body.block_count:
            self.number += 1
            body = Body(f"f{self.number}", data.draw(st.integers(1, 4 * BLOCK)))
        index = data.draw(st.integers(0, body.block_count - 1))
        kept = self.kept.get(body.uid)
        busy = any(fill.body.uid == body.uid and fill.index == index for fill in self.fills)
        if busy or (kept is not None and index in kept.present):
            assert self.processes[process].receive_block(body, index, holder) is None
            return
        # Its own body is not evicted for it, even where it could be otherwise.
        own = 0
        if kept is not None and self.may_vanish(body.uid):
            own = sum(aligned(body.block_size_bytes(other)) for other in kept.present)
        with self.full_only_if(aligned(body.block_size_bytes(index)) + own):
            receiving = self.processes[process].receive_block(body, index, holder)
            assert receiving is not None
            self.fills.append(Fill(process, body, index, holder, receiving))
            self.kept.setdefault(body.uid, Kept(body, set()))
        self.settle()

    @precondition(lambda self: self.fills)
    @rule(data=st.data(), end=st.sampled_from(["seal", "abort", "corrupt"]))
    def end_fill(self, data: st.DataObject, end: str) -> None:
        fill = data.draw(st.sampled_from(self.fills))
        self.fills.remove(fill)
        block = content(fill.body.uid, fill.body.size_bytes)[fill.index * BLOCK : (fill.index + 1) * BLOCK]
        kept = self.kept[fill.body.uid]
        if end == "abort":
            fill.receiving.abort()
        elif end == "corrupt":
            fill.receiving.write(block[:-1])
            with pytest.raises(IntegrityError):
                fill.receiving.seal()
        else:
            fill.receiving.write(block)
            fill.receiving.seal()
            kept.present.add(fill.index)
            kept.holders.setdefault(fill.holder, False)
        self.settle()

    # -- reading

    @precondition(lambda self: self.kept)
    @rule(data=st.data(), process=st.integers(0, 1))
    def pin(self, data: st.DataObject, process: int) -> None:
        uid = data.draw(st.sampled_from(sorted(self.kept)))
        kept = self.kept[uid]
        pin = self.processes[process].pin(uid)
        assert (pin is not None) == bool(kept.present or kept.body.size_bytes == 0)
        if pin is not None:
            self.readings.append(Reading(process, uid, pin, set(kept.present)))

    @precondition(lambda self: self.readings)
    @rule(data=st.data(), release=st.booleans())
    def read(self, data: st.DataObject, release: bool) -> None:
        reading = data.draw(st.sampled_from(self.readings))
        body = self.kept[reading.uid].body
        expected = content(body.uid, body.size_bytes)
        for index in range(body.block_count):
            views = reading.pin.block(index)
            assert (views is not None) == (index in self.kept[reading.uid].present)
            if views is not None:
                assert b"".join(views) == expected[index * BLOCK : (index + 1) * BLOCK]
        if release:
            self.readings.remove(reading)
            reading.pin.release()
            self.settle()

    # -- holders

    @precondition(lambda self: self.kept)
    @rule(data=st.data(), process=st.integers(0, 1), holder=st.sampled_from(HOLDERS), dirty=st.booleans())
    def hold(self, data: st.DataObject, process: int, holder: str, dirty: bool) -> None:
        uid = data.draw(st.sampled_from(sorted(self.kept)))
        kept = self.kept[uid]
        whole = len(kept.present) == kept.body.block_count
        assert self.processes[process].hold(uid, holder, dirty) == whole
        if whole:
            if holder not in kept.holders:
                kept.claims[holder] = process
            kept.holders[holder] = dirty or kept.holders.get(holder, False)

    @precondition(lambda self: self.kept)
    @rule(data=st.data(), process=st.integers(0, 1), holder=st.sampled_from(HOLDERS), drop=st.booleans())
    def clean_or_drop(self, data: st.DataObject, process: int, holder: str, drop: bool) -> None:
        uid = data.draw(st.sampled_from(sorted(self.kept)))
        kept = self.kept[uid]
        claimant = kept.claims.get(holder)
        if claimant is not None and claimant != process:
            return  # Only the process that claims a holder acts for it.
        if not drop:
            self.processes[process].clean(holder, [uid])
            if holder in kept.holders:
                kept.holders[holder] = False
        else:
            self.processes[process].drop(holder, [uid])
            kept.holders.pop(holder, None)
            kept.claims.pop(holder, None)
        self.settle()

    # -- sets

    @precondition(lambda self: self.kept)
    @rule(data=st.data(), process=st.integers(0, 1))
    def rank(self, data: st.DataObject, process: int) -> None:
        levels = st.builds(Rank, st.sampled_from(list(Level)), st.integers(0, 2), st.just(0))
        ranks = data.draw(st.dictionaries(st.sampled_from(sorted(self.kept)), levels))
        self.processes[process].rank(ranks | {"unknown": Rank(Level.FIRST, 0, 0)}, SystemClock().monotonic_s())
        self.ranks = ranks
        self.settle()

    # -- death and recovery

    @rule(process=st.integers(0, 1), live=st.sets(st.sampled_from(HOLDERS)))
    def die_and_recover(self, process: int, live: set[str]) -> None:
        dead = self.processes[process]
        dead.store.lease.release()
        dead.store.slabs.close()
        self.processes[process] = self.root.share()
        self.processes[1 - process].reconcile(set(live), self.root.mark())
        self.receptions = [one for one in self.receptions if one.process != process]
        self.fills = [one for one in self.fills if one.process != process]
        self.readings = [one for one in self.readings if one.process != process]
        for kept in self.kept.values():
            for holder in list(kept.holders):
                claimant = kept.claims.get(holder)
                if claimant == process:
                    del kept.claims[holder]
                if claimant in (None, process) and holder not in live:
                    del kept.holders[holder]
        self.settle()

    # -- always

    @invariant()
    def is_sound(self) -> None:
        if not hasattr(self, "root"):
            return
        assert audit(self.root.store) == []
        assert self.root.stats().slab_bytes <= BLOCKS * BLOCK

    @invariant()
    def holds_what_it_must(self) -> None:
        for uid, kept in self.kept.items():
            if not self.may_vanish(uid):
                assert self.present(kept.body) == kept.present


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model, "BLOCK_BYTES", BLOCK)


def test_memory_behaves_like_its_model() -> None:
    run_state_machine_as_test(MemoryModel, settings=settings(max_examples=60, stateful_step_count=40, deadline=None))
