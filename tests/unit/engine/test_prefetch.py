"""What a prefetch brings first, and how it divides what room there is."""

import asyncio

import pytest

from tiergate.engine.prefetch import NoRoomError, Room, Wanted, newest_sets_first
from tiergate.model import ObjectName, Role


def wanted(key: str, modified_s: float, role: Role = Role.LARGE) -> Wanted:
    return Wanted(ObjectName("bucket", key), 1, modified_s, role)


def keys(found: list[Wanted]) -> list[str]:
    return [each.name.key for each in found]


def test_newest_set_comes_first_and_what_is_of_none_last() -> None:
    found = [
        wanted("run/1/.metadata", 13, Role.MARKER),
        wanted("run/1/a", 11),
        wanted("run/1/b", 12),
        wanted("run/2/.metadata", 23, Role.MARKER),
        wanted("run/2/a", 22),
        wanted("run/2/b", 21),
        wanted("run/3/a", 31),
        wanted("run/0", 1),
        wanted("run/2/c/.metadata", 19, Role.MARKER),
        wanted("run/2/c/a", 18),
    ]
    expected = ["run/2/.metadata", "run/2/a", "run/2/b", "run/2/c/.metadata", "run/2/c/a"]
    expected += ["run/1/.metadata", "run/1/b", "run/1/a", "run/3/a", "run/0"]
    assert keys(newest_sets_first(found)) == expected
    assert keys(newest_sets_first(found[::-1])) == expected


def test_scope_ends_where_its_keys_do() -> None:
    found = [wanted(key, 0) for key in ("run", "run-2/a", "run/a", "run/ÿ", "run0", "s")]
    found.append(wanted("run/.metadata", 1, Role.MARKER))
    assert keys(newest_sets_first(found))[:3] == ["run/.metadata", "run/a", "run/ÿ"]
    at_root = [wanted("a", 2), wanted("model.index.json", 1, Role.MARKER), wanted("b/c", 3)]
    assert keys(newest_sets_first(at_root)) == ["model.index.json", "b/c", "a"]


async def test_room_is_what_neither_is_kept_nor_under_way() -> None:
    room = Room(lambda: 10)
    await room.take(4)
    await room.put(4, 4)
    await room.take(4)
    # Whether this fits is clear only when the other is over.
    waiting = asyncio.create_task(room.take(4))
    await asyncio.sleep(0)
    assert not waiting.done()
    await room.put(4, 0)
    await waiting
    await room.put(4, 4)
    with pytest.raises(NoRoomError):
        await room.take(3)
    await room.take(2)
