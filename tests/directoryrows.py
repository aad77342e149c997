"""Whether the rows of a cluster's directory mirror each other as they must."""

from tiergate.directory.clusterrows import Large, Stored, record_of, value_of
from tiergate.directory.codec import unpack
from tiergate.directory.keys import Keys
from tiergate.etcd.client import EtcdClient
from tiergate.etcd.values import KeyValue
from tiergate.model import Holder, Kind, ObjectName, Pending, Record, Role, State, Step, Upload

Rows = dict[bytes, KeyValue]


async def check_rows(client: EtcdClient, keys: Keys) -> None:
    """Every row that is derived from another is there, and no other is."""
    tables = "oqckmuphiwlstv"
    outcome = await client.read(*(keys.all(table) for table in tables))
    found: dict[str, Rows] = {
        table: {row.key: row for row in outcome.found(index)} for index, table in enumerate(tables)
    }
    records = {record.name: record for record in map(record_of, found["o"].values())}
    check_clean(keys, found)
    check_owed(keys, found, records)
    check_holders(keys, found, records)
    steps = [value_of(Step, row) for row in found["s"].values()]
    assert set(found["s"]) == {keys.step(step) for step in steps}
    takes = {keys.taking(step): step for step in steps if step.replaces and step.role is not Role.POINTER}
    assert {key: value_of(Step, row) for key, row in found["t"].items()} == takes
    speaks = {keys.speaking(step): step for step in steps if step.role is Role.MARKER}
    assert {key: value_of(Step, row) for key, row in found["v"].items()} == speaks
    uploads = {value_of(Upload, row).upload_id for row in found["u"].values()}
    parts = {key[len(keys.table("p")) :].partition(b"\0")[0].decode() for key in found["p"]}
    assert parts <= uploads


def check_clean(keys: Keys, found: dict[str, Rows]) -> None:
    clean: dict[bytes, bytes] = {}
    markers: set[bytes] = set()
    for row in found["o"].values():
        age, record = unpack(Stored, row.value).age, record_of(row)
        if record.role is Role.MARKER:
            markers.add(keys.marker(record.name))
        if record.state is State.CLEAN:
            assert record.version is not None
            key = keys.clean(record.name, age, marker=record.role is Role.MARKER)
            clean[key] = record.version.uid.encode()
    assert {row.key: row.value for row in (*found["c"].values(), *found["k"].values())} == clean
    assert set(found["m"]) == markers


def check_owed(keys: Keys, found: dict[str, Rows], records: dict[ObjectName, Record]) -> None:
    writes = {key: value_of(Pending, row) for key, row in found["q"].items()}
    owed = {keys.pending(record.name): record for record in records.values() if record.state is not State.CLEAN}
    assert set(writes) == set(owed)
    for key, write in writes.items():
        version = owed[key].version
        assert write.kind is (Kind.PUT if version else Kind.DELETE)
        assert version is None or version.uid == write.uid
    assert set(found["w"]) == {keys.owed(write) for write in writes.values()}
    large = {
        keys.large(write.name): write.place
        for write in writes.values()
        if write.role is Role.LARGE and write.kind is Kind.PUT and not (write.quarantined or write.parked)
    }
    assert {key: value_of(Large, row).place for key, row in found["l"].items()} == large


def check_holders(keys: Keys, found: dict[str, Rows], records: dict[ObjectName, Record]) -> None:
    mirrored: dict[bytes, bytes] = {}
    for key, row in found["i"].items():
        holder = value_of(Holder, row)
        name, uid = keys.held_version(holder.node, key)
        assert key == keys.held(holder.node, name, uid)
        version = records[name].version
        assert version is not None
        assert version.uid == uid
        mirrored[keys.holder(name, uid, holder.node)] = row.value
    assert {key: row.value for key, row in found["h"].items()} == mirrored
