"""An installation as the image has it, and nodes started in it by the words of a deployment."""

import json
import os
import re
import selectors
import shutil
import subprocess
import time
import tomllib
import venv
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import distribution
from pathlib import Path
from typing import Any
from urllib.request import ProxyHandler, build_opener

from packaging.requirements import Requirement

import tiergate

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
DEADLINE_S = 60.0
_POLL_S = 0.05
_READY = re.compile(r"tiergate ready listen=(\S+) admin=(\S+) .*pid=\d+\n")


def make_environment(folder: Path, extra: str) -> Path:
    """A virtual environment with what `pip install .[extra]` brings, and nothing else: the packages are those of this
    environment, as links. Returns its folder of programs."""
    venv.create(folder, symlinks=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    wanted = [*PROJECT["dependencies"], *PROJECT["optional-dependencies"][extra]]
    for name in _closure(map(Requirement, wanted)):
        installed = distribution(name)
        for top in {Path(file).parts[0] for file in installed.files or ()} - {"..", "__pycache__"}:
            if not (packages / top).exists():
                (packages / top).symlink_to(str(installed.locate_file(top)))
    (packages / "tiergate").symlink_to(Path(tiergate.__file__).parent)
    for name, entry in PROJECT["scripts"].items():
        module, _, function = entry.partition(":")
        program = folder / "bin" / name
        program.write_text(f"#!{folder / 'bin' / 'python'}\nimport sys, {module}\nsys.exit({module}.{function}())\n")
        program.chmod(0o755)
    return folder / "bin"


def _closure(wanted: Iterator[Requirement]) -> set[str]:
    found: set[str] = set()
    left = list(wanted)
    while left:
        requirement = left.pop()
        if requirement.name in found:
            continue
        found.add(requirement.name)
        for line in distribution(requirement.name).requires or ():
            further = Requirement(line)
            extras = [{"extra": each} for each in requirement.extras or {""}]
            if further.marker is None or any(further.marker.evaluate(each) for each in extras):
                left.append(further)
    return found


@dataclass(frozen=True, slots=True)
class Served:
    """A node that was started by a deployment's words. `environment` is what it was given."""

    endpoint: str
    admin: str
    process: "subprocess.Popen[str]"
    environment: Mapping[str, str]

    def wait_status(self, holds: Callable[[dict[str, Any]], bool]) -> None:
        """Wait until the admin address answers with a status that `holds`."""
        status: dict[str, Any] = {}
        for _ in range(int(DEADLINE_S / _POLL_S)):
            with build_opener(ProxyHandler({})).open(f"{self.admin}/status", timeout=DEADLINE_S) as answer:
                status = json.load(answer)
            if holds(status):
                return
            time.sleep(_POLL_S)
        raise TimeoutError(json.dumps(status, indent=1))


@contextmanager
def served(command: Sequence[str], environment: Mapping[str, str], log: Path) -> Iterator[Served]:
    """Runs a deployment's command with its variables and no others, in a folder that cannot be written, until it is
    ready; ends it by SIGTERM as a container's runtime does, and it must then end well."""
    program = shutil.which(command[0], path=environment["PATH"])
    assert program is not None, f"{command[0]} is not on {environment['PATH']}"
    with (
        log.open("w") as out,
        subprocess.Popen(
            [program, *command[1:]],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=out,
            cwd="/",
            env={"HOME": "/nonexistent", "TMPDIR": "/nonexistent", **environment},
            text=True,
        ) as process,
    ):
        try:
            assert process.stdout is not None
            with selectors.DefaultSelector() as selector:
                selector.register(process.stdout, selectors.EVENT_READ)
                assert selector.select(DEADLINE_S), f"not ready: {log.read_text()}"
            ready = _READY.fullmatch(process.stdout.readline())
            assert ready, log.read_text()
            yield Served(ready[1], ready[2], process, environment)
            process.terminate()
            assert process.wait(DEADLINE_S) == 0, log.read_text()
        finally:
            process.kill()


def local(folder: Path, origin: str) -> dict[str, str]:
    """What a test sets otherwise than any deployment: places and sizes of this machine."""
    return {
        "TIERGATE_LISTEN": "127.0.0.1:0",
        "TIERGATE_ADMIN_LISTEN": "127.0.0.1:0",
        "TIERGATE_MEMORY_DIR": str(folder),
        "TIERGATE_MEMORY_LIMIT": "64MiB",
        "TIERGATE_WORKERS": "1",
        "TIERGATE_ORIGIN": origin,
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_EC2_METADATA_DISABLED": "true",
        "AWS_CONFIG_FILE": os.devnull,
    }
