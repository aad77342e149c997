"""What the demo takes for the same, and that it fails when something is not."""

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch

from tiergate import demo
from tiergate.demo import play, stage
from tiergate.demo.training import Trainer, differences, frozen, leaves, tensors_count

NAN = float("nan")


@pytest.mark.parametrize(
    ("found", "wrong"),
    [
        ({"a": torch.tensor([1.0, NAN]), "b": 1}, []),
        ({"a": torch.tensor([1.0, 2.0]), "b": 1}, ["a differs"]),
        ({"a": torch.tensor([1.0, NAN], dtype=torch.float64), "b": 1}, ["a differs"]),
        ({"a": torch.tensor([[1.0, NAN]]), "b": 1}, ["a differs"]),
        ({"a": torch.tensor([1.0, NAN]), "b": True}, ["b differs"]),
        ({"a": torch.tensor([1.0, NAN])}, ["b is missing"]),
        ({"a": torch.tensor([1.0, NAN]), "b": 1, "c": 2}, ["c is too much"]),
    ],
)
def test_differences_names_what_is_not_the_same(found: dict[str, Any], wrong: list[str]) -> None:
    assert differences({"a": torch.tensor([1.0, NAN]), "b": 1}, found) == wrong


def test_zeros_of_another_sign_differ() -> None:
    assert differences({"a": torch.tensor(0.0)}, {"a": torch.tensor(-0.0)}) == ["a differs"]


def test_leaves_go_into_mappings_and_lists() -> None:
    assert dict(leaves({"a": {"b": [1, {"c": 2}]}, "d": 3})) == {"a/b/0": 1, "a/b/1/c": 2, "d": 3}


def test_training_changes_the_state_but_not_what_was_frozen() -> None:
    trainer = Trainer(seed=1)
    before = frozen(trainer.state())
    kept = {path: value.clone() if isinstance(value, torch.Tensor) else value for path, value in before.items()}
    losses: list[float] = []
    assert trainer.train(2, losses.append) == losses[-1]
    assert len(losses) == 2
    assert differences(kept, before) == []
    wrong = differences(before, frozen(trainer.state()))
    assert any(line.startswith("model/") for line in wrong)
    assert any(line.startswith("optimizer/") for line in wrong)
    assert tensors_count(before) > 100


def test_trainers_of_one_seed_are_the_same_and_of_two_are_not() -> None:
    one = frozen(Trainer(seed=1).state())
    assert differences(one, frozen(Trainer(seed=1).state())) == []
    assert differences(one, frozen(Trainer(seed=2).state())) != []


@pytest.mark.timeout(300)
@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
def test_demo_fails_when_a_restored_tensor_differs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    load: Callable[[str, Any], dict[str, Any]] = vars(stage)["load"]

    def load_and_spoil(uri: str, store: Any) -> dict[str, Any]:
        state = load(uri, store)
        if uri.endswith("step_2"):
            with torch.no_grad():
                state["model"]["head.bias"][0] += 1
        return state

    monkeypatch.setattr(stage, "load", load_and_spoil)
    monkeypatch.setenv("COLUMNS", "160")
    assert demo.run(["--steps", "1"]) == demo.EXIT_DIFFERENT
    shown = capsys.readouterr().out
    assert shown.count("1 DIFFERENCES") == 2
    assert "step 2 from the origin alone: model/head.bias differs" in shown
    assert "every tensor came back" not in shown


@pytest.mark.parametrize(
    "words", [["--steps", "0"], ["--steps", "x"], ["--nodes", "2"], ["--nodes", "x"], ["--no-such-flag"]]
)
def test_demo_with_wrong_arguments_is_a_usage_error(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        demo.run(words)
    assert ended.value.code == 2
    assert "usage: tiergate demo" in capsys.readouterr().err


def test_demo_that_fails_says_why_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: play.Play) -> Mapping[str, object]:
        raise TimeoutError("the origin is not ready: {\nmore\n}")

    monkeypatch.setattr(play.Play, "show", fail)
    with pytest.raises(demo.DemoError, match=r"^the demo failed: the origin is not ready$"):
        demo.run([])
