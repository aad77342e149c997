"""Our credentials for the origin, from the standard AWS chain.

https://docs.aws.amazon.com/sdkref/latest/guide/standardized-credentials.html
"""

import asyncio
from collections.abc import Callable

import botocore.session
from botocore.credentials import Credentials, RefreshableCredentials
from botocore.exceptions import BotoCoreError, ClientError

from tiergate.clock import Clock
from tiergate.errors import NoCredentialsError
from tiergate.origin.signing import Keys

RELOAD_PAUSE_S = 5.0
"""The chain is not asked anew more often than this after a refusal."""


def standard_session() -> botocore.session.Session:
    """The chain without its endpoints: on a node AWS_ENDPOINT_URL points at the gateway, and a role that is
    assumed through it would never come back."""
    session = botocore.session.Session()
    session.set_config_variable("ignore_configured_endpoint_urls", True)
    return session


class CredentialChain:
    """The credentials of this process, refreshed as they expire, looked up anew after the origin refused
    them."""

    def __init__(self, clock: Clock, make_session: Callable[[], botocore.session.Session] = standard_session) -> None:
        self._clock = clock
        self._make_session = make_session
        self._credentials: Credentials | None = None
        self._loaded_s = 0.0
        self._lock = asyncio.Lock()

    def region(self) -> str | None:
        """The region that environment or profile name. Reads files."""
        region = self._make_session().get_config_variable("region")
        return str(region) if region else None

    async def frozen(self) -> Keys:
        """Access key, secret and token that belong together. Files and networks are asked off the event loop.

        Raises:
            NoCredentialsError: the chain has none, or its source does not answer.
        """
        credentials = self._credentials
        if credentials is None:
            async with self._lock:
                credentials = self._credentials
                if credentials is None:
                    credentials = self._credentials = await self._load()
                    self._loaded_s = self._clock.monotonic_s()
        try:
            if isinstance(credentials, RefreshableCredentials) and credentials.refresh_needed():
                found = await asyncio.to_thread(credentials.get_frozen_credentials)
            else:
                found = credentials.get_frozen_credentials()
        except (BotoCoreError, ClientError) as error:
            raise NoCredentialsError(403, "ExpiredToken", f"they cannot be refreshed: {error}") from error
        if not found.access_key or not found.secret_key:
            raise NoCredentialsError(403, "InvalidAccessKeyId", "what the AWS chain gives is empty")
        return Keys(found.access_key, found.secret_key, found.token)

    def forget(self) -> None:
        """The origin refused them: the next request looks for others (a rotated file, a new role)."""
        if self._clock.monotonic_s() - self._loaded_s >= RELOAD_PAUSE_S:
            self._credentials = None

    async def _load(self) -> Credentials:
        try:
            found = await asyncio.to_thread(lambda: self._make_session().get_credentials())
        except (BotoCoreError, ClientError) as error:
            raise NoCredentialsError(403, "InvalidAccessKeyId", f"their source failed: {error}") from error
        if found is None:
            raise NoCredentialsError(403, "InvalidAccessKeyId", "the AWS chain (environment, profile, role) gives none")
        return found
