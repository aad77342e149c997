"""Asking a running node at its admin address."""

import json
from collections.abc import Mapping
from http.client import HTTPResponse
from typing import Any, cast
from urllib.error import HTTPError
from urllib.parse import urlencode
from urllib.request import ProxyHandler, Request, build_opener

from tiergate.child import Folders
from tiergate.config import Settings


def url(settings: Settings) -> str | None:
    """Where a node answers on its admin address; None if no node serves from the memory folder."""
    if settings.admin_listen.port:
        return f"http://{settings.admin_listen}"
    try:
        found: str = document(Folders(settings.memory_dir).node_file.read_bytes())["admin"]
    except (OSError, ValueError, KeyError):
        return None
    return found


def ask(method: str, address: str, query: Mapping[str, str | int], timeout_s: float) -> HTTPResponse:
    """What the admin address answers, without a proxy in between; the caller closes it.

    Raises:
        HTTPError: with an error.
        OSError: nobody answers.
    """
    request = Request(f"{address}?{urlencode(query)}" if query else address, method=method)
    return cast("HTTPResponse", build_opener(ProxyHandler({})).open(request, timeout=timeout_s))


def document(body: bytes) -> Mapping[str, Any]:
    """A JSON object.

    Raises:
        ValueError: it is none.
    """
    found = json.loads(body)
    if not isinstance(found, dict):
        raise ValueError("the answer is not a JSON object")
    return cast("Mapping[str, Any]", found)


def reason(error: HTTPError) -> str:
    """What an error's answer says."""
    try:
        return str(document(error.read())["error"])
    except (OSError, ValueError, KeyError):
        return f"{error.code} {error.reason}"
