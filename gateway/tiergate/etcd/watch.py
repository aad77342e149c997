"""A watch that loses nothing: it goes on after the last event that was delivered, at whichever member answers."""

from types import TracebackType
from typing import Any, Self

from tiergate.errors import CompactedError, ConfigError, DirectoryUnavailableError
from tiergate.etcd.channel import Member, TokenRefusedError
from tiergate.etcd.client import EtcdClient
from tiergate.etcd.values import Event
from tiergate.etcd.wire import event_of, watch_message


class Watch:
    """The changes of the rows from `key` up to `end`, from revision `from_revision` (at least 1) on, in order, each
    once. A context manager: leaving it ends the stream."""

    def __init__(self, client: EtcdClient, key: bytes, end: bytes, from_revision: int) -> None:
        self._client = client
        self._key = key
        self._end = end
        self._next_revision = from_revision
        self._generation = client.generation
        self._member: Member | None = None
        self._stream: Any = None
        self._failures = 0
        self._refusals = 0

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._drop()

    async def next(self) -> tuple[Event, ...]:
        """Wait for the next changes. Waits as long as it takes when no member answers; a cancelled call loses nothing.

        Raises:
            CompactedError: changes since the last ones are no longer kept, or this node works with another directory
                now: read everything anew and watch from there.
            ForeignDirectoryError: another cluster answers, or it went back to an earlier state.
            ConfigError: etcd does not let this user watch.
        """
        while True:
            try:
                events = await self._receive()
            except (DirectoryUnavailableError, TokenRefusedError) as error:
                if isinstance(error, TokenRefusedError):
                    self._client.forget_token()
                if self._member is not None:
                    self._client.avoid(self._member)
                self._drop()
                self._failures += 1
                await self._client.clock.sleep(self._client.pause_s(self._failures))
            except BaseException:
                # A read that was cancelled has ended its stream.
                self._drop()
                raise
            else:
                if events:
                    # Never from an answer's header: what lies between may not have been sent yet.
                    self._next_revision = events[-1].revision + 1
                    return events

    async def _receive(self) -> tuple[Event, ...]:
        if self._generation != self._client.generation:
            raise CompactedError("another directory is in the place of the one that was watched")
        if self._member is None:
            message = watch_message(self._key, self._end, self._next_revision)
            self._member, self._stream, answer = await self._client.open("watch", message)
            # One that went back would be silent until it has come as far again. What goes back from here on ends the
            # stream.
            await self._client.connect()
        else:
            answer = await self._member.read(self._stream)
            self._client.check(answer)
        if answer.compact_revision:
            raise CompactedError("the changes to watch are no longer kept", compacted=answer.compact_revision)
        if answer.canceled:
            raise self._refused(answer)
        if answer.events:
            self._failures = self._refusals = 0
        return tuple(event_of(event) for event in answer.events)

    def _refused(self, answer: Any) -> Exception:
        if answer.created:
            # So it refuses a user, or an outdated token.
            self._client.forget_token()
            self._refusals += 1
            if self._refusals > 1:
                return ConfigError("etcd does not let this user watch", reason=answer.cancel_reason)
        return DirectoryUnavailableError("etcd ended a watch", reason=answer.cancel_reason)

    def _drop(self) -> None:
        stream, self._member, self._stream = self._stream, None, None
        if stream is not None:
            stream.cancel()
