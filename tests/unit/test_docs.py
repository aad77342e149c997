"""The documents: generated ones are up to date, links lead somewhere, and named metrics and settings exist."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tiergate.config import reference
from tiergate.config.prefixes import KEYS
from tiergate.config.settings import DECLARATIONS
from tiergate.observe import metrics
from tiergate.observe.metrics import Metrics

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "gateway" / "docs"
DEPLOY = ROOT / "deploy"
PAGES = sorted(
    [
        ROOT / "README.md",
        ROOT / "adapters" / "README.md",
        ROOT / "gateway" / "CHANGELOG.md",
        *DOCS.rglob("*.md"),
        *DEPLOY.rglob("*.md"),
    ]
)

LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+ +(.*)$", re.MULTILINE)
CODE_BLOCK = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
SETTING = re.compile(r"`(?!tiergate_)([a-z]+(?:_[a-z]+)+)(?: = [^`]*)?`")
METRIC = re.compile(r"`(tiergate_[a-z_]+)(?:\{[^}]*\})?`")


def text_of(page: Path) -> str:
    """A page without its blocks of code."""
    return CODE_BLOCK.sub("", page.read_text())


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    plain = (re.sub(r"[^\w\- ]", "", heading.lower()) for heading in HEADING.findall(text_of(page)))
    return {heading.strip().replace(" ", "-") for heading in plain}


def broken_links(page: Path) -> Iterator[str]:
    """Links of a page to files or headings that are not there."""
    for link in LINK.findall(text_of(page)):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            yield link


@pytest.mark.parametrize(
    ("name", "rendered"),
    [("CONFIG.md", reference.render_reference()), ("METRICS.md", metrics.render_reference())],
    ids=["CONFIG", "METRICS"],
)
def test_generated_page_is_up_to_date(name: str, rendered: str) -> None:
    assert (DOCS / name).read_text() == rendered


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_of_a_page_resolve(page: Path) -> None:
    assert list(broken_links(page)) == []


def test_broken_links_are_found(tmp_path: Path) -> None:
    (tmp_path / "there.md").write_text("# Some heading\n")
    page = tmp_path / "page.md"
    page.write_text(
        "# Own\n[a](there.md) [b](there.md#some-heading) [c](#own) [d](https://example.com/x)\n"
        "[e](gone.md) [f](there.md#gone) [g](#gone)\n```\n[h](gone.md)\n```\n"
    )
    assert list(broken_links(page)) == ["gone.md", "there.md#gone", "#gone"]


@pytest.mark.parametrize("page", [DOCS / "FAILURES.md", DOCS / "SEMANTICS.md"], ids=lambda page: page.name)
def test_metrics_that_a_page_names_are_declared_and_used(page: Path) -> None:
    declared = Metrics().declared
    named = set(METRIC.findall(page.read_text()))
    assert named
    assert {name for name in named if name not in declared} == set()
    used = "\n".join(
        path.read_text()
        for path in (ROOT / "gateway" / "tiergate").rglob("*.py")
        if path.name != "metrics.py" or path.parent.name != "observe"
    )
    attributes = {value.metric.name: name for name, value in vars(Metrics()).items() if hasattr(value, "metric")}
    unused = {name for name in named if name in attributes and f"metrics.{attributes[name]}" not in used}
    assert unused == set(), "metrics that never move"


@pytest.mark.parametrize("page", [DOCS / "FAILURES.md", DOCS / "SEMANTICS.md"], ids=lambda page: page.name)
def test_settings_that_a_page_names_are_declared(page: Path) -> None:
    declared = {declaration.name for declaration in DECLARATIONS.values()} | KEYS
    named = set(SETTING.findall(page.read_text()))
    assert named
    assert named - declared == set()
