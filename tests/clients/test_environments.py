"""Environments of clients are made once, and say why when they cannot be."""

import tempfile
from pathlib import Path

import pytest
from tests.clients import environments
from tests.clients.environments import EnvironmentNotBuiltError, python_of


def test_environment_without_an_index_says_what_it_needs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", "")
    monkeypatch.setitem(environments.ENVIRONMENTS, "some", ("six==1.17.0",))
    with pytest.raises(EnvironmentNotBuiltError, match=r"needs a package index that has six==1\.17\.0"):
        python_of("some")
    # What was begun is not taken for whole.
    with pytest.raises(EnvironmentNotBuiltError):
        python_of("some")


def test_environment_is_made_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    built: list[str] = []

    def build(name: str, folder: Path, _pins: tuple[str, ...]) -> None:
        folder.mkdir()
        built.append(name)

    monkeypatch.setattr(environments, "_build", build)
    monkeypatch.setitem(environments.ENVIRONMENTS, "some", ("six==1.17.0",))
    assert python_of("some") == python_of("some")
    monkeypatch.setitem(environments.ENVIRONMENTS, "some", ("six==1.16.0",))
    python_of("some")
    assert built == ["some", "some"]
