"""The Dockerfile as its instructions, and what a container made from it runs."""

import json
import re
import shlex
from dataclasses import dataclass
from typing import Self

from tests.deploy.fresh import ROOT

DOCKER = ROOT / "deploy" / "docker"

Stage = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Image:
    """The stages of the build, each a sequence of (instruction, words); the last one is the image."""

    stages: tuple[Stage, ...]

    @classmethod
    def read(cls) -> Self:
        text = re.sub(r"^#.*\n", "", (DOCKER / "Dockerfile").read_text(), flags=re.MULTILINE)
        stages: list[list[tuple[str, str]]] = []
        for line in re.sub(r"\\\n", " ", text).splitlines():
            name, _, words = line.strip().partition(" ")
            if name == "FROM":
                stages.append([])
            elif name and stages:
                stages[-1].append((name, re.sub(r"\s+", " ", words.strip())))
        return cls(tuple(tuple(stage) for stage in stages))

    def of(self, instruction: str) -> list[str]:
        """The words of each such instruction of the image."""
        return [words for name, words in self.stages[-1] if name == instruction]

    @property
    def environment(self) -> dict[str, str]:
        """The variables it sets. PATH is the caller's to give."""
        pairs = [word.partition("=") for words in self.of("ENV") for word in shlex.split(words)]
        return {name: value for name, _, value in pairs if name != "PATH"}

    @property
    def entry(self) -> list[str]:
        """What runs whatever the arguments are."""
        return _words(self.of("ENTRYPOINT")[-1])

    @property
    def command(self) -> list[str]:
        """What a container runs that is given no arguments."""
        return self.entry + _words(self.of("CMD")[-1])

    @property
    def health_check(self) -> list[str]:
        """What asks whether it is healthy."""
        return _words(self.of("HEALTHCHECK")[-1].partition("CMD ")[2])


def _words(form: str) -> list[str]:
    """The words of an instruction in its exec form; the other one would put a shell between signals and node."""
    words = json.loads(form)
    assert isinstance(words, list)
    return [str(word) for word in words]
