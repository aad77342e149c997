"""What a node does about a write whose owner is gone."""

from dataclasses import replace

import pytest

from tiergate.model import LOST, About, Actor, Holder, Kind, Live, Node, ObjectName, Pending, Role
from tiergate.policy.rendezvous import housekeeper, ranked
from tiergate.writeback.takeover import Absences, Patience, Verdict, judge

PATIENCE = Patience(settle_s=5.0, grace_s=60.0)
A, B, C = Holder("a", 1), Holder("b", 2), Holder("c", 3)
GONE = Holder("gone", 9)


def live(*holders: Holder) -> Live:
    return Live(10, {each.node: Node(each.node, each.epoch, About("")) for each in holders})


def owed(owner: Holder = GONE, kind: Kind = Kind.PUT, *, begun: bool = False) -> Pending:
    name = ObjectName("bucket", "key")
    return Pending(name, "uid", kind, Role.SMALL, 1, 1, 0, 0.0, 1, begun=begun, owner=owner)


def claimants(write: Pending, holders: set[Holder], members: Live, gone_s: float = 100.0) -> list[str]:
    every = [node.holder for node in members.nodes.values()]
    verdicts = {each.node: judge(write, holders, each, members, gone_s, PATIENCE) for each in every}
    assert Verdict.LOST not in verdicts.values()
    return [node for node, verdict in verdicts.items() if verdict is Verdict.CLAIM]


def test_judge_owner_lives_nobody_claims() -> None:
    assert claimants(owed(A), {A, B}, live(A, B, C)) == []


@pytest.mark.parametrize("holders", [{B, GONE}, {A, B, GONE}, {A, B, C}])
def test_judge_put_exactly_one_living_holder_claims(holders: set[Holder]) -> None:
    (claimant,) = claimants(owed(), holders, live(A, B, C))
    assert claimant in {each.node for each in holders}


def test_judge_holder_of_a_former_epoch_claims_nothing() -> None:
    assert claimants(owed(), {Holder("a", 0), B}, live(A, B, C)) == ["b"]


def test_judge_owner_that_came_back_with_its_bytes_goes_first() -> None:
    back = Holder("gone", 20)
    assert claimants(owed(), {A, B, C, back}, live(A, B, C, back)) == ["gone"]


def test_judge_owner_that_came_back_without_them_does_not() -> None:
    assert claimants(owed(), {A}, live(A, Holder("gone", 20))) == ["a"]


def test_judge_deletion_exactly_one_of_all_claims() -> None:
    assert len(claimants(owed(kind=Kind.DELETE), set(), live(A, B, C))) == 1


def test_judge_begun_waits_until_nothing_of_it_is_on_its_way() -> None:
    members = live(A, B)
    assert claimants(owed(begun=True), {A}, members, gone_s=4.9) == []
    assert claimants(owed(begun=True), {A}, members, gone_s=5.0) == ["a"]
    assert claimants(owed(begun=False), {A}, members, gone_s=0.0) == ["a"]


def test_judge_lost_is_said_by_the_housekeeper_alone_after_the_grace() -> None:
    members = live(A, B, C)
    keeper = housekeeper(members.nodes)
    for each in (A, B, C):
        assert judge(owed(), {GONE}, each, members, 59.0, PATIENCE) is Verdict.LEAVE
        verdict = judge(owed(), {GONE}, each, members, 60.0, PATIENCE)
        assert verdict is (Verdict.LOST if each.node == keeper else Verdict.LEAVE)


def test_judge_lost_of_a_dead_housekeeper_is_claimed_by_a_holder_that_is_back() -> None:
    assert claimants(replace(owed(), quarantined=LOST), {A}, live(A, B)) == ["a"]


def test_absences_count_from_the_first_look_and_forget() -> None:
    absences = Absences()
    absences.see([A, GONE], live(A), 10.0)
    absences.see([A, GONE], live(A), 15.0)
    assert absences.gone_s(GONE, 17.0) == 7.0
    assert absences.gone_s(A, 17.0) == 0.0
    absences.see([A], live(A), 18.0)
    absences.see([GONE], live(A), 20.0)
    assert absences.gone_s(GONE, 21.0) == 1.0


def test_ranked_moves_only_what_the_gone_node_was_first_for() -> None:
    texts = [str(number) for number in range(200)]
    before = {text: ranked(text, "abcd")[0] for text in texts}
    after = {text: ranked(text, "abc")[0] for text in texts}
    assert {text for text in texts if before[text] != after[text]} == {text for text in texts if before[text] == "d"}
    assert {before[text] for text in texts} == set("abcd")


@pytest.mark.parametrize("actor", [Actor("t0"), Actor("t0", A), Actor("", A), Actor("t", Holder("a/b@c", 7))])
def test_actor_reads_what_it_wrote(actor: Actor) -> None:
    assert Actor.parse(str(actor)) == actor
