"""The etcd client against real etcd: what it promises when members freeze, die, forget and come back."""

import asyncio
import datetime
import ipaddress
import random
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from tiergate.clock import SystemClock
from tiergate.errors import (
    CompactedError,
    ConfigError,
    DirectoryUnavailableError,
    FencedError,
    ForeignDirectoryError,
    InvariantError,
    OutcomeUnknownError,
)
from tiergate.etcd.channel import Tls
from tiergate.etcd.client import Access, EtcdClient
from tiergate.etcd.values import Delete, Event, Field, Found, Guard, Put, Range, Relation, Txn, prefix_end
from tiergate.etcd.watch import Watch
from tiergate.testing.etcd import EtcdServer, needs_etcd

pytestmark = needs_etcd


def make_client(server: EtcdServer, *, patience_s: float = 10.0, user: str = "", password: str = "") -> EtcdClient:
    """A client that begins at the first member."""
    access = Access(server.endpoints, user=user, password=password)
    client = EtcdClient(access, SystemClock(), random.Random(0), patience_s=patience_s)
    client._index = 0
    return client


async def put(client: EtcdClient, key: bytes, value: bytes, lease_id: int = 0) -> int:
    return (await client.txn(Txn((), (Put(key, value, lease_id),)))).revision


@pytest.fixture(scope="module")
def single() -> Iterator[EtcdServer]:
    with EtcdServer() as server:
        yield server


@pytest.fixture
async def client(single: EtcdServer) -> AsyncIterator[EtcdClient]:
    client = make_client(single)
    yield client
    await client.close()


@pytest.fixture(scope="module")
def three() -> Iterator[EtcdServer]:
    """Whoever stops a member starts it again."""
    with EtcdServer(3) as server:
        yield server


# -- reads and transactions
async def test_read_ranges_are_of_one_revision(client: EtcdClient) -> None:
    for key in (b"r/1", b"r/2", b"r/3"):
        await put(client, key, key)
    outcome = await client.read(Range(b"r/2"), Range(b"r/", prefix_end(b"r/"), limit=2), Range(b"nothing"))
    assert [row.value for row in outcome.found(0)] == [b"r/2"]
    assert outcome.answers[1] == Found(outcome.found(1), 3)
    assert [row.key for row in outcome.found(1)] == [b"r/1", b"r/2"]
    assert outcome.found(2) == ()
    row = outcome.found(0)[0]
    assert (row.create_revision, row.mod_revision, row.version) == (outcome.revision - 1, outcome.revision - 1, 1)
    await put(client, b"r/2", b"new")
    old = await client.read(Range(b"r/2", revision=outcome.revision))
    assert old.found(0) == (row,)


async def test_txn_guards_choose_the_branch(client: EtcdClient) -> None:
    absent = Guard(b"t/1", Field.MODIFIED, 0)
    made = Txn((absent,), (Put(b"t/1", b"first"),), (Range(b"t/1"),))
    assert (await client.txn(made)).succeeded
    again = await client.txn(made)
    assert (again.succeeded, [row.value for row in again.found(0)]) == (False, [b"first"])
    newer = Guard(b"t/", Field.MODIFIED, again.revision + 1, Relation.LESS, prefix_end(b"t/"))
    assert (await client.txn(Txn((newer,), (Delete(b"t/1"),)))).succeeded
    assert (await client.read(Range(b"t/1"))).found(0) == ()


async def test_txn_that_etcd_refuses_is_our_bug(client: EtcdClient) -> None:
    with pytest.raises(InvariantError):
        await client.txn(Txn((), (Put(b"twice", b"1"), Put(b"twice", b"2"))))


async def test_txn_without_an_answer_is_of_unknown_outcome(client: EtcdClient, single: EtcdServer) -> None:
    await put(client, b"unknown", b"before")
    single.members[0].freeze()
    try:
        with pytest.raises(OutcomeUnknownError):
            await put(client, b"unknown", b"after")
    finally:
        single.members[0].thaw()
    found = (await client.read(Range(b"unknown"))).found(0)
    # It was sent once: it happened once or not at all.
    assert (found[0].value, found[0].version) in [(b"before", 1), (b"after", 2)]


async def test_read_compacted_revision_says_so(client: EtcdClient, single: EtcdServer) -> None:
    old = await put(client, b"c", b"1")
    newest = await put(client, b"c", b"2")
    single.compact(newest)
    with pytest.raises(CompactedError):
        await client.read(Range(b"c", revision=old))


async def test_watch_compacted_revision_says_so(client: EtcdClient, single: EtcdServer) -> None:
    old = await put(client, b"c", b"1")
    newest = await put(client, b"c", b"2")
    single.compact(newest)
    async with Watch(client, b"c", b"", old) as watch:
        with pytest.raises(CompactedError):
            await watch.next()
    async with Watch(client, b"c", b"", newest) as watch:
        assert [event.revision for event in await watch.next()] == [newest]


# -- leases
async def test_lease_not_renewed_takes_its_rows_along(client: EtcdClient) -> None:
    lease_id = await client.grant(2)
    revision = await put(client, b"leased", b"1", lease_id)
    assert await client.keep_alive(lease_id) == 2
    async with Watch(client, b"leased", b"", revision + 1) as watch:
        (event,) = await watch.next()
    assert event.row is None
    assert await client.keep_alive(lease_id) == 0
    with pytest.raises(FencedError):
        await put(client, b"leased", b"2", lease_id)


async def test_lease_revoked_is_gone_and_may_be_revoked_again(client: EtcdClient) -> None:
    lease_id = await client.grant(60)
    await put(client, b"leased", b"1", lease_id)
    await client.revoke(lease_id)
    await client.revoke(lease_id)
    assert (await client.read(Range(b"leased"))).found(0) == ()


# -- watches
async def collect(watch: Watch, last_revision: int) -> list[Event]:
    events: list[Event] = []
    while not events or events[-1].revision < last_revision:
        events += await watch.next()
    return events


async def write(client: EtcdClient, key: bytes, count: int) -> list[int]:
    """Revisions of `count` writes, each sent until it is acknowledged."""
    revisions: list[int] = []
    for index in range(count):
        while len(revisions) == index:
            try:
                revisions.append(await put(client, key, b"%d" % index))
            except DirectoryUnavailableError:
                continue
    return revisions


async def test_watch_cancelled_next_loses_nothing(client: EtcdClient) -> None:
    first = await put(client, b"w", b"1")
    async with Watch(client, b"w", b"", first) as watch:
        assert [event.revision for event in await watch.next()] == [first]
        waiting = asyncio.ensure_future(watch.next())
        await client.read(Range(b"w"))
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        second = await put(client, b"w", b"2")
        assert [event.revision for event in await watch.next()] == [second]


async def test_watch_delivers_all_over_kills_and_restarts(client: EtcdClient, single: EtcdServer) -> None:
    member = single.members[0]
    start = (await client.read(Range(b"k"))).revision + 1
    expected = await write(client, b"k", 1200)
    delivered: list[Event] = []
    async with Watch(client, b"k", b"", start) as watch:
        # Only "created" is sure to have come when it dies for the first time.
        delivered += await watch._receive()
        watch._next_revision = delivered[-1].revision + 1 if delivered else start
        for _ in range(3):
            member.kill()
            reading = asyncio.ensure_future(watch.next())
            single.start(member)
            delivered += await reading
            expected += await write(client, b"k", 20)
        delivered += await collect(watch, expected[-1])
    revisions = [event.revision for event in delivered]
    assert revisions == sorted(set(revisions))
    assert set(expected) <= set(revisions)


class ToldWatch(Watch):
    """It says when a stream of its ended."""

    def __init__(self, client: EtcdClient, key: bytes, end: bytes, from_revision: int) -> None:
        super().__init__(client, key, end, from_revision)
        self.dropped = asyncio.Event()

    def _drop(self) -> None:
        super()._drop()
        self.dropped.set()


@pytest.mark.timeout(60)
async def test_watch_member_without_quorum_moves_on(three: EtcdServer) -> None:
    client = make_client(three)
    start = await put(client, b"q", b"0")
    async with ToldWatch(client, b"q", b"", start) as watch:
        await watch.next()
        for member in three.members[1:]:
            member.kill()
        reading = asyncio.ensure_future(watch.next())
        impatient = make_client(three, patience_s=1.5)
        with pytest.raises(DirectoryUnavailableError):
            await impatient.read(Range(b"q"))
        await impatient.close()
        # The member that serves the watch lives, and still ends it.
        await watch.dropped.wait()
        for member in three.members[1:]:
            three.start(member)
        three.wait_ready()
        (revision,) = await write(client, b"q", 1)
        assert (await reading)[-1].revision <= revision
    await client.close()


# -- members
@pytest.mark.timeout(50)
async def test_frozen_member_is_left_by_calls_and_by_watches(three: EtcdServer) -> None:
    client = make_client(three)
    start = await put(client, b"f", b"0")
    async with Watch(client, b"f", b"", start) as watch:
        await watch.next()
        frozen = three.members[0]
        frozen.freeze()
        try:
            reading = asyncio.ensure_future(watch.next())
            assert [row.value for row in (await client.read(Range(b"f"))).found(0)] == [b"0"]
            revisions = await write(client, b"f", 3)
            assert (await reading)[0].revision <= revisions[0]
        finally:
            frozen.thaw()
    await client.close()


async def test_leader_killed_keeps_what_was_acknowledged(three: EtcdServer) -> None:
    client = make_client(three)
    revisions = await write(client, b"l", 50)
    leader = three.leader()
    leader.kill()
    revisions += await write(client, b"l", 50)
    assert revisions == sorted(set(revisions))
    three.start(leader)
    three.wait_ready()
    async with Watch(client, b"l", b"", revisions[0]) as watch:
        seen = [event.revision for event in await collect(watch, revisions[-1])]
    assert set(revisions) <= set(seen)
    await client.close()


async def test_nobody_answers_is_unavailable() -> None:
    with EtcdServer() as server:
        client = make_client(server, patience_s=0.5)
    with pytest.raises(DirectoryUnavailableError):
        await client.read(Range(b"a"))
    with pytest.raises(DirectoryUnavailableError):
        await client.keep_alive(1)
    await client.close()


async def test_another_cluster_is_refused(single: EtcdServer) -> None:
    with EtcdServer() as other:
        access = Access([other.endpoints[0], single.endpoints[0]])
        client = EtcdClient(access, SystemClock(), random.Random(0))
        client._index = 0
        await client.connect()
    with pytest.raises(ForeignDirectoryError):
        await client.read(Range(b"a"))
    await client.close()


# -- who we are
async def test_user_and_password() -> None:
    with EtcdServer() as server:
        server.require_password("secret")
        nobody = make_client(server)
        with pytest.raises(ConfigError):
            await nobody.connect()
        wrong = make_client(server, user="root", password="wrong")
        with pytest.raises(ConfigError):
            await wrong.connect()
        right = make_client(server, user="root", password="secret")
        await right.connect()
        start = await put(right, b"a", b"1")
        async with Watch(right, b"a", b"", start) as watch:
            await watch.next()
            # It forgets its tokens.
            server.members[0].kill()
            server.start(server.members[0])
            assert [row.value for row in (await right.read(Range(b"a"))).found(0)] == [b"1"]
            revision = await put(right, b"a", b"2")
            assert [event.revision for event in await watch.next()] == [revision]
        for each in (nobody, wrong, right):
            await each.close()
    assert "secret" not in repr(Access(["a:1"], user="root", password="secret"))


def certificates(folder: Path) -> tuple[Tls, list[str]]:
    """What a client needs, and the arguments for servers that take nobody else."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "tiergate-test")])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    certificate_pem = certificate.public_bytes(serialization.Encoding.PEM)
    key_pem = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    (folder / "certificate.pem").write_bytes(certificate_pem)
    (folder / "key.pem").write_bytes(key_pem)
    extra = [
        f"--cert-file={folder / 'certificate.pem'}",
        f"--key-file={folder / 'key.pem'}",
        f"--trusted-ca-file={folder / 'certificate.pem'}",
        "--client-cert-auth",
    ]
    return Tls(certificate_pem, certificate_pem, key_pem), extra


async def test_tls_both_ways(tmp_path: Path) -> None:
    tls, extra = certificates(tmp_path)
    with EtcdServer(extra=extra, tls=tls) as server:
        client = EtcdClient(Access(server.endpoints, tls), SystemClock(), random.Random(0))
        start = await put(client, b"a", b"1")
        async with Watch(client, b"a", b"", start) as watch:
            assert [event.revision for event in await watch.next()] == [start]
        for stranger in (None, Tls(tls.authority)):
            other = EtcdClient(Access(server.endpoints, stranger), SystemClock(), random.Random(0), patience_s=0.1)
            with pytest.raises(DirectoryUnavailableError):
                await other.connect()
            await other.close()
        await client.close()
