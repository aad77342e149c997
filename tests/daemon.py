"""The memory daemon's protocol as tests speak it: bare HTTP, so that every header and status is seen."""

import base64
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from http.client import HTTPConnection
from typing import Any

import xxhash

TIMEOUT_S = 60


def checksum_of(body: bytes) -> str:
    """The checksum that the protocol means."""
    return base64.b64encode(xxhash.xxh3_128(body).digest()).decode()


def meta_of(body: bytes) -> dict[str, str]:
    """The header that goes with a shard."""
    return {"Shard-Meta": json.dumps({"checksum": checksum_of(body), "algorithm": "xxh3_128"})}


@dataclass(frozen=True)
class Reply:
    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def checksum(self) -> str:
        """What it says of its body."""
        said = json.loads(self.headers["Shard-Meta"])
        assert said["algorithm"] == "xxh3_128"
        return str(said["checksum"])


class DaemonClient:
    """Asks the daemon at a URL; each request on a connection of its own."""

    def __init__(self, url: str) -> None:
        self.host = url.removeprefix("http://")

    def ask(
        self, method: str, path: str, body: bytes | Iterable[bytes] | None = None, headers: Mapping[str, str] = {}
    ) -> Reply:
        connection = HTTPConnection(self.host, timeout=TIMEOUT_S)
        try:
            connection.request(method, path, body, dict(headers))
            answer = connection.getresponse()
            return Reply(answer.status, dict(answer.getheaders()), answer.read())
        finally:
            connection.close()

    def create(self, namespace: str, ranks: int = 3, retained: int = 3) -> Reply:
        query = f"num_ranks={ranks}&steps_retained={retained}"
        return self.ask("POST", f"/v1/cp/namespaces/{namespace}?{query}")

    def put(self, namespace: str, rank: int, step: int, body: bytes) -> int:
        """As the stock client does; the status."""
        return self.ask("POST", f"/v1/cp/checkpoints/{namespace}/{rank}/{step}", body, meta_of(body)).status

    def get(self, namespace: str, rank: int, step: int) -> Reply:
        return self.ask("GET", f"/v1/cp/checkpoints/{namespace}/{rank}/{step}")

    def read(self, namespace: str, rank: int, step: int) -> bytes | None:
        """A shard that is what its header says; None if there is none."""
        reply = self.get(namespace, rank, step)
        if reply.status == 404:
            return None
        assert reply.status == 200, reply
        assert reply.checksum == checksum_of(reply.body)
        assert reply.headers["Content-Length"] == str(len(reply.body))
        return reply.body

    def save(self, namespace: str, step: int, ranks: int = 3) -> None:
        """A whole step, each rank's shard telling what it is."""
        for rank in range(ranks):
            assert self.put(namespace, rank, step, shard_of(rank, step)) == 200

    def latest(self, namespace: str, limit: int | None = None) -> list[int]:
        query = "" if limit is None else f"?limit={limit}"
        reply = self.ask("GET", f"/v1/cp/checkpoints/{namespace}/latest{query}")
        assert reply.status == 200, reply
        found: list[int] = reply.json
        return found


def shard_of(rank: int, step: int) -> bytes:
    """What `save` writes."""
    return f"rank {rank} of step {step}".encode()
