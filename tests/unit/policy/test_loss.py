"""What would be lost if memory vanished, against its definition."""

from collections.abc import Collection, Sequence
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from tiergate.checkpoints.markers import ancestor_scopes, scope_of
from tiergate.model import Kind, ObjectName, Pending, Role
from tiergate.policy.loss import Loss, Losses, Unpersisted, losses

ZONES = {"a": "east", "b": "east", "c": "west", "d": ""}


def write(key: str, size_bytes: int = 10, at_s: float = 5.0, role: Role = Role.SMALL, kind: Kind = Kind.PUT) -> Pending:
    return Pending(ObjectName("bucket", key), f"uid-{key}", kind, role, 1, 1, 0, at_s, size_bytes)


def marker(key: str, at_s: float = 9.0) -> Pending:
    return write(key, 1, at_s, Role.MARKER)


def on(nodes: str, pending: Pending) -> Unpersisted:
    return Unpersisted(pending, frozenset(nodes))


def judged(*found: Unpersisted) -> Losses:
    return losses(found, ZONES, ancestor_scopes)


def test_nothing_pending_is_nothing_lost() -> None:
    assert judged() == Losses(Loss(), {}, {}, Loss())
    assert Loss().is_nothing


def test_a_copy_elsewhere_saves_a_write_from_the_loss_of_a_node_or_zone() -> None:
    found = judged(
        on("a", write("r/1", 1)), on("ab", write("r/2", 2)), on("ac", write("r/3", 4)), on("d", write("4", 8))
    )
    assert found.memory.size_bytes == 15
    assert {name: each.size_bytes for name, each in found.nodes.items()} == {"a": 1, "d": 8}
    assert {name: each.size_bytes for name, each in found.zones.items()} == {"east": 3}


def test_sets_are_those_whose_marker_was_acknowledged() -> None:
    found = judged(
        on("a", write("run/1/shard")),
        on("ab", marker("run/1/.metadata")),
        on("a", write("run/2/shard")),
        on("b", write("run/3/deep/shard")),
        on("b", write("run/3/deep/er/shard")),
        on("ab", marker("run/3/.metadata")),
    )
    assert found.nodes["a"].sets_count == found.nodes["b"].sets_count == 1
    assert (found.memory.sets_count, found.zones["east"].sets_count) == (2, 2)


def test_a_deletion_is_counted_apart_and_the_oldest_is_the_oldest() -> None:
    found = judged(on("a", write("k", at_s=7.0)), on("a", write("gone", 0, 3.0, kind=Kind.DELETE))).memory
    assert found == Loss(objects_count=1, size_bytes=10, deletions_count=1, oldest_s=3.0)


def test_what_is_kept_in_memory_by_policy_is_shown_apart() -> None:
    kept = [replace(each, parked=True) for each in (write("run/1/shard", 100), marker("run/1/.metadata"))]
    found = judged(*(on("a", each) for each in kept), on("a", write("k")))
    assert found.nodes["a"] == Loss(1, 10, 0, 0, 5.0, parked_count=2, parked_bytes=101)


def test_what_no_living_node_has_is_gone_already() -> None:
    found = judged(on("", write("k", 7)), on("a", write("l", 1)))
    assert (found.gone.size_bytes, found.memory.size_bytes) == (7, 1)


KEYS = st.sampled_from(["run/1/a", "run/1/b/c", "run/2/a", "top"])
MARKERS = st.sampled_from(["run/1/.metadata", "run/.metadata", "run/2/.metadata"])
FOUND = st.lists(
    st.tuples(
        st.one_of(KEYS.map(lambda key: write(key)), MARKERS.map(lambda key: marker(key))),
        st.integers(1, 99),
        st.sets(st.sampled_from("abcd"), max_size=4),
    ),
    max_size=12,
    unique_by=lambda each: each[0].name,
)


def lost(found: Sequence[Unpersisted], vanished: Collection[str]) -> tuple[int, int, int]:
    """Objects, bytes and sets, by definition: what was somewhere and is nowhere once these nodes are gone."""
    gone = [each.write for each in found if each.nodes and not each.nodes - set(vanished)]
    scopes = {scope_of(each.write.name.key) for each in found if each.write.role is Role.MARKER}
    torn = {scope for scope in scopes if any(each.name.key.startswith(scope) for each in gone)}
    return len(gone), sum(each.size_bytes for each in gone), len(torn)


def numbers(loss: Loss | None) -> tuple[int, int, int]:
    return (loss.objects_count, loss.size_bytes, loss.sets_count) if loss else (0, 0, 0)


@given(FOUND)
def test_every_place_loses_what_is_nowhere_else(drawn: list[tuple[Pending, int, set[str]]]) -> None:
    found = [Unpersisted(replace(each, size_bytes=size), frozenset(nodes)) for each, size, nodes in drawn]
    judged_now = judged(*found)
    assert numbers(judged_now.memory) == lost(found, "abcd")
    for node in ZONES:
        assert numbers(judged_now.nodes.get(node)) == lost(found, node)
    for zone in ("east", "west"):
        members = [node for node, its_zone in ZONES.items() if its_zone == zone]
        assert numbers(judged_now.zones.get(zone)) == lost(found, members)
