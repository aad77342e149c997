"""The ledger: what a node keeps for a directory that forgot it."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tiergate.directory.ledger import Entry, Ledger
from tiergate.model import Kind, ObjectName, Pending, Record, Role, State
from tiergate.testing.directory_contract import make_version

MAP_BYTES = 1 << 20


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[Ledger]:
    ledger = Ledger.open(tmp_path / "ledger", MAP_BYTES)
    yield ledger
    ledger.close()


def entry(key: str, uid: str = "v1", revision: int = 1) -> Entry:
    name, version = ObjectName("bucket", key), make_version(uid)
    record = Record(name, State.DIRTY, revision, revision, version)
    write = Pending(name, uid, Kind.PUT, Role.SMALL, revision, revision, 0, 1.0, version.size_bytes)
    return Entry(7, record, write)


def test_entries_come_in_the_order_of_their_commits(ledger: Ledger) -> None:
    for noted in (entry("a", revision=3), entry("b", revision=1), entry("c" * 1024, revision=2)):
        ledger.note(noted)
    assert [each.record.name.key[:1] for each in ledger.entries()] == ["b", "c", "a"]


def test_a_key_has_one_entry_the_newest(ledger: Ledger) -> None:
    ledger.note(entry("a", "v1"))
    ledger.note(entry("a", "v2", revision=2))
    assert ledger.entries() == [entry("a", "v2", revision=2)]
    assert ledger.find(ObjectName("bucket", "a")) == entry("a", "v2", revision=2)
    assert ledger.find(ObjectName("bucket", "b")) is None


def test_only_the_write_that_is_named_is_dropped(ledger: Ledger) -> None:
    ledger.note(entry("a", "v2"))
    ledger.drop(ObjectName("bucket", "a"), "v1")
    assert ledger.entries() == [entry("a", "v2")]
    ledger.drop(ObjectName("bucket", "a"), "v2")
    ledger.drop(ObjectName("bucket", "a"), "v2")
    assert ledger.entries() == []


def test_it_outlives_its_process(ledger: Ledger, tmp_path: Path) -> None:
    ledger.note(entry("a"))
    ledger.close()
    again = Ledger.open(tmp_path / "ledger", MAP_BYTES)
    assert again.entries() == [entry("a")]
    again.close()


def test_what_finds_no_room_is_left_out_and_said(ledger: Ledger, caplog: pytest.LogCaptureFixture) -> None:
    large = entry("a")
    version = replace(make_version("v1"), metadata={"filler": "x" * MAP_BYTES})
    ledger.note(replace(large, record=replace(large.record, version=version)))
    assert ledger.entries() == []
    assert "the ledger is full" in caplog.text
    ledger.note(entry("b"))
    assert ledger.entries() == [entry("b")]


def test_what_is_known_of_an_era_is_of_that_alone_and_no_entry(ledger: Ledger, tmp_path: Path) -> None:
    assert ledger.newest(7) == 0
    for revision in (5, 9, 8):
        ledger.changed(7, revision)
    ledger.note(entry("a"))
    assert (ledger.newest(7), ledger.newest(8)) == (9, 0)
    ledger.changed(8, 3)
    # A process may still be busy with the answer of an earlier directory.
    ledger.changed(7, 10)
    assert (ledger.newest(7), ledger.newest(8)) == (10, 3)
    ledger.doubt(0)
    ledger.doubt(7)
    assert [ledger.is_doubted(era) for era in (0, 7, 8)] == [False, True, False]
    assert ledger.entries() == [entry("a")]
    ledger.close()
    again = Ledger.open(tmp_path / "ledger", MAP_BYTES)
    assert (again.newest(8), again.is_doubted(7)) == (3, True)
    again.close()
