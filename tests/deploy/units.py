"""systemd's units as their entries."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from tests.deploy.fresh import ROOT

SYSTEMD = ROOT / "deploy" / "systemd"
_UNITS_S = {"": 1, "s": 1, "min": 60, "h": 3600}


@dataclass(frozen=True, slots=True)
class Unit:
    """Every value of each entry, by section and name."""

    path: Path
    entries: dict[tuple[str, str], list[str]]

    @classmethod
    def read(cls, name: str) -> Self:
        entries: dict[tuple[str, str], list[str]] = {}
        section = ""
        for line in re.sub(r"\\\n", " ", (SYSTEMD / name).read_text()).splitlines():
            if line.startswith("["):
                section = line.strip("[]")
            elif line and not line.startswith("#"):
                key, _, value = line.partition("=")
                entries.setdefault((section, key), []).append(value)
        return cls(SYSTEMD / name, entries)

    def one(self, section: str, name: str) -> str:
        """The value of an entry that is there once."""
        (value,) = self.entries[section, name]
        return value

    def seconds(self, name: str) -> float:
        """A span of time of the service (https://www.freedesktop.org/software/systemd/man/systemd.time.html)."""
        parts = re.findall(r"(\d+) *([a-z]*)", self.one("Service", name))
        return float(sum(int(number) * _UNITS_S[unit] for number, unit in parts))


def variables(name: str) -> dict[str, str]:
    """A file of variables, as EnvironmentFile= reads it."""
    lines = ((SYSTEMD / name).read_text()).splitlines()
    pairs = (line.partition("=") for line in lines if line and not line.startswith("#"))
    return {name: value for name, _, value in pairs}
