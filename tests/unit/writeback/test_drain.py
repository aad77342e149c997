"""What goes first when a node stops, and what is brought in first."""

from typing import Any, cast

from tiergate.child import LEFT_BEHIND_STATUS
from tiergate.model import Kind, ObjectName, Pending, Role
from tiergate.writeback.drain import Drain, Report, newest_first


def owed(key: str, place: int, role: Role = Role.SMALL, kind: Kind = Kind.PUT) -> Pending:
    return Pending(ObjectName("bucket", key), f"{key}#{place}", kind, role, place, place, 0, 0.0, 7)


class Owing:
    """All that counting asks of a directory."""

    async def pending(self) -> list[Pending]:
        return [owed("run/1/a", 1), owed("run/2/a", 2)]

    async def parked(self) -> list[Pending]:
        return [owed("run/3/a", 3)]


def keys(writes: list[Pending]) -> list[str]:
    return [write.name.key for write in writes]


def test_newest_first_newest_complete_set_then_older_then_the_rest() -> None:
    writes = [
        owed("run/1/a", 1),
        owed("run/1/b", 2),
        owed("run/1/.metadata", 3, Role.MARKER),
        owed("run/2/a", 4),
        owed("other", 5),
        owed("run/2/.metadata", 6, Role.MARKER),
        owed("run/3/a", 7),
    ]
    expected = ["run/2/a", "run/2/.metadata", "run/1/a", "run/1/b", "run/1/.metadata", "other", "run/3/a"]
    assert keys(newest_first(writes)) == expected
    assert keys(newest_first(writes[::-1])) == expected


def test_newest_first_deletion_of_a_marker_makes_no_set() -> None:
    writes = [owed("run/2/a", 4), owed("run/2/.metadata", 5, Role.MARKER, Kind.DELETE), owed("a", 1)]
    assert keys(newest_first(writes)) == ["a", "run/2/a", "run/2/.metadata"]


def test_newest_first_member_committed_after_the_marker_is_none_of_its() -> None:
    writes = [owed("run/1/.metadata", 3, Role.MARKER), owed("run/1/late", 4), owed("a", 1)]
    assert keys(newest_first(writes)) == ["run/1/.metadata", "a", "run/1/late"]


def test_report_status_tells_whether_something_is_here_only() -> None:
    report = Report()
    report.sent.add(owed("a", 1))
    assert report.status == 0
    report.left.add(owed("b", 2))
    assert report.status == LEFT_BEHIND_STATUS
    assert (report.left.count, report.left.size_bytes) == (1, 7)


async def test_report_of_a_drain_that_was_cut_names_all_that_was_not_handed_over() -> None:
    report = Report()
    report.leave(owed("run/2/a", 2))
    report.given.add("run/1/a#1")
    unused = cast(Any, None)
    await Drain(cast(Any, Owing()), unused, unused, unused).count_left(report)
    assert (report.left.count, report.left.size_bytes) == (2, 14)
    assert report.sets == ["s3://bucket/run/2/", "s3://bucket/run/3/"]
