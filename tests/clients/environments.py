"""Python environments for clients that constraints.txt cannot hold beside the others.

Each is declared here, once, with all that it holds. It is made by `venv` and pip when a test first needs it, and kept
in the temporary folder for later runs.
"""

import fcntl
import os
import subprocess
import sys
import tempfile
from hashlib import sha256
from pathlib import Path
from shutil import rmtree

BUILD_TIMEOUT_S = 300

ENVIRONMENTS = {
    # The last release before boto3 sent checksums by default.
    "boto3-1.35": (
        "awscrt==0.22.0",
        "boto3==1.35.99",
        "botocore==1.35.99",
        "jmespath==1.0.1",
        "python-dateutil==2.9.0.post0",
        "s3transfer==0.10.4",
        "six==1.17.0",
        "urllib3==2.3.0",
    ),
}


class EnvironmentNotBuiltError(Exception):
    """An environment could not be made; the message says what pip said."""


def pinned(environment: str, package: str) -> str:
    """The version of a package in an environment."""
    (found,) = (pin for pin in ENVIRONMENTS[environment] if pin.startswith(f"{package}=="))
    return found.partition("==")[2]


def python_of(name: str) -> Path:
    """The Python of an environment, which is made if it is not there yet.

    Raises:
        EnvironmentNotBuiltError: pip reaches no index, or finds no version that this Python can take.
    """
    pins = ENVIRONMENTS[name]
    digest = sha256("\n".join((sys.version, sys.base_prefix, *pins)).encode()).hexdigest()[:12]
    place = Path(tempfile.gettempdir()) / f"tiergate-clients-{os.getuid()}"
    place.mkdir(mode=0o700, exist_ok=True)
    if place.stat().st_uid != os.getuid():
        raise EnvironmentNotBuiltError(f"{place} belongs to somebody else")
    folder = place / f"{name}-{digest}"
    with (place / f"{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # two runs may want it at once
        if not (folder / "complete").exists():
            _build(name, folder, pins)
            (folder / "complete").touch()
    return folder / "bin" / "python"


def _build(name: str, folder: Path, pins: tuple[str, ...]) -> None:
    rmtree(folder, ignore_errors=True)
    pip = [sys.executable, "-m", "pip", "--python", str(folder / "bin" / "python"), "--disable-pip-version-check"]
    for command in (
        [sys.executable, "-m", "venv", "--without-pip", str(folder)],
        [*pip, "install", "--quiet", "--no-input", "--no-deps", "--no-compile", "--only-binary=:all:", *pins],
    ):
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=BUILD_TIMEOUT_S,
            check=False,
        )
        if done.returncode != 0:
            raise EnvironmentNotBuiltError(
                f"the environment {name} for old clients was not built; pip needs a package index that has "
                f"{', '.join(pins)}\n$ {' '.join(command)}\n{done.stdout}"
            )
