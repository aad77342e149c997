"""What the folder sync decides: pure, over histories of folders that hypothesis makes up."""

from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tiergate.checkpoints.markers import Markers, is_within, scope_of
from tiergate.model import ObjectName, Role
from tiergate_adapters.sagemaker.plan import (
    LACKING_S,
    LOG_DELAY_S,
    LOG_EVERY_S,
    REOPENED_S,
    SETTLED_S,
    Act,
    Plan,
    Sight,
    Task,
)

ROLE_OF = Markers(lambda *_: (), 1 << 62).role_of
RANKS = {Role.SMALL: 0, Role.MARKER: 1, Role.POINTER: 2}
UNTOLD_S = 2.0


def role_of(key: str) -> Role:
    return ROLE_OF(ObjectName("b", key), 0)


@dataclass
class Desk:
    """A plan, the folder it is told of, and a clock."""

    now_s: float = 100.0
    sights: dict[str, Sight] = field(default_factory=dict)
    count: int = 0

    def __post_init__(self) -> None:
        self.plan = Plan(lambda name: f"run/{name}", role_of, lambda name: name.endswith(".log"), UNTOLD_S)

    def write(self, *names: str) -> None:
        for name in names:
            self.count += 1
            self.sights[name] = Sight(self.count, 1, self.count, self.count)

    def remove(self, *names: str) -> None:
        for name in names:
            del self.sights[name]

    def look(self, after_s: float = 2 * SETTLED_S, unseen: tuple[str, ...] = ()) -> None:
        self.now_s += after_s
        seen = {name: sight for name, sight in self.sights.items() if not name.startswith(unseen or ("\0",))}
        self.plan.look(seen, self.now_s, self.now_s, lambda name: name.startswith(unseen or ("\0",)))

    def due(self, count: int = 100) -> list[Task]:
        return self.plan.due(self.now_s, count)

    def names(self) -> list[str]:
        return [task.name for task in self.due()]

    def sync(self) -> list[tuple[Act, str]]:
        """All that is done from here on, if everything succeeds."""
        done: list[tuple[Act, str]] = []
        self.look()
        self.look()
        while tasks := self.due():
            for task in tasks:
                done.append((task.act, task.name))
                self.succeed(task)
        return done

    def succeed(self, task: Task) -> None:
        if task.act is Act.SEND:
            self.plan.sent(task, self.now_s)
        else:
            self.plan.gone(task)


def test_a_file_is_sent_after_a_second_look_that_saw_it_the_same() -> None:
    desk = Desk()
    desk.write("a")
    desk.look()
    assert desk.names() == []
    desk.look(SETTLED_S / 2)
    assert desk.names() == []
    desk.write("a")
    desk.look()
    assert desk.names() == []
    desk.look()
    assert desk.names() == ["a"]


def test_the_next_look_is_wanted_when_a_file_may_have_settled() -> None:
    desk = Desk()
    assert desk.plan.next_s(desk.now_s) == (float("inf"), float("inf"))
    desk.write("a")
    desk.look()
    assert desk.plan.next_s(desk.now_s) == (desk.now_s + SETTLED_S, float("inf"))


def test_what_s3_has_is_not_sent() -> None:
    desk = Desk()
    desk.write("a", "b")
    desk.plan.known("a", desk.sights["a"])
    assert desk.sync() == [(Act.SEND, "b")]
    assert desk.sync() == []
    assert desk.plan.is_done


def test_what_changed_while_it_was_sent_is_sent_again() -> None:
    desk = Desk()
    desk.write("a")
    desk.look()
    desk.look()
    (task,) = desk.due()
    desk.write("a")
    desk.look()
    assert desk.names() == []
    desk.plan.sent(task, desk.now_s)
    assert desk.sync() == [(Act.SEND, "a")]
    assert desk.sync() == []


def test_a_marker_waits_for_all_files_of_its_set_and_a_pointer_for_the_marker() -> None:
    desk = Desk()
    desk.write("latest", "step/.metadata", "step/deep/x", "step/__0_0.distcp", "other/y")
    desk.look()
    desk.look()
    tasks = {task.name: task for task in desk.due()}
    assert sorted(tasks) == ["other/y", "step/__0_0.distcp", "step/deep/x"]
    desk.succeed(tasks["step/deep/x"])
    desk.succeed(tasks["other/y"])
    assert desk.names() == []
    desk.plan.failed(tasks["step/__0_0.distcp"], "no", desk.now_s)
    assert desk.names() == []
    desk.now_s += 60
    (again,) = desk.due()
    desk.plan.opened(again, desk.now_s)
    assert desk.names() == []
    desk.now_s += REOPENED_S
    (again,) = desk.due()
    desk.succeed(again)
    (marker,) = desk.due()
    assert marker.name == "step/.metadata"
    desk.succeed(marker)
    assert desk.names() == ["latest"]


def test_a_marker_waits_for_a_member_that_is_written_again() -> None:
    desk = Desk()
    desk.write("step/__0_0.distcp")
    desk.sync()
    desk.write("step/.metadata")
    desk.look()
    desk.write("step/__0_0.distcp")
    desk.look()
    assert desk.names() == []
    assert desk.sync() == [(Act.SEND, "step/__0_0.distcp"), (Act.SEND, "step/.metadata")]


def test_the_list_of_a_tiered_checkpoint_waits_for_the_shards_of_all_ranks() -> None:
    desk = Desk()
    desk.write("rank_0/step_5/metadata.metadata", "rank_0/step_5/checkpoint.pt", "rank_1/step_5/checkpoint.pt")
    assert [name for _, name in desk.sync()][-1] == "rank_0/step_5/metadata.metadata"


def test_markers_of_one_folder_go_in_the_order_they_were_written() -> None:
    desk = Desk()
    desk.write("s/.metadata", "s/model.safetensors.index.json", "s/__0_0.distcp")
    desk.look()
    desk.write("s/.metadata")
    assert [name for _, name in desk.sync()] == ["s/__0_0.distcp", "s/model.safetensors.index.json", "s/.metadata"]
    desk.write("s/.metadata", "s/model.safetensors.index.json")
    desk.look()
    desk.look()
    assert desk.names() == ["s/.metadata"]


def test_deletes_take_pointers_and_markers_first() -> None:
    desk = Desk()
    desk.write("latest", "s/.metadata", "s/__0_0.distcp", "s/deep/x", "t")
    desk.sync()
    desk.remove("latest", "s/.metadata", "s/__0_0.distcp", "s/deep/x", "t")
    desk.look()
    desk.look()
    (pointer,) = desk.due()
    assert (pointer.act, pointer.name) == (Act.DELETE, "latest")
    desk.succeed(pointer)
    tasks = {task.name: task for task in desk.due()}
    assert sorted(tasks) == ["s/.metadata", "t"]
    assert desk.names() == []
    desk.succeed(tasks["s/.metadata"])
    assert sorted(desk.names()) == ["s/__0_0.distcp", "s/deep/x"]


def test_the_old_goes_only_after_the_new_came() -> None:
    desk = Desk()
    desk.write("checkpoint-1/x", "checkpoint-1/trainer_state.json")
    desk.sync()
    desk.write("checkpoint-2/x", "checkpoint-2/trainer_state.json")
    desk.remove("checkpoint-1/x", "checkpoint-1/trainer_state.json")
    assert desk.sync() == [
        (Act.SEND, "checkpoint-2/x"),
        (Act.SEND, "checkpoint-2/trainer_state.json"),
        (Act.DELETE, "checkpoint-1/trainer_state.json"),
        (Act.DELETE, "checkpoint-1/x"),
    ]


def test_a_renamed_folder_is_sent_before_its_old_name_goes_though_a_look_saw_neither() -> None:
    desk = Desk()
    desk.write("tmp-checkpoint-1/x")
    desk.sync()
    desk.remove("tmp-checkpoint-1/x")
    desk.look()
    desk.write("checkpoint-1/x")
    desk.look()
    assert desk.names() == []
    assert desk.sync() == [(Act.SEND, "checkpoint-1/x"), (Act.DELETE, "tmp-checkpoint-1/x")]


def test_a_file_that_stays_open_holds_no_delete_back() -> None:
    desk = Desk()
    desk.write("old")
    desk.sync()
    desk.write("open")
    desk.remove("old")
    desk.look()
    desk.look()
    (task,) = desk.due()
    assert task.name == "open"
    desk.plan.opened(task, desk.now_s)
    assert desk.names() == ["old"]


def test_a_file_that_changes_all_the_time_holds_no_delete_back() -> None:
    desk = Desk()
    desk.write("old", "busy")
    desk.sync()
    desk.remove("old")
    for _ in range(3):
        desk.write("busy")
        desk.look()
    assert desk.names() == ["old"]


def test_only_what_s3_has_by_us_is_deleted() -> None:
    desk = Desk()
    desk.write("never sent")
    desk.look()
    desk.remove("never sent")
    assert desk.sync() == []


def test_what_may_have_arrived_is_deleted_too_and_said_to_be_ours() -> None:
    desk = Desk()
    desk.write("a")
    desk.look()
    desk.look()
    (task,) = desk.due()
    desk.plan.failed(task, "no answer", desk.now_s)
    desk.remove("a")
    desk.look()
    desk.look(120)
    (delete,) = desk.due()
    assert (delete.act, delete.ours) == (Act.DELETE, (task.sight,))


def test_a_file_back_as_it_was_after_a_doubtful_send_is_sent_again() -> None:
    desk = Desk()
    desk.write("a")
    first = desk.sights["a"]
    desk.sync()
    desk.write("a")
    desk.look()
    desk.look()
    (task,) = desk.due()
    desk.plan.failed(task, "no answer", desk.now_s)
    desk.sights["a"] = first
    assert desk.sync() == [(Act.SEND, "a")]


def test_what_nobody_could_look_at_is_not_taken_for_deleted() -> None:
    desk = Desk()
    desk.write("a/x", "b")
    desk.sync()
    desk.look(unseen=("a/",))
    desk.look(unseen=("a/",))
    assert desk.names() == []
    desk.remove("a/x")
    assert desk.sync() == [(Act.DELETE, "a/x")]


def test_a_log_is_sent_while_it_grows_and_nothing_waits_for_it() -> None:
    desk = Desk()
    desk.write("s/train.log")
    desk.look()
    assert desk.names() == []
    assert desk.plan.next_s(desk.now_s)[1] == desk.now_s + LOG_DELAY_S
    desk.write("s/train.log", "s/.metadata")
    desk.look(LOG_DELAY_S)
    (log,) = desk.due()
    assert (log.name, log.is_log) == ("s/train.log", True)
    desk.succeed(log)
    desk.write("s/train.log")
    desk.look()
    assert desk.names() == ["s/.metadata"]
    look_s, task_s = desk.plan.next_s(desk.now_s)
    assert (look_s, task_s) == (float("inf"), desk.now_s + LOG_EVERY_S - 2 * SETTLED_S)
    desk.now_s = task_s
    assert desk.names() == ["s/train.log"]


def test_in_a_hurry_a_log_is_sent_once_more_and_at_once() -> None:
    desk = Desk()
    desk.write("train.log")
    desk.look()
    desk.now_s += LOG_DELAY_S
    desk.sync()
    desk.write("train.log")
    desk.look()
    assert desk.names() == []
    desk.plan.hurry()
    (log,) = desk.due()
    assert not desk.plan.is_done
    desk.succeed(log)
    desk.write("train.log")
    desk.look()
    assert desk.names() == []
    assert desk.plan.is_done


def test_where_nobody_can_say_who_writes_a_file_must_rest_longer() -> None:
    desk = Desk()
    desk.write("a")
    desk.look()
    seen_s = desk.now_s
    desk.look()
    (task,) = desk.due()
    desk.plan.untold(task)
    assert desk.plan.next_s(desk.now_s)[1] == seen_s + UNTOLD_S
    desk.now_s = seen_s + UNTOLD_S
    (task,) = desk.due()
    assert task.quiet_s == UNTOLD_S


def test_a_list_that_names_what_is_nowhere_waits_and_is_asked_again() -> None:
    desk = Desk()
    desk.write("s/.metadata")
    desk.look()
    desk.look()
    (task,) = desk.due()
    desk.plan.lacking(task, "s/__1_0.distcp", desk.now_s)
    assert desk.names() == []
    assert list(desk.plan.left()) == [("s/.metadata", 1, "it names s/__1_0.distcp, which is nowhere yet")]
    assert not desk.plan.is_refused
    for _ in range(3):
        desk.now_s += LACKING_S
        (task,) = desk.due()
        desk.plan.lacking(task, "s/__1_0.distcp", desk.now_s)
    assert desk.plan.is_refused
    assert not desk.plan.is_done
    desk.now_s += LACKING_S
    assert desk.names() == ["s/.metadata"]


def test_failures_are_tried_again_ever_later() -> None:
    desk = Desk()
    desk.write("a")
    desk.look()
    desk.look()
    waits: list[float] = []
    for _ in range(10):
        (task,) = desk.due()
        desk.plan.failed(task, "no", desk.now_s)
        again_s = desk.plan.next_s(desk.now_s)[1]
        waits.append(round(again_s - desk.now_s, 3))
        desk.now_s = again_s
    assert waits == sorted(waits)
    assert waits[0] == 0.5
    assert waits[-1] == 60.0
    assert list(desk.plan.stuck(desk.now_s)) == [("a", "no")]
    assert list(desk.plan.stuck(100.0)) == []


# -- any history
NAMES = (
    *("latest", "s1/.metadata", "s1/a", "s1/b", "s1/deep/c", "s2/.metadata", "s2/a", "x", "train.log"),
    *("checkpoint-1/trainer_state.json", "checkpoint-1/w", "trainer_state.json"),
)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("write"), st.sampled_from(NAMES)),
        st.tuples(st.just("remove"), st.sampled_from(NAMES)),
        st.tuples(st.just("look"), st.sampled_from([0.01, 0.2, 20.0])),
        st.tuples(st.just("begin"), st.integers(1, 4)),
        st.tuples(st.just("end"), st.sampled_from(["done", "done", "changed", "open", "lost", "failed", "untold"])),
    ),
    max_size=120,
)


@dataclass
class World:
    """A folder, S3, and the plan between them; files get a time whenever they are written."""

    desk: Desk = field(default_factory=Desk)
    s3: dict[str, Sight] = field(default_factory=dict)
    underway: list[Task] = field(default_factory=list)
    written: dict[Sight, dict[str, Sight]] = field(default_factory=dict)
    """What the folder held when a version was written."""

    def step(self, what: str, which: object) -> None:
        desk = self.desk
        if what == "write":
            desk.write(str(which))
            self.written[desk.sights[str(which)]] = dict(desk.sights)
        elif what == "remove" and which in desk.sights:
            desk.remove(str(which))
        elif what == "look":
            desk.look(float(str(which)))
        elif what == "begin":
            self.underway += desk.due(int(str(which)))
        elif what == "end" and self.underway:
            self.end(self.underway.pop(0), str(which))

    def end(self, task: Task, how: str) -> None:
        plan, now_s = self.desk.plan, self.desk.now_s
        is_same = self.desk.sights.get(task.name) == task.sight
        if task.act is Act.DELETE:
            if how in ("done", "lost"):
                held = self.s3.get(task.name)
                assert held is None or held in task.ours, "another's version was deleted"
                self.check_delete(task)
                self.s3.pop(task.name, None)
            plan.gone(task) if how == "done" else plan.failed(task, how, now_s)
            return
        if how in ("done", "lost") and (is_same or task.is_log):
            assert task.sight is not None
            self.check_send(task, task.sight)
            self.s3[task.name] = task.sight
            plan.sent(task, now_s) if how == "done" else plan.failed(task, how, now_s)
        elif how == "open":
            plan.opened(task, now_s)
        elif how == "untold":
            plan.untold(task)
        elif how == "failed":
            plan.failed(task, how, now_s)
        else:
            plan.changed(task, now_s)

    def check_send(self, task: Task, sight: Sight) -> None:
        """What was in the folder when a marker was written, and is there still, S3 has, or is being overwritten."""
        if task.role not in (Role.MARKER, Role.POINTER):
            return
        scope = scope_of(f"run/{task.name}")
        for name, then in self.written[sight].items():
            is_member = is_within(f"run/{name}", scope) and RANKS[role_of(f"run/{name}")] < RANKS[task.role]
            if is_member and not name.endswith(".log") and self.desk.sights.get(name) == then:
                assert self.s3.get(name) == then, f"{task.name} before {name}"

    def check_delete(self, task: Task) -> None:
        """No marker speaks for what goes, unless it is still in the folder."""
        for marker in self.s3:
            if role_of(f"run/{marker}") is Role.MARKER and marker not in self.desk.sights and marker != task.name:
                is_plain = task.role not in (Role.MARKER, Role.POINTER)
                assert not (is_plain and is_within(f"run/{task.name}", scope_of(f"run/{marker}"))), marker

    def settle(self) -> None:
        for _ in range(60):
            while self.underway:
                self.end(self.underway.pop(), "done")
            self.desk.look(70.0)
            self.underway = self.desk.due()


@settings(max_examples=300, deadline=None)
@given(STEPS)
def test_whatever_happens_markers_come_last_and_s3_becomes_the_folder(steps: list[tuple[str, object]]) -> None:
    world = World()
    for what, which in steps:
        world.step(what, which)
    world.settle()
    assert world.s3 == world.desk.sights
    assert world.desk.plan.is_done
    assert world.desk.plan.next_s(world.desk.now_s) == (float("inf"), float("inf"))


@settings(max_examples=100, deadline=None)
@given(STEPS)
def test_nothing_is_kept_of_what_went(steps: list[tuple[str, object]]) -> None:
    world = World()
    for what, which in steps:
        world.step(what, which)
    for name in list(world.desk.sights):
        world.desk.remove(name)
    world.settle()
    plan = world.desk.plan
    holding = plan._holding
    assert (world.s3, plan._files, plan._owed) == ({}, {}, {})
    assert (dict(holding.plain), dict(holding.inner)) == ({}, {})
    assert not any(holding.markers.values())


@pytest.mark.parametrize("count", [1, 3])
def test_no_more_is_begun_than_asked(count: int) -> None:
    desk = Desk()
    desk.write(*"abcdef")
    desk.look()
    desk.look()
    assert [task.name for task in desk.due(count)] == list("abcdef")[:count]
