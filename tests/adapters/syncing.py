"""`tiergate sync` as a process under test."""

import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Self, TypeVar

from tiergate.clock import SystemClock

T = TypeVar("T")

DEADLINE_S = 120.0
PROGRAM = """
import argparse, sys
from tiergate.cli import Screen
from tiergate.errors import ConfigError
from tiergate_adapters.sagemaker.command import command
parser = argparse.ArgumentParser()
command.add_arguments(parser)
try:
    sys.exit(command.run(parser.parse_args(), Screen()))
except ConfigError as error:
    sys.exit(error.message)
"""


def until(what: str, probe: Callable[[], T], deadline_s: float = DEADLINE_S) -> T:
    """The first true value of `probe`.

    Raises:
        TimeoutError: there is none in time.
    """
    clock, pause = SystemClock(), threading.Event()
    end_s = clock.monotonic_s() + deadline_s
    while not (value := probe()):
        if clock.monotonic_s() > end_s:
            raise TimeoutError(f"never: {what}; the last value was {value!r}")
        pause.wait(0.02)
    return value


class RunningSync:
    """The command on a folder. A context manager: entering waits until the folder is restored, unless told otherwise;
    leaving kills it."""

    def __init__(
        self, folder: Path, uri: str, *flags: str, environment: Mapping[str, str], is_ready_awaited: bool = True
    ) -> None:
        self.lines: list[str] = []
        self.errors: list[str] = []
        self._command = [sys.executable, "-c", PROGRAM, str(folder), uri, *flags]
        self._environment = dict(environment)
        self._is_ready_awaited = is_ready_awaited
        self._threads: list[threading.Thread] = []
        self._ended: queue.SimpleQueue[None] = queue.SimpleQueue()

    def __enter__(self) -> Self:
        self.process = subprocess.Popen(
            self._command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=self._environment,
            text=True,
            errors="backslashreplace",
        )
        for stream, lines in ((self.process.stdout, self.lines), (self.process.stderr, self.errors)):
            thread = threading.Thread(target=lambda stream=stream, lines=lines: lines.extend(stream), daemon=True)
            thread.start()
            self._threads.append(thread)
        if self._is_ready_awaited:
            try:
                until("ready", lambda: self.is_ready or self.process.poll() is not None)
                assert self.is_ready, self.said
            except BaseException:
                self.__exit__()
                raise
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.wait()

    @property
    def is_ready(self) -> bool:
        return any(line.startswith("tiergate sync ready ") for line in self.lines)

    @property
    def said(self) -> str:
        """All it said so far."""
        return "".join([*self.lines, "--\n", *self.errors])

    def wait(self) -> int:
        """Its exit status."""
        status = self.process.wait(DEADLINE_S)
        for thread in self._threads:
            thread.join(DEADLINE_S)
        return status

    def stop(self) -> int:
        """SIGTERM, and its exit status."""
        self.process.send_signal(signal.SIGTERM)
        return self.wait()

    def kill9(self) -> None:
        """SIGKILL."""
        self.process.kill()
        self.wait()

    @property
    def cpu_s(self) -> float:
        """The time that it computed for."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def files_of(folder: Path) -> dict[str, bytes]:
    """What a folder holds, by names below it."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
