"""Where copies go."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from tiergate.model import About, Node
from tiergate.replication.placement import places, rank

TEXTS = [f"uid{index}" for index in range(3000)]

names = st.lists(st.from_regex(r"[a-z][a-z0-9-]{0,10}", fullmatch=True), min_size=1, max_size=12, unique=True)
members = names.flatmap(
    lambda found: st.lists(st.sampled_from(["", "z1", "z2", "z3"]), min_size=len(found), max_size=len(found)).map(
        lambda zones: [Node(name, 1, About("", zone)) for name, zone in zip(found, zones, strict=True)]
    )
)


def nodes(count: int) -> list[Node]:
    return [Node(f"node{index}", 1, About("")) for index in range(count)]


@given(st.text(), members, st.data())
def test_the_order_does_not_depend_on_how_the_nodes_are_listed(
    text: str, found: list[Node], data: st.DataObject
) -> None:
    shuffled = data.draw(st.permutations(found))
    assert rank(text, shuffled) == rank(text, found)
    assert places(text, shuffled, "me", "z1") == places(text, found, "me", "z1")


@given(st.text(), members, st.data())
def test_without_a_node_the_order_of_the_others_stays(text: str, found: list[Node], data: st.DataObject) -> None:
    gone = data.draw(st.sampled_from(found))
    left = [node for node in found if node != gone]
    assert rank(text, left) == [node for node in rank(text, found) if node != gone]
    before, after = places(text, found, "me", "z1"), places(text, left, "me", "z1")
    if before[0] != gone:
        assert after[0] == before[0]


@given(st.text(), members, st.sampled_from(["", "z1", "z2", "z3"]))
def test_no_zone_is_doubled_before_each_has_as_many(text: str, found: list[Node], own: str) -> None:
    placed = places(text, found, found[0].name, own)
    assert sorted(node.name for node in placed) == sorted(node.name for node in found[1:])
    used, left = Counter([own]), Counter(node.about.zone for node in placed)
    for node in placed:
        assert used[node.about.zone] == min(used[zone] for zone in left if left[zone])
        used[node.about.zone] += 1
        left[node.about.zone] -= 1


def test_copies_are_spread_evenly_and_few_move_when_a_node_goes() -> None:
    found = nodes(10)
    first = {text: places(text, found, "", "")[0].name for text in TEXTS}
    shares = Counter(first.values())
    assert len(shares) == 10
    assert all(0.75 * len(TEXTS) / 10 < share < 1.25 * len(TEXTS) / 10 for share in shares.values())
    left = [node for node in found if node.name != "node3"]
    moved = {text for text in TEXTS if places(text, left, "", "")[0].name != first[text]}
    assert moved == {text for text in TEXTS if first[text] == "node3"}
