"""The judge of histories: what it accepts, and what it must not."""

from math import inf

import pytest

from tiergate.testing.histories import Did, Done, Value, unexplained

A, B = Value("a", 1), Value("b", 2)


def wrote(value: Value | None, from_s: float, until_s: float = inf) -> Done:
    return Done(Did.WROTE, value, from_s, until_s)


def read(value: Value | None, from_s: float, until_s: float) -> Done:
    return Done(Did.READ, value, from_s, until_s)


@pytest.mark.parametrize(
    "history",
    [
        [],
        [read(None, 0, 1)],
        [wrote(A, 0, 1), read(A, 2, 3)],
        [wrote(A, 0, 5), read(None, 1, 2), read(A, 3, 4)],
        [wrote(A, 0, 5), wrote(B, 0, 5), read(B, 1, 2), read(A, 3, 4)],
        [wrote(A, 0, 1), wrote(B, 2), read(A, 3, 4), read(B, 5, 6)],
        [wrote(A, 0, 1), wrote(B, 2), read(A, 3, 4)],
        [wrote(A, 0, 1), wrote(None, 2, 3), read(None, 4, 5)],
        [wrote(A, 0), wrote(A, 0), read(A, 1, 2), wrote(B, 3, 4), read(B, 5, 6), read(A, 7, 8)],
        [wrote(A, 0, 1), Done(Did.SAW_SIZE, Value("", 1), 2, 3), Done(Did.SAW_PRESENCE, Value("", 0), 2, 3)],
    ],
)
def test_history_with_an_order_is_explained(history: list[Done]) -> None:
    assert unexplained(history) == []


@pytest.mark.parametrize(
    ("history", "left"),
    [
        ([read(A, 0, 1)], 0),
        ([wrote(A, 0, 1), read(None, 2, 3)], 1),
        ([wrote(A, 0, 1), wrote(B, 2, 3), read(A, 4, 5)], 2),
        ([wrote(A, 0, 1), wrote(B, 2), read(B, 3, 4), read(A, 5, 6)], 3),
        ([wrote(A, 0, 9), read(A, 1, 2), read(None, 3, 4)], 2),
        ([wrote(A, 0, 1), Done(Did.SAW_SIZE, Value("", 2), 2, 3)], 1),
        ([wrote(None, 0, 1), Done(Did.SAW_PRESENCE, Value("", 0), 2, 3)], 1),
        ([wrote(A, 0), read(A, 1, 2), wrote(B, 3, 4), read(B, 5, 6), read(A, 7, 8)], 4),
        ([wrote(A, 5), read(A, 1, 2)], 1),
    ],
)
def test_history_without_an_order_names_what_is_left(history: list[Done], left: int) -> None:
    assert unexplained(history) == [history[left]]
