"""Between our values and the generated messages: the only module that knows them. They have no types to check."""

import importlib
from typing import Any

from tiergate.etcd.values import (
    Answer,
    Delete,
    Done,
    Event,
    Field,
    Found,
    Guard,
    KeyValue,
    Outcome,
    Put,
    Range,
    Request,
    Txn,
)

rpc: Any = importlib.import_module("aetcd.rpc")
grpc: Any = importlib.import_module("grpc")
aio: Any = importlib.import_module("grpc.aio")

_FIELD_NAMES = {
    Field.VERSION: "version",
    Field.CREATED: "create_revision",
    Field.MODIFIED: "mod_revision",
    Field.LEASE: "lease",
}


def range_message(request: Range) -> Any:
    """A linearizable read."""
    return rpc.RangeRequest(
        key=request.key,
        range_end=request.end,
        limit=request.limit,
        revision=request.revision,
        keys_only=request.keys_only,
        count_only=request.count_only,
    )


def txn_message(txn: Txn) -> Any:
    """A transaction with all that is nested in it."""
    return rpc.TxnRequest(
        compare=[_compare(guard) for guard in txn.guards],
        success=[_operation(request) for request in txn.then],
        failure=[_operation(request) for request in txn.otherwise],
    )


def _compare(guard: Guard) -> Any:
    return rpc.Compare(
        result=int(guard.relation),
        target=int(guard.field),
        key=guard.key,
        range_end=guard.end,
        **{_FIELD_NAMES[guard.field]: guard.number},
    )


def _operation(request: Request) -> Any:
    match request:
        case Put():
            put = rpc.PutRequest(key=request.key, value=request.value, lease=request.lease_id)
            return rpc.RequestOp(request_put=put)
        case Delete():
            delete = rpc.DeleteRangeRequest(key=request.key, range_end=request.end)
            return rpc.RequestOp(request_delete_range=delete)
        case Range():
            return rpc.RequestOp(request_range=range_message(request))
        case Txn():
            return rpc.RequestOp(request_txn=txn_message(request))


def found_of(message: Any) -> Found:
    """The answer to a read."""
    return Found(tuple(row_of(kv) for kv in message.kvs), message.count)


def outcome_of(message: Any) -> Outcome:
    """The answer to a transaction."""
    # The header of a nested answer is empty.
    answers = tuple(_answer_of(response) for response in message.responses)
    return Outcome(message.succeeded, answers, message.header.revision)


def _answer_of(message: Any) -> Answer:
    kind = message.WhichOneof("response")
    if kind == "response_range":
        return found_of(message.response_range)
    if kind == "response_txn":
        return outcome_of(message.response_txn)
    return Done()


def row_of(message: Any) -> KeyValue:
    """A row."""
    return KeyValue(
        message.key, message.value, message.create_revision, message.mod_revision, message.version, message.lease
    )


def event_of(message: Any) -> Event:
    """A change that a watch tells."""
    deleted = message.type == rpc.Event.DELETE
    return Event(message.kv.key, None if deleted else row_of(message.kv), message.kv.mod_revision)


def watch_message(key: bytes, end: bytes, from_revision: int) -> Any:
    """Begin a watch."""
    create = rpc.WatchCreateRequest(key=key, range_end=end, start_revision=from_revision)
    return rpc.WatchRequest(create_request=create)
