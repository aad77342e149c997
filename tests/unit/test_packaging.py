"""What is installed is what was meant, and the source keeps the rules that no linter knows."""

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import tiergate

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "gateway" / "tiergate"
MODULES = sorted(SOURCE.rglob("*.py"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PINNED = {
    canonicalize_name(name): pinned
    for name, _, pinned in (
        line.partition("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")
    )
}

MAY_PRINT = {"cli.py"}
MAY_READ_CLOCKS = {"clock.py"}
CLOCKS = {"time", "time_ns", "monotonic", "monotonic_ns", "perf_counter", "perf_counter_ns"}
TEXT_SUFFIXES = {".py", ".md", ".toml", ".txt", ".yaml", ".yml", ".service", ".sh", ""}


def name_of(path: Path) -> str:
    return str(path.relative_to(SOURCE))


def requirements() -> list[Requirement]:
    extras = PROJECT["optional-dependencies"]
    return [Requirement(line) for lines in (PROJECT["dependencies"], *extras.values()) for line in lines]


def files() -> Iterator[Path]:
    """The project's own text files."""
    for place in ("gateway", "tests", "deploy", ".ci", "README.md", "pyproject.toml", "constraints.txt"):
        path = ROOT / place
        for file in [path] if path.is_file() else path.rglob("*"):
            if file.is_file() and file.suffix in TEXT_SUFFIXES and "__pycache__" not in file.parts:
                yield file


@pytest.mark.parametrize(
    "name",
    ["aiobotocore", "aiohttp", "awscrt", "boto3", "botocore", "lmdb", "moto", "msgspec", "pyarrow", "s3fs", "torch"],
)
def test_installed_version_is_the_pinned_one(name: str) -> None:
    # Without its pin, pip settles a conflict over botocore by an s3fs of years ago.
    assert version(name).partition("+")[0] == PINNED[canonicalize_name(name)]


def test_every_requirement_is_pinned_within_its_bounds() -> None:
    for requirement in requirements():
        if requirement.name != PROJECT["name"]:
            assert requirement.specifier.contains(PINNED[canonicalize_name(requirement.name)]), requirement


def test_pins_are_plain_and_in_order() -> None:
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    assert all(re.fullmatch(r"[a-z0-9._-]+==[a-z0-9.]+", line) for line in lines), lines
    names = [line.partition("==")[0] for line in lines]
    assert names == sorted(names)


def test_source_roots_and_tests_are_no_packages() -> None:
    for place in ("gateway", "adapters", "tests"):
        assert not (ROOT / place / "__init__.py").exists(), place
    inner = {folder for folder in (ROOT / "tests").rglob("*") if (folder / "__init__.py").exists()}
    assert inner == set()


def test_every_package_says_what_it_is_for() -> None:
    silent = [name_of(path) for path in MODULES if not ast.get_docstring(ast.parse(path.read_text()))]
    assert silent == []


def test_every_module_can_be_the_first_one_imported() -> None:
    names = [
        "tiergate." + name_of(path).removesuffix(".py").replace("/", ".").removesuffix(".__init__")
        for path in MODULES
        if path.name != "__main__.py" and path != SOURCE / "__init__.py"
    ]
    # One process: each module is imported with nothing of ours loaded, on libraries that are.
    code = """
import importlib, sys, traceback
failed = []
for name in sys.argv[1:]:
    for loaded in [each for each in sys.modules if each.partition(".")[0] == "tiergate"]:
        del sys.modules[loaded]
    try:
        importlib.import_module(name)
    except BaseException as error:  # a module that exits when it is imported fails too
        failed.append(f"{name}: {error!r}")
print("\\n".join(failed))
"""
    done = subprocess.run(
        [sys.executable, "-c", code, *names],
        env={"PYTHONPATH": str(Path(tiergate.__file__).parent.parent), "PATH": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout.strip()) == (0, ""), done.stderr


def test_a_gateway_without_extras_loads_none_of_their_packages() -> None:
    code = "import sys, tiergate.cli, tiergate.node, tiergate.server.worker, tiergate.server.background; "
    code += "print([name for name in ('torch', 's3fs', 'moto', 'flask', 'pyarrow') if name in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={"PYTHONPATH": str(Path(tiergate.__file__).parent.parent), "PATH": ""},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == "[]"


def faults(name: str, source: str) -> list[str]:
    """Where a module breaks the rules of the house."""
    wrong: list[str] = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.module == "time" and name not in MAY_READ_CLOCKS:
            wrong += [f"{node.lineno}: imports a clock" for each in node.names if each.name in CLOCKS]
        if isinstance(node, ast.Attribute) and node.attr in CLOCKS and ast.unparse(node.value) == "time":
            wrong += [] if name in MAY_READ_CLOCKS else [f"{node.lineno}: reads a clock"]
        if isinstance(node, ast.Call):
            function = ast.unparse(node.func)
            if function == "print" and name not in MAY_PRINT:
                wrong.append(f"{node.lineno}: prints")
            if function in ("sys.exit", "exit", "quit") and name != "__main__.py":
                wrong.append(f"{node.lineno}: exits")
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            function = ast.unparse(node.value.func)
            # A task in a TaskGroup has an owner: https://docs.python.org/3/library/asyncio-task.html#task-groups
            if function.endswith(("create_task", "ensure_future")) and "group" not in function:
                wrong.append(f"{node.lineno}: a task without an owner")
    return wrong


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_module_keeps_the_house_rules(path: Path) -> None:
    assert faults(name_of(path), path.read_text()) == []


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        ("print(1)", "prints"),
        ("sys.exit(1)", "exits"),
        ("x = time.monotonic()", "reads a clock"),
        ("clock = time.time", "reads a clock"),
        ("from time import perf_counter", "imports a clock"),
        ("asyncio.create_task(f())", "a task without an owner"),
        ("loop.create_task(f())", "a task without an owner"),
    ],
)
def test_house_rules_see_what_they_forbid(line: str, fault: str) -> None:
    assert faults("engine/any.py", line) == [f"1: {fault}"]


def test_house_rules_allow_what_has_an_owner() -> None:
    assert faults("engine/any.py", "group.create_task(f())\ntask = loop.create_task(f())\n") == []


def test_no_file_names_a_place_of_one_machine() -> None:
    place = re.compile(r"(?<![\w./-])/(?:work|root|home/\w+|opt|Users)/")
    found = [
        f"{path.relative_to(ROOT)}:{number}"
        for path in files()
        if path != Path(__file__)
        for number, line in enumerate(path.read_text("utf-8").splitlines(), 1)
        if place.search(line)
    ]
    assert found == []
