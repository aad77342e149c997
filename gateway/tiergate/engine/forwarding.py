"""A request that is the origin's: re-signed, streamed there, and its answer streamed back as it is (promise P1)."""

from collections.abc import AsyncIterator

from tiergate.engine.calls import Answer, Call
from tiergate.engine.rooms import Rooms
