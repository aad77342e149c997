"""Each sentence of SEMANTICS.md has a test, and each test that names a sentence names one that stands there."""

import ast
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

TESTS = Path(__file__).parents[1]
SENTENCES = TESTS.parent / "gateway" / "docs" / "SEMANTICS.md"

NUMBERED = re.compile(r"^- \*\*(P\d+\.\d+)\*\* ", re.MULTILINE)
PROMISE = re.compile(r"^## (P\d+) ", re.MULTILINE)


def numbers_in(path: Path) -> Iterator[str]:
    """The arguments of `pytest.mark.semantics` on the test functions of a file."""
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or not node.name.startswith("test_"):
            continue
        for mark in node.decorator_list:
            if isinstance(mark, ast.Call) and ast.unparse(mark.func) == "pytest.mark.semantics":
                assert mark.args, f"{path}: {node.name} is marked without a number"
                yield from (ast.literal_eval(each) for each in mark.args)


def numbers_tested() -> set[str]:
    return {number for path in TESTS.rglob("test_*.py") for number in numbers_in(path)}


def test_every_sentence_has_a_test_and_every_marked_test_a_sentence() -> None:
    sentences = set(NUMBERED.findall(SENTENCES.read_text()))
    assert sentences
    assert sentences - numbers_tested() == set(), "sentences without a test"
    assert numbers_tested() - sentences == set(), "tests without a sentence"


def test_sentences_are_numbered_in_order_within_their_promise() -> None:
    promises = PROMISE.findall(SENTENCES.read_text())
    numbers = NUMBERED.findall(SENTENCES.read_text())
    counts = Counter(number.partition(".")[0] for number in numbers)
    assert numbers == [f"{promise}.{index}" for promise in promises for index in range(1, counts[promise] + 1)]


def test_marks_are_found_where_they_are(tmp_path: Path) -> None:
    path = tmp_path / "test_example.py"
    path.write_text(
        "import pytest\n"
        "@pytest.mark.semantics('P1.1', 'P1.2')\n"
        "def test_a(): ...\n"
        "@pytest.mark.semantics('P9.9')\n"
        "def no_test(): ...\n"
    )
    assert list(numbers_in(path)) == ["P1.1", "P1.2"]
