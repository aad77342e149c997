"""The board over processes: what is read is what was posted, whole, whatever happens to who posts."""

import multiprocessing
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tiergate.clock import SystemClock
from tiergate.directory.board import BOARD_BYTES, Board, BoardStanding, Posted
from tiergate.errors import InvariantError, MembershipOverError
from tiergate.etcd.values import Field, Guard
from tiergate.model import About, Holder

READS_COUNT = 20_000


class HandClock(SystemClock):
    now_s = 100.0

    def monotonic_s(self) -> float:
        return self.now_s


def posted(number: int) -> Posted:
    """All of it follows from the number, and so does its length."""
    return Posted(number, float(number), About(str(number) * (1 + number % 7), zone="z" * (number % 300)))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "board"
    Board.make(path)
    return path


@pytest.fixture
def writer(path: Path) -> Iterator[Board]:
    board = Board(path, writable=True)
    yield board
    board.close()


@pytest.fixture
def reader(path: Path) -> Iterator[Board]:
    board = Board(path)
    yield board
    board.close()


def post_forever(path: Path, started: Any) -> None:
    board = Board(path, writable=True)
    number = 0
    while True:
        number += 1
        board.post(posted(number))
        started.set()


def test_reader_sees_the_last_post(writer: Board, reader: Board) -> None:
    assert reader.read() is None
    for number in range(1, 10):
        writer.post(posted(number))
        assert reader.read() == posted(number)
        assert reader.read() == posted(number)


def test_next_writer_goes_on_where_the_last_one_ended(path: Path, writer: Board, reader: Board) -> None:
    for number in range(1, 4):
        writer.post(posted(number))
    second = Board(path, writable=True)
    second.post(posted(9))
    assert reader.read() == posted(9)
    second.close()
    Board.make(path)
    fresh = Board(path)
    assert fresh.read() is None
    fresh.close()


def test_reader_cannot_write_and_what_is_too_long_is_refused(writer: Board, reader: Board) -> None:
    with pytest.raises(TypeError):
        reader.post(posted(1))
    writer.post(posted(1))
    with pytest.raises(InvariantError):
        writer.post(Posted(2, 0.0, About(os.urandom(BOARD_BYTES).hex())))
    assert reader.read() == posted(1)


@pytest.mark.parametrize("cut", range(0, 60, 7))
def test_post_that_its_writer_died_over_changes_nothing(path: Path, writer: Board, reader: Board, cut: int) -> None:
    """Whatever part of a slot was written: the one before it stands."""
    writer.post(posted(1))
    writer.post(posted(2))
    before = path.read_bytes()
    writer.post(posted(3))
    after = path.read_bytes()
    changed = [index for index in range(BOARD_BYTES) if before[index] != after[index]]
    torn = bytearray(before)
    for index in changed[:cut]:
        torn[index] = after[index]
    path.write_bytes(torn)
    assert reader.read() == posted(2 if cut < len(changed) else 3)


def test_first_post_that_its_writer_died_over_is_none(path: Path, writer: Board, reader: Board) -> None:
    writer.post(posted(1))
    whole = path.read_bytes()
    path.write_bytes(bytes(BOARD_BYTES // 2 + 20) + whole[BOARD_BYTES // 2 + 20 :])
    assert reader.read() is None


def test_reads_while_another_process_posts_are_whole_and_never_go_back(path: Path, reader: Board) -> None:
    context = multiprocessing.get_context("spawn")
    started = context.Event()
    process = context.Process(target=post_forever, args=(path, started))
    process.start()
    try:
        assert started.wait(60)
        last, distinct = 0, 0
        for _ in range(READS_COUNT):
            seen = reader.read()
            assert seen is not None
            assert seen == posted(seen.epoch)
            assert seen.epoch >= last
            distinct += seen.epoch > last
            last = seen.epoch
        assert distinct > 1
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        process.join(60)
        seen = reader.read()
        assert seen is not None
        assert seen == posted(seen.epoch)
        assert seen.epoch >= last
        assert reader.read() == seen
    finally:
        process.kill()
        process.join()
        process.close()


def test_standing_ends_with_the_deadline_that_nobody_moved(writer: Board, reader: Board) -> None:
    clock = HandClock()
    standing = BoardStanding(reader, "a", b"/n/a", clock)
    assert not standing.stands()
    with pytest.raises(MembershipOverError):
        standing.guard()
    writer.post(Posted(7, 104.0, About("h:1")))
    clock.now_s = 103.9
    assert standing.stands()
    assert standing.me == Holder("a", 7)
    assert standing.guard() == Guard(b"/n/a", Field.CREATED, 7)
    clock.now_s = 104.0
    assert not standing.stands()
    for look in (standing.guard, lambda: standing.me):
        with pytest.raises(MembershipOverError):
            look()
    writer.post(Posted(8, 108.0, About("h:1")))
    assert standing.me == Holder("a", 8)
    writer.post(Posted(8, 0.0, About("h:1")))
    assert not standing.stands()
