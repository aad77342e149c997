"""Who is asked: the gateway of the environment, then its peers, then S3 itself.

Peers are gateways of the same cluster and say what it would say. S3 lacks what is not written back yet, so that it is
asked only by those who say that they trust it; to write there needs no trust.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit

from boto3.session import Session
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError, HTTPClientError, NoCredentialsError
from botocore.exceptions import ConnectionError as BotoConnectionError

from tiergate_adapters.slabs import Memory, Share, share_of
from tiergate_adapters.wire import Endpoint

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tiergate_adapters.wire import Reply

log = logging.getLogger("tiergate_adapters")

ENDPOINTS_VARIABLE = "TIERGATE_ENDPOINTS"
"""Further gateways, by commas."""

ORIGIN_VARIABLE = "TIERGATE_ORIGIN"
"""The endpoint of S3 itself; `aws` for Amazon's own."""

PROFILE_VARIABLE = "TIERGATE_ORIGIN_PROFILE"
"""A profile of the AWS configuration that has the keys for S3 itself, where those of the gateway are others."""

AWS = "aws"
PERSIST_HEADER = "x-tiergate-persist"

ATTEMPTS_COUNT = 5
DOWN_S = 10.0
"""So long nobody asks again who did not answer."""

NOT_IMPLEMENTED = 501
ACKNOWLEDGED_COUNT = 8192

T = TypeVar("T")


class UnreachableError(ConnectionError):
    """Nobody who could answer does. It says nothing of whether an object exists."""


@dataclass(frozen=True, slots=True)
class Tier:
    """Somebody to ask. `endpoint`: None for what the environment says."""

    kind: str
    endpoint: str | None

    def __str__(self) -> str:
        return f"{self.kind} {self.endpoint}" if self.endpoint else self.kind


GATEWAY = Tier("the gateway", None)


@dataclass(frozen=True, slots=True)
class Node:
    """What a gateway said of itself."""

    name: str
    memory: Memory
    peers: tuple[str, ...]
    origin: str
    region: str


@dataclass(eq=False)
class Route:
    """The tiers of a store, and which of them answer. Thread-safe; picklable: connections are made anew."""

    endpoints: tuple[str, ...] = ()
    origin: str | None = None
    persist: str | None = None
    attempts_count: int = ATTEMPTS_COUNT
    node: Node | None = None
    """The gateway's last answer, remembered for when it does not answer."""
    _clients: dict[Tier, Any] = field(default_factory=dict, repr=False)
    _down: dict[Tier, float] = field(default_factory=dict, repr=False)
    _endpoint: Endpoint | None = field(default=None, repr=False)
    _acknowledged: dict[tuple[str, str], int] = field(default_factory=dict, repr=False)
    _looked: bool = False
    _noted: set[str] = field(default_factory=set, repr=False)
    _lock: threading.RLock = field(default_factory=threading.RLock, repr=False)

    def __post_init__(self) -> None:
        named = os.environ.get(ENDPOINTS_VARIABLE, "")
        self.endpoints = self.endpoints or tuple(each.strip() for each in named.split(",") if each.strip())
        self.origin = self.origin if self.origin is not None else os.environ.get(ORIGIN_VARIABLE)
        _routes.add(self)

    def __reduce__(self) -> tuple[Any, ...]:
        return Route, (self.endpoints, self.origin, self.persist, self.attempts_count, self.node)

    # -- who there is

    def gateways(self) -> list[Tier]:
        """The gateway of the environment, and those that can answer in its place."""
        peers = self.node.peers if self.node is not None else ()
        known = dict.fromkeys((*self.endpoints, *peers))
        return [GATEWAY, *(Tier("the gateway", each.rstrip("/")) for each in known)]

    def alone(self) -> str:
        """What an error adds where no other gateway is known."""
        return f"; no other gateway is known, {ENDPOINTS_VARIABLE} may name some" if len(self.gateways()) == 1 else ""

    def s3(self) -> Tier | None:
        """S3 itself, if it is known where it is behind the gateway."""
        origin = self.origin
        if origin is None and self.node is not None:
            origin = self.node.origin or AWS
        return None if origin is None else Tier("S3 at", origin)

    def client(self, tier: Tier = GATEWAY) -> Any:
        """The S3 client of a tier, thread-safe."""
        with self._lock:
            if tier not in self._clients:
                self._clients[tier] = self._client_of(tier)
            return self._clients[tier]

    def _client_of(self, tier: Tier) -> Any:
        retries: Any = {"mode": "standard", "total_max_attempts": self.attempts_count}
        to_s3 = tier.kind != GATEWAY.kind
        profile = os.environ.get(PROFILE_VARIABLE) if to_s3 else None
        region = self.node.region or None if to_s3 and self.node is not None else None
        # The stubs lack what keeps the environment's endpoint away from Amazon's own S3.
        more: Any = {"ignore_configured_endpoint_urls": True} if tier.endpoint == AWS else {}
        endpoint = None if tier.endpoint == AWS else tier.endpoint
        persist = None if to_s3 else self.persist

        def make() -> Any:
            config = Config(retries=retries, **more)
            client = Session(profile_name=profile).client(
                "s3", endpoint_url=endpoint, region_name=region, config=config
            )
            if persist is not None:
                client.meta.events.register("before-sign.s3", partial(_mark, persist))
            return client

        return _made(("client", tier, profile, region, persist, self.attempts_count), make)

    def renew(self) -> None:
        """In a child that was forked: connections are its parent's, and a thread that it does not have may hold the
        lock."""
        self._lock = threading.RLock()
        self._clients, self._down, self._endpoint, self._looked = {}, {}, None, False

    # -- the node on this machine

    def ask(self, *words: Any, **more: Any) -> Reply:
        """A request of our own to the gateway of the environment (`Endpoint.ask`)."""
        with self._lock:
            client = self.client()
            if self._endpoint is None:
                url, region = client.meta.endpoint_url, client.meta.region_name
                self._endpoint = _made(("endpoint", url, region), lambda: _endpoint_of(url, region))
        return self._endpoint.ask(*words, **more)

    def share(self) -> Share | None:
        """This process's share in the memory of the gateway's node; None if it is on another machine, or does not
        answer."""
        self.look()
        return share_of(self.node.memory) if self.node is not None and not self.is_down(GATEWAY) else None

    def look(self, *, again: bool = False) -> None:
        """Ask the gateway who it is, unless it said so already. What is no gateway, and who does not answer, is not
        asked by each object anew."""
        with self._lock:
            host = urlsplit(self.client().meta.endpoint_url).hostname or ""
            if (self._looked and not again) or host.endswith("amazonaws.com") or self.is_down(GATEWAY):
                return
            try:
                found = self.ask("GET", query={"x-tiergate-node": ""}).document()
            except (BotoCoreError, HTTPClientError, BotoConnectionError) as error:
                self.note_down(GATEWAY, error)
                return
            self._looked = True
            if found is not None:
                origin = found["origin"]
                memory = Memory.of(found["memory"])
                self.node = Node(found["node"], memory, tuple(found["peers"]), origin["endpoint"], origin["region"])

    # -- what gateways acknowledged to this process

    def note_acknowledged(self, bucket: str, key: str, size_bytes: int) -> None:
        """A gateway has an object, which S3 may not have yet. The last some thousand are remembered."""
        with self._lock:
            self._acknowledged.pop((bucket, key), None)
            self._acknowledged[(bucket, key)] = size_bytes
            if len(self._acknowledged) > ACKNOWLEDGED_COUNT:
                del self._acknowledged[next(iter(self._acknowledged))]

    def acknowledged(self, bucket: str) -> dict[str, int]:
        """The keys of a bucket that are remembered, with their lengths."""
        with self._lock:
            return {key: size_bytes for (named, key), size_bytes in self._acknowledged.items() if named == bucket}

    # -- asking

    def is_down(self, tier: Tier) -> bool:
        """Whether it did not answer a moment ago."""
        return self._down.get(tier, 0.0) > time.monotonic()

    def note(self, state: str, text: str) -> None:
        """Something falls back; said once in the log until it is over."""
        if state not in self._noted:
            self._noted.add(state)
            log.warning(text)

    def forget(self, state: str) -> None:
        """It is over."""
        self._noted.discard(state)

    def note_down(self, tier: Tier, error: BaseException) -> None:
        """It does not answer; said once in the log until it does again."""
        if tier not in self._down:
            log.warning("%s does not answer, others are asked in its place: %s", tier, error)
        self._down[tier] = time.monotonic() + DOWN_S

    def note_up(self, tier: Tier) -> None:
        """It answered."""
        if self._down.pop(tier, None) is not None:
            log.warning("%s answers again", tier)
        if tier.kind == GATEWAY.kind:
            self.forget("s3")

    def read(self, what: str, ask: Callable[[Any], T], *, trust_s3: bool) -> T:
        """Ask for something that exists or not.

        Raises:
            UnreachableError: who knows does not answer.
            ClientError: as the first who answers refuses.
        """
        tiers, s3 = self.gateways(), self.s3()
        if trust_s3 and s3 is not None:
            tiers.append(s3)
        return self._first(
            what, ask, tiers, "" if trust_s3 else "; S3 lacks what is not written back, so it is not asked"
        )

    def change(self, what: str, ask: Callable[[Any], T]) -> T:
        """Have a gateway do something.

        Raises:
            UnreachableError: none answers.
            ClientError: as the first who answers refuses.
        """
        return self._first(what, ask, self.gateways(), "")

    def at_s3(self, what: str, ask: Callable[[Any], T]) -> T:
        """Have S3 itself do something, past all gateways.

        Raises:
            UnreachableError: it does not answer, or nobody knows where it is.
        """
        s3 = self.s3()
        self.note("s3", "no gateway answers, writes go to S3 itself")
        if s3 is None:
            return self._first(what, ask, [], "; where S3 is was never said")
        return self._first(what, ask, [s3], "")

    def _first(self, what: str, ask: Callable[[Any], T], tiers: Sequence[Tier], why: str) -> T:
        up = [tier for tier in tiers if not self.is_down(tier)]
        # Where nobody else is left who could be asked, who did not answer is asked again.
        failures: list[str] = []
        last: BaseException | None = None
        for tier in up or tiers:
            try:
                found = ask(self.client(tier))
            except Exception as error:
                if not is_unreachable(error):
                    self.note_up(tier)
                    raise
                self.note_down(tier, error)
                failures.append(f"{tier} does not answer ({error})")
                last = error
                continue
            self.note_up(tier)
            return found
        told = ", ".join(failures) or "nobody is known who could be asked"
        raise UnreachableError(f"{what}: {told}{self.alone()}{why}") from last


def _mark(persist: str, request: Any, **_: object) -> None:
    if request.method in ("PUT", "POST"):
        request.headers[PERSIST_HEADER] = persist


def _endpoint_of(url: str, region: str) -> Endpoint:
    credentials = Session().get_credentials()
    if credentials is None:
        raise NoCredentialsError
    return Endpoint(url, credentials, region)


CONFIGURING = ("AWS_", "TIERGATE_", "HOME", "BOTO")
FILES = (("AWS_SHARED_CREDENTIALS_FILE", "~/.aws/credentials"), ("AWS_CONFIG_FILE", "~/.aws/config"))

_kept: dict[tuple[Any, ...], Any] = {}
_kept_for: tuple[Any, ...] = ()
_lock = threading.Lock()


def _changed_ns(path: str) -> int:
    try:
        return os.stat(os.path.expanduser(path)).st_mtime_ns
    except OSError:
        return 0


def _made(what: tuple[Any, ...], make: Callable[[], T]) -> T:
    """A client of this process: made once, since that takes longer than to write a tensor; and anew once the
    environment, or a file with keys, is another."""
    global _kept_for
    configured = frozenset((name, value) for name, value in os.environ.items() if name.startswith(CONFIGURING))
    now = (configured, *(_changed_ns(os.environ.get(name, usual)) for name, usual in FILES))
    with _lock:
        if now != _kept_for:
            _kept.clear()
            _kept_for = now
        if what not in _kept:
            _kept[what] = make()
        found: T = _kept[what]
        return found


_routes: weakref.WeakSet[Route] = weakref.WeakSet()


def _renew_all() -> None:
    global _lock
    _lock = threading.Lock()
    _kept.clear()
    for route in list(_routes):
        route.renew()


os.register_at_fork(after_in_child=_renew_all)


def is_unreachable(error: BaseException) -> bool:
    """Whether an error says that nobody answered, or only that it cannot be done now."""
    if isinstance(error, ClientError):
        status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
        return status >= 500 and status != NOT_IMPLEMENTED
    return isinstance(error, HTTPClientError | BotoConnectionError)
