"""One member of etcd: its channel, one try of a call, and what its refusals mean here."""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tiergate.errors import (
    CompactedError,
    ConfigError,
    DirectoryUnavailableError,
    FencedError,
    InvariantError,
    MemoryFullError,
    TiergateError,
)
from tiergate.etcd.wire import aio, grpc, rpc

OPTIONS: Mapping[str, int] = {
    # etcd takes pings every 5 s at the soonest, and none while no call is open.
    "grpc.keepalive_time_ms": 6000,
    "grpc.keepalive_permit_without_calls": 0,
    # It is this one that ends the connection to a member that froze; `keepalive_timeout_ms` does not.
    "grpc.http2.ping_timeout_ms": 2000,
    "grpc.http2.max_pings_without_data": 0,
    "grpc.initial_reconnect_backoff_ms": 100,
    "grpc.min_reconnect_backoff_ms": 100,
    "grpc.max_reconnect_backoff_ms": 1000,
    # Whoever asks bounds what it asks for; a record may be large.
    "grpc.max_receive_message_length": -1,
    "grpc.max_send_message_length": -1,
    # Whoever sends a transaction decides whether it is sent again.
    "grpc.enable_retries": 0,
    "grpc.enable_http_proxy": 0,
    "grpc.use_local_subchannel_pool": 1,
}

NEEDS_LEADER = ("hasleader", "true")
"""A member that lost its quorum ends streams that carry this, instead of leaving them silent."""


@dataclass(frozen=True, slots=True)
class Tls:
    """PEM texts. `authority`: who signs the members' certificates, None for the system's; the others are ours."""

    authority: bytes | None = None
    certificate: bytes | None = None
    key: bytes | None = field(default=None, repr=False)


class TokenRefusedError(TiergateError):
    """The member does not take the token (any more): authenticate and try again."""


class Member:
    """The channel to one member, kept for the life of the process: abandoned ones leak memory in grpcio."""

    def __init__(self, endpoint: str, tls: Tls | None) -> None:
        self.endpoint = endpoint
        options = list(OPTIONS.items())
        if tls is None:
            self._channel = aio.insecure_channel(endpoint, options=options)
        else:
            credentials = grpc.ssl_channel_credentials(tls.authority, tls.key, tls.certificate)
            self._channel = aio.secure_channel(endpoint, credentials, options=options)
        kv, lease = rpc.KVStub(self._channel), rpc.LeaseStub(self._channel)
        self._calls = {
            "txn": kv.Txn,
            "grant": lease.LeaseGrant,
            "revoke": lease.LeaseRevoke,
            "authenticate": rpc.AuthStub(self._channel).Authenticate,
            "status": rpc.MaintenanceStub(self._channel).Status,
        }
        self._streams = {"keep_alive": lease.LeaseKeepAlive, "watch": rpc.WatchStub(self._channel).Watch}

    async def close(self) -> None:
        """Close the channel."""
        await self._channel.close()

    async def call(self, name: str, message: Any, token: str, timeout_s: float) -> Any:
        """One try.

        Raises:
            DirectoryUnavailableError: no answer, or none that says whether it was done.
            TiergateError: it was refused; see `refusal`.
        """
        try:
            return await self._calls[name](message, timeout=timeout_s, metadata=_metadata(token))
        except aio.AioRpcError as error:
            raise refusal(error, self.endpoint) from error

    async def open(self, name: str, message: Any, token: str, timeout_s: float) -> tuple[Any, Any]:
        """Open a stream with its first message; returns it and the first answer. The caller cancels it in the end.

        Raises:
            See `call`.
        """
        stream = self._streams[name](metadata=(*_metadata(token), NEEDS_LEADER))
        try:
            async with asyncio.timeout(timeout_s):
                await stream.write(message)
                return stream, await self.read(stream)
        except aio.AioRpcError as error:
            stream.cancel()
            raise refusal(error, self.endpoint) from error
        except TimeoutError as error:
            stream.cancel()
            raise DirectoryUnavailableError("a stream of etcd does not open", member=self.endpoint) from error
        except BaseException:  # Cancelled too: gRPC does not collect streams that were left open.
            stream.cancel()
            raise

    async def read(self, stream: Any) -> Any:
        """The next answer of a stream.

        Raises:
            See `call`.
        """
        try:
            answer = await stream.read()
        except aio.AioRpcError as error:
            raise refusal(error, self.endpoint) from error
        if answer is aio.EOF:
            raise DirectoryUnavailableError("etcd ended a stream", member=self.endpoint)
        return answer


def _metadata(token: str) -> tuple[tuple[str, str], ...]:
    return (("token", token),) if token else ()


def refusal(error: Any, endpoint: str) -> TiergateError:
    """What a failed call means, by its code alone: https://grpc.github.io/grpc/core/md_doc_statuscodes.html"""
    code, why = error.code(), {"member": endpoint, "code": error.code().name, "details": error.details()}
    match code:
        case grpc.StatusCode.OUT_OF_RANGE:
            return CompactedError("the revision is no longer kept", **why)
        case grpc.StatusCode.RESOURCE_EXHAUSTED:
            return MemoryFullError("etcd takes nothing more", retry_after_s=5, **why)
        case grpc.StatusCode.UNAUTHENTICATED | grpc.StatusCode.INVALID_ARGUMENT:
            # An outdated token is refused with either.
            return TokenRefusedError("etcd refuses the request or its token", **why)
        case grpc.StatusCode.PERMISSION_DENIED:
            return ConfigError(f"etcd at {endpoint} does not let this user do it", **why)
        case grpc.StatusCode.NOT_FOUND:
            return FencedError("the lease is gone", **why)
        case grpc.StatusCode.FAILED_PRECONDITION | grpc.StatusCode.ALREADY_EXISTS | grpc.StatusCode.UNIMPLEMENTED:
            return InvariantError("etcd refuses the request", **why)
    return DirectoryUnavailableError("etcd does not answer", **why)
