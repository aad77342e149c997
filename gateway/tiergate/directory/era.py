"""Which directory this is. A row says so, which whoever finds the directory forgetful replaces: so all nodes learn
of it, also those that had seen too little to notice, and revisions of one era are compared with no other's.

A directory forgets when etcd begins empty, or goes back to a snapshot or an older copy of its data.
"""

import secrets
from dataclasses import dataclass

from tiergate.directory.codec import pack, unpack
from tiergate.directory.keys import Keys
from tiergate.etcd.client import EtcdClient
from tiergate.etcd.values import Field, Guard, Put, Range, Txn

_BITS_COUNT = 62


@dataclass(frozen=True, slots=True)
class Named:
    """What the row holds. `previous`: the era of the snapshot that this one began on, 0 where it began empty."""

    number: int
    previous: int = 0


@dataclass(frozen=True, slots=True)
class Era:
    """An era, begun at revision `since`: what has an earlier one was in the snapshot."""

    number: int
    previous: int
    since: int


def era_of(mark: bytes) -> int:
    """The era that the row names."""
    return unpack(Named, mark).number


async def find_era(client: EtcdClient, keys: Keys) -> Era | None:
    """The directory's era; None where nobody was here yet, or it begins empty."""
    found = (await client.read(Range(keys.era))).found(0)
    if not found:
        return None
    named = unpack(Named, found[0].value)
    return Era(named.number, named.previous, found[0].mod_revision)


async def begin_era(client: EtcdClient, keys: Keys, found: Era | None) -> Era:
    """Begin a new era after the one that was found, unless another node was faster; the one that stands then."""
    named = Named(secrets.randbits(_BITS_COUNT) | 1, found.number if found else 0)
    guard = Guard(keys.era, Field.MODIFIED, found.since if found else 0)
    txn = Txn((guard,), (Put(keys.era, pack(named)),))
    await client.repeat(lambda: client.txn(txn))
    era = await find_era(client, keys)
    # Nobody ever deletes the row.
    return era if era is not None else await begin_era(client, keys, None)
