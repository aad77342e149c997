"""What each process of a member of a cluster opens for itself: etcd, the directory in it, the board, the view of the
other members. Only a member imports this: it needs gRPC."""

import random
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from tiergate.child import ChildContext, ChildRole
from tiergate.clock import Clock
from tiergate.config import Settings, etcd_place
from tiergate.directory.board import Board, BoardStanding
from tiergate.directory.clustered import ClusteredDirectory
from tiergate.directory.era import era_of
from tiergate.directory.keys import Keys
from tiergate.directory.ledger import Ledger
from tiergate.directory.live import LiveView
from tiergate.directory.membership import Nodes
from tiergate.errors import ConfigError
from tiergate.etcd.channel import Tls
from tiergate.etcd.client import Access, EtcdClient, Known
from tiergate.memory.memory import Memory
from tiergate.observe.metrics import Metrics
from tiergate.policy.rendezvous import housekeeper
from tiergate.replication.base import PROMISE, Promise
from tiergate.replication.channel import ChannelSettings, PeerChannel
from tiergate.replication.replication import PeerReplication
from tiergate.replication.roster import Roster
from tiergate.server.budget import split


@dataclass(frozen=True, slots=True)
class Cluster:
    """The cluster as one process of this node reaches it. `standing`: this node's membership, as the board tells."""

    node: str
    client: EtcdClient
    keys: Keys
    board: Board
    standing: BoardStanding
    directory: ClusteredDirectory
    view: LiveView
    roster: Roster
    promise: Promise
    ledger: Ledger

    def keeps_house(self) -> bool:
        """Whether this node does what one does for all. For a moment after a change two may, or none."""
        return self.housekeeper() == self.node and self.standing.stands()

    def housekeeper(self) -> str:
        """The node that does; empty while no member is known."""
        return housekeeper(self.view.live().nodes)


@asynccontextmanager
async def open_cluster(context: ChildContext, clock: Clock, promise: Promise = PROMISE) -> AsyncIterator[Cluster]:
    """Open it all, and keep the view up to date within the block.

    Raises:
        ConfigError: a file with a certificate or a key cannot be read.
    """
    settings = context.settings
    keys = Keys(etcd_place(settings.cluster).prefix)
    keeps_membership = context.role is ChildRole.BACKGROUND
    board = Board(context.folders.board, writable=keeps_membership)
    standing = BoardStanding(board, settings.node_name, keys.node(settings.node_name), clock)
    ledger = Ledger.open(context.folders.ledger, split(settings).directory_bytes)
    witness = keys.witness(settings.node_name)
    client = EtcdClient(
        etcd_access(settings),
        clock,
        random.Random(),
        patience_s=settings.directory_patience_s,
        agreed=(lambda: None) if keeps_membership else standing.agreed,
        mark=keys.era,
        known=lambda: known_of(standing.era(), ledger, witness),
        on_doubt=lambda agreed: ledger.doubt(agreed.era if agreed is not None else standing.era()),
    )
    directory = ClusteredDirectory(client, keys, standing, ledger, standing.era)
    view = LiveView(Nodes(client, keys), clock)
    roster = Roster(settings.node_name, settings.zone, view.live, lambda: standing.me, clock)
    try:
        yield Cluster(settings.node_name, client, keys, board, standing, directory, view, roster, promise, ledger)
    finally:
        await directory.close()
        await client.close()
        ledger.close()
        board.close()


def known_of(era: int, ledger: Ledger, witness: bytes) -> Known:
    """What this node, whose row of its own changes is `witness`, knows of the directory of an era, 0 for any."""
    if not era:
        return Known()
    newest = ledger.newest(era)
    return Known(newest, lambda mark: mark != b"" and era_of(mark) == era, witness, newest)


@asynccontextmanager
async def open_replication(
    cluster: Cluster, settings: Settings, memory: Memory, clock: Clock, metrics: Metrics
) -> AsyncIterator[PeerReplication]:
    """Copies on peers and reads from them.

    Raises:
        ConfigError: a file with a certificate or a key cannot be read.
    """
    channel = PeerChannel(
        ChannelSettings(
            sender=cluster.node,
            secret=settings.cluster_secret,
            tls=peer_tls(settings, ssl.Purpose.SERVER_AUTH),
            connect_timeout_s=settings.peer_timeout_s,
            idle_timeout_s=settings.peer_timeout_s,
        ),
        clock,
        metrics,
    )
    replication = PeerReplication(memory, channel, cluster.roster, clock, metrics, cluster.promise.commit_s)
    try:
        yield replication
    finally:
        await replication.close()
        await channel.close()


def peer_tls(settings: Settings, purpose: ssl.Purpose) -> ssl.SSLContext | None:
    """How peers speak TLS, each showing a certificate that the cluster's own authority signed: that it did is what
    counts, whatever host it names. None where they do not.

    Raises:
        ConfigError: a file cannot be read.
    """
    cert, key, authority = settings.peer_tls_cert, settings.peer_tls_key, settings.peer_tls_ca
    if cert is None or key is None or authority is None:
        return None
    try:
        context = ssl.create_default_context(purpose, cafile=authority)
        context.load_cert_chain(cert, key)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"the certificates for peers cannot be used: {error}") from error
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    return context


def etcd_access(settings: Settings) -> Access:
    """Where etcd is, and who we are to it.

    Raises:
        ConfigError: a file cannot be read.
    """
    place = etcd_place(settings.cluster)
    tls = None
    if place.tls:
        tls = Tls(*(_pem(path) for path in (settings.etcd_tls_ca, settings.etcd_tls_cert, settings.etcd_tls_key)))
    password = settings.etcd_password.reveal() if settings.etcd_password else ""
    return Access(place.endpoints, tls, settings.etcd_user, password)


def _pem(path: Path | None) -> bytes | None:
    try:
        return path.read_bytes() if path else None
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
