"""A worker process: answers S3 clients on the shared port."""

import asyncio
import signal

from tiergate.child import ChildContext
from tiergate.config import ClientAuth, Settings
from tiergate.engine.service import Service
from tiergate.errors import invariant
from tiergate.observe.logs import get_logger
from tiergate.origin.client import OriginClient
from tiergate.s3.sigv4 import SecretFor
from tiergate.server.app import S3Server
from tiergate.server.pipeline import Pipeline
from tiergate.server.wiring import node_id, open_rooms

log = get_logger(__name__)


def run(context: ChildContext) -> None:
    """The entry point of a worker; returns after SIGTERM once requests in flight are answered."""
    asyncio.run(serve(context))


async def serve(context: ChildContext) -> None:
    """Serve until SIGTERM."""
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    loop.add_signal_handler(signal.SIGTERM, stop.set)
    listen = context.listen_socket
    invariant(listen is not None, "a worker needs its socket")
    settings = context.settings
    async with open_rooms(context) as rooms:
        service = Service(rooms)
        pipeline = Pipeline(
            service,
            settings,
            secrets_of(settings, rooms.origin),
            rooms.clock,
            rooms.metrics,
            node_id(context.folders.root),
        )
        server = S3Server(pipeline.handle, settings.max_header_bytes, settings.header_timeout_s)
        listening = await loop.create_server(server, sock=listen, backlog=settings.connections_count)
        context.report_ready()
        await stop.wait()
        log.info("draining")
        listening.close()
        server.pre_shutdown()
        await server.shutdown(settings.shutdown_grace_s)
        await service.close()


def secrets_of(settings: Settings, origin: OriginClient) -> SecretFor | None:
    """Whose signatures are checked; None: nobody's."""
    if settings.client_auth is ClientAuth.NONE:
        return None
    if settings.client_auth is ClientAuth.ORIGIN:
        return origin.secret_of
    known = settings.access_key_id
    secret = settings.secret_access_key

    def secret_for(access_key: str) -> str | None:
        return secret.reveal() if secret is not None and access_key == known else None

    return secret_for
