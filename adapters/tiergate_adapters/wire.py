"""Signed requests of our own to a gateway: those that no S3 client knows."""

from __future__ import annotations

import json
import os
import re
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, urlencode

from botocore.auth import S3SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.exceptions import ConnectionError as BotoConnectionError
from botocore.exceptions import HTTPClientError
from botocore.httpsession import URLLib3Session

if TYPE_CHECKING:
    from collections.abc import Mapping

CONNECT_TIMEOUT_S = 5.0
READ_TIMEOUT_S = 120.0
POOL_COUNT = 16

RETRY_PAUSES_S = (0.1, 0.4, 1.0)
"""A worker that died is there again within these."""

_CODE = re.compile(rb"<Code>([^<]*)</Code>")
_MESSAGE = re.compile(rb"<Message>([^<]*)</Message>")


@dataclass(frozen=True, slots=True)
class Reply:
    """An answer. Names of `headers` are in lower case; `body` is empty where it was not asked for."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def is_done(self) -> bool:
        return 200 <= self.status < 300

    @property
    def code(self) -> str:
        """S3's code of a refusal."""
        found = _CODE.search(self.body)
        return found[1].decode() if found else str(self.status)

    @property
    def is_gateways(self) -> bool:
        """Whether a gateway sent it, and not what else speaks S3."""
        return self.headers.get("server") == "tiergate"

    @property
    def message(self) -> str:
        """What a refusal says."""
        found = _MESSAGE.search(self.body)
        return f"{self.code}: {found[1].decode() if found else self.status}"

    def document(self) -> Any:
        """What a JSON answer says; None for any other, as S3 itself gives."""
        if not self.is_done or not self.headers.get("content-type", "").startswith("application/json"):
            return None
        return json.loads(self.body)


class Endpoint:
    """One S3 endpoint in path style, asked with botocore's `credentials`. Thread-safe; not to be carried over a
    fork."""

    def __init__(self, url: str, credentials: Any, region: str, *, read_timeout_s: float = READ_TIMEOUT_S) -> None:
        self.url = url.rstrip("/")
        self._credentials = credentials
        self._region = region
        timeouts: Any = (CONNECT_TIMEOUT_S, read_timeout_s)  # Its stubs know only one for both.
        trusted: Any = os.environ.get("AWS_CA_BUNDLE") or True  # Its stubs know no file.
        self._session = URLLib3Session(verify=trusted, timeout=timeouts, max_pool_connections=POOL_COUNT)

    def ask(
        self,
        method: str,
        bucket: str = "",
        key: str = "",
        *,
        query: Mapping[str, str] | None = None,
        headers: Mapping[str, str] | None = None,
        body: bytes = b"",
        mapped: str = "",
        pauses_s: tuple[float, ...] = RETRY_PAUSES_S,
    ) -> Reply:
        """One request, tried again while nobody answers. `mapped`: the name of a header without which the body of the
        answer is not read.

        Raises:
            HTTPClientError, botocore.exceptions.ConnectionError: nobody answers.
        """
        for pause_s in (*pauses_s, None):
            try:
                return self._ask(method, bucket, key, query or {}, headers or {}, body, mapped)
            except (HTTPClientError, BotoConnectionError):
                if pause_s is None:
                    raise
                time.sleep(pause_s)
        raise AssertionError("unreachable")

    def _ask(
        self,
        method: str,
        bucket: str,
        key: str,
        query: Mapping[str, str],
        headers: Mapping[str, str],
        body: bytes,
        mapped: str,
    ) -> Reply:
        path = f"/{bucket}/{quote(key, safe='/~')}" if bucket else "/"
        target = f"{self.url}{path}?{urlencode(query, quote_via=quote)}" if query else f"{self.url}{path}"
        request = AWSRequest(method, target, headers=dict(headers), data=body, stream_output=bool(mapped))
        S3SigV4Auth(self._credentials.get_frozen_credentials(), "s3", self._region).add_auth(request)
        answer = self._session.send(request.prepare())
        found = {name.lower(): value for name, value in answer.headers.items()}
        if not mapped:
            return Reply(answer.status_code, found, answer.content)
        if answer.status_code < 300 and mapped not in found:
            answer.raw.close()  # Of what is sent instead nothing is wanted, and it may be long.
            return Reply(answer.status_code, found, b"")
        return Reply(answer.status_code, found, answer.raw.read())
