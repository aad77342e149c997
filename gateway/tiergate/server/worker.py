"""A worker process: answers S3 clients on the shared port."""

import asyncio
import signal
import socket
import ssl
from dataclasses import dataclass
from typing import TYPE_CHECKING

from aiohttp import web

from tiergate.child import ChildContext
from tiergate.clock import Clock
from tiergate.config import ClientAuth, Settings
from tiergate.engine.newest import Chooser
from tiergate.engine.rooms import Rooms
from tiergate.engine.service import Service
from tiergate.engine.shards import Shards
from tiergate.errors import InvariantError, OriginError
from tiergate.observe.logs import get_logger
from tiergate.observe.metrics import Metrics
from tiergate.origin.credentials import CredentialChain
from tiergate.replication.base import PROMISE, Promise
from tiergate.replication.replication import PeerReplication
from tiergate.s3.servicemodel import Level
from tiergate.s3.sigv4 import SecretFor
from tiergate.server.app import Handler, S3Server
from tiergate.server.daemon import Daemon
from tiergate.server.handshake import Handshake
from tiergate.server.newest import NewestVerb
from tiergate.server.owing import Owing
from tiergate.server.own import OwnRequests, Verb
from tiergate.server.peers import Peers
from tiergate.server.pipeline import Pipeline
from tiergate.server.wiring import node_id, open_cluster, open_rooms, view_of

if TYPE_CHECKING:
    from tiergate.server.cluster import Cluster

log = get_logger(__name__)

KEYS_INTERVAL_S = 60.0

PEERS_GRACE_S = 3.0
"""How long requests of peers in flight may take at the end. They ask another node then."""

BACKLOG_COUNT = 1024
"""Connections that may wait to be accepted. The kernel lowers it to its own bound."""


def run(context: ChildContext) -> None:
    """The entry point of a worker; returns after SIGTERM once requests in flight are answered."""
    asyncio.run(serve(context))


async def serve(context: ChildContext, promise: Promise = PROMISE) -> None:
    """Serve until SIGTERM; in a cluster, peers until the next one."""
    loop = asyncio.get_running_loop()
    stop, end = asyncio.Event(), asyncio.Event()
    loop.add_signal_handler(signal.SIGTERM, lambda: (end if stop.is_set() else stop).set())
    if context.listen_socket is None:
        raise InvariantError("a worker needs its socket")
    settings = context.settings
    async with open_cluster(context, promise) as cluster, view_of(cluster), open_rooms(context, cluster) as rooms:
        service = Service(rooms)
        secret_for: SecretFor | None = None
        keeper: asyncio.Task[None] | None = None
        if settings.client_auth is ClientAuth.ORIGIN:
            keys = OriginKeys(rooms.origin.channel.chain, rooms.clock)
            await keys.refresh()
            keeper = asyncio.create_task(keys.keep())
            secret_for = keys.secret_for
        elif settings.client_auth is ClientAuth.KEYS:
            secret_for = own_keys(settings)
        name = node_id(context.folders.root)
        handshake = Handshake(rooms, name, cluster.view.live if cluster is not None else None)
        chooser = Chooser(rooms)
        owing = Owing(rooms)
        own = OwnRequests(
            {
                "node": Verb("GET", Level.SERVICE, handshake.answer),
                "grant": Verb("POST", Level.KEY, service.grants.grant),
                "release": Verb("POST", Level.SERVICE, service.grants.release),
                "newest": Verb("POST", Level.BUCKET, NewestVerb(rooms, chooser).answer),
                "owed": Verb("GET", Level.BUCKET, owing.owed),
                "promote": Verb("POST", Level.BUCKET, owing.promote),
            }
        )
        pipeline = Pipeline(service, settings, secret_for, rooms.clock, rooms.metrics, name, own)
        clients = [Listening(context.listen_socket, server_of(settings, pipeline.handle, name, rooms.metrics))]
        if context.daemon_socket is not None:
            daemon = Daemon(Shards(rooms, service.answer), settings, rooms.metrics)
            clients.append(Listening(context.daemon_socket, server_of(settings, daemon.handle, name, rooms.metrics)))
        peers = await listen_for_peers(context, cluster, rooms) if cluster else None
        for each in clients:
            await each.begin()
        context.report_ready()
        await stop.wait()
        log.info("draining")
        for each in clients:
            each.refuse_more()
        await asyncio.gather(*(each.server.shutdown(settings.shutdown_grace_s) for each in clients))
        await chooser.close()
        await service.close()
        if keeper is not None:
            keeper.cancel()
        if cluster is not None:
            # Peers still read from this node while its background brings away what it owes.
            context.report_drained()
            await end.wait()
        if peers is not None:
            await peers.cleanup()


@dataclass(slots=True)
class Listening:
    """A server and the socket that it answers on."""

    sock: socket.socket
    server: S3Server
    _listening: asyncio.Server | None = None

    async def begin(self) -> None:
        """Take connections from now on."""
        loop = asyncio.get_running_loop()
        self._listening = await loop.create_server(self.server, sock=self.sock, backlog=BACKLOG_COUNT)

    def refuse_more(self) -> None:
        """Take no more of them, and end those that are idle."""
        if self._listening is not None:
            self._listening.close()
        self.server.pre_shutdown()


def server_of(settings: Settings, handler: Handler, name: str, metrics: Metrics) -> S3Server:
    """What answers clients by `handler`, within the limits of the settings."""
    return S3Server(
        handler,
        name,
        metrics,
        max_header_bytes=settings.max_header_bytes,
        idle_timeout_s=settings.header_timeout_s,
        connections_count=settings.connections_count,
    )


async def listen_for_peers(context: ChildContext, cluster: "Cluster", rooms: Rooms) -> web.AppRunner:
    """Answer the other nodes of the cluster, until the runner is cleaned up."""
    # Here and not above, since a node alone needs no gRPC, and may not have it.
    from tiergate.server.cluster import peer_tls

    settings = context.settings
    if context.peer_socket is None or not isinstance(rooms.replication, PeerReplication):
        raise InvariantError("a member of a cluster needs peers, and a socket for them")
    tls = peer_tls(settings, ssl.Purpose.CLIENT_AUTH)
    peers = Peers(
        rooms.memory,
        rooms.directory,
        rooms.replication.fetching,
        cluster.roster,
        rooms.clock,
        rooms.metrics,
        settings.cluster_secret,
        settings.largest_body_bytes,
        settings.body_idle_timeout_s,
    )
    runner = peers.runner(min(settings.shutdown_grace_s, PEERS_GRACE_S))
    await runner.setup()
    await web.SockSite(runner, context.peer_socket, ssl_context=tls, backlog=BACKLOG_COUNT).start()
    return runner


class OriginKeys:
    """The origin's own keys as clients' keys. They are looked up anew regularly, as the chain refreshes them."""

    def __init__(self, chain: CredentialChain, clock: Clock) -> None:
        self._chain = chain
        self._clock = clock
        self._known: dict[str, str] = {}

    async def refresh(self) -> None:
        """Look the keys up; the previous ones stay valid for one more round, for clients that hold them."""
        keys = await self._chain.frozen()
        previous = list(self._known.items())[-1:]
        self._known = dict([*previous, (keys.access_key, keys.secret_key)])

    async def keep(self) -> None:
        """Refresh until cancelled."""
        while True:
            await self._clock.sleep(KEYS_INTERVAL_S)
            try:
                await self.refresh()
            except OriginError as error:
                log.warning("the origin's keys could not be looked up; the known ones stay", error=error)
            except Exception as error:  # Whatever it is: nobody else would go on with it.
                log.exception("looking up the origin's keys failed unexpectedly; the known ones stay", error=error)

    def secret_for(self, access_key: str) -> str | None:
        """The secret of an access key, if it is the origin's."""
        return self._known.get(access_key)


def own_keys(settings: Settings) -> SecretFor:
    """The one pair of keys that the configuration names."""
    known = settings.access_key_id
    secret = settings.secret_access_key

    def secret_for(access_key: str) -> str | None:
        return secret.reveal() if secret is not None and access_key == known else None

    return secret_for
