"""Requests of our own to a gateway: `?x-tiergate-<verb>`, signed like any other S3 request."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, urlencode
from xml.etree import ElementTree

import boto3
from botocore.auth import S3SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.httpsession import URLLib3Session

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tiergate_adapters.place import Place

CONNECT_TIMEOUT_S = 5.0
ANSWER_TIMEOUT_S = 300.0
"""So long a gateway may look before it answers."""


@dataclass(frozen=True, slots=True)
class Answered:
    """What came back. `is_gateways`: a gateway sent it, and not what else speaks S3."""

    status: int
    is_gateways: bool
    body: bytes

    @property
    def document(self) -> dict[str, Any]:
        """The JSON of an answer that is no error."""
        found: dict[str, Any] = json.loads(self.body)
        return found

    @property
    def message(self) -> str:
        """What an error says."""
        try:
            root = ElementTree.fromstring(self.body)
        except ElementTree.ParseError:
            return f"status {self.status}"
        return f"{root.findtext('Code', '')}: {root.findtext('Message', '')}"


class Asking:
    """Asks the gateway that the AWS environment names, about a bucket."""

    def __init__(self, place: Place) -> None:
        session = boto3.Session()
        client = session.client("s3")
        self.endpoint: str = client.meta.endpoint_url
        self._region: str = client.meta.region_name or "us-east-1"
        self._credentials = session.get_credentials()
        self._bucket = place.bucket
        options: dict[str, Any] = {
            "verify": os.environ.get("AWS_CA_BUNDLE") or True,
            "timeout": (CONNECT_TIMEOUT_S, ANSWER_TIMEOUT_S),
        }
        self._http = URLLib3Session(**options)

    def ask(self, method: str, verb: str, query: Mapping[str, str]) -> Answered:
        """Ask once.

        Raises:
            HTTPClientError, botocore.exceptions.ConnectionError: nobody answers.
        """
        asked = urlencode({f"x-tiergate-{verb}": "", **query}, quote_via=quote)
        request = AWSRequest(method, f"{self.endpoint.rstrip('/')}/{self._bucket}?{asked}", data=b"")
        if self._credentials is not None:
            S3SigV4Auth(self._credentials.get_frozen_credentials(), "s3", self._region).add_auth(request)
        answer = self._http.send(request.prepare())
        return Answered(answer.status_code, answer.headers.get("Server", "") == "tiergate", answer.content)
