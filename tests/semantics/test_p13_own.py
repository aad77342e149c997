"""Requests of our own on the S3 address: signed like any other. Their refusals in detail: tests/adapters."""

import json
from typing import Any

import pytest
from botocore.credentials import Credentials
from tests.nodes import StartNode

from tiergate_adapters.wire import Endpoint

KEYS = {"TIERGATE_ACCESS_KEY_ID": "CLIENTKEY", "TIERGATE_SECRET_ACCESS_KEY": "secret-of-clients-5d1c"}
ORIGIN_SECRET = "secret-of-origin-83aa"
VERBS = [
    ("GET", "", "", {"x-tiergate-node": ""}),
    ("POST", "bucket", "key", {"x-tiergate-grant": "", "size": "5"}),
    ("POST", "", "", {"x-tiergate-release": ""}),
]


@pytest.mark.semantics("P13.11")
def test_requests_of_our_own_need_a_signature_and_tell_no_secrets(start_node: StartNode, bucket: str) -> None:
    node = start_node(environment=KEYS, secret_key=ORIGIN_SECRET)
    known = Endpoint(node.endpoint, Credentials(*KEYS.values()), "us-east-1")
    forger = Endpoint(node.endpoint, Credentials("CLIENTKEY", "guessed"), "us-east-1")
    stranger = Endpoint(node.endpoint, Credentials("SOMEBODY", "guessed"), "us-east-1")
    for method, named, key, query in VERBS:
        for endpoint, code in ((forger, "SignatureDoesNotMatch"), (stranger, "InvalidAccessKeyId")):
            refused = endpoint.ask(method, named and bucket, key, query=query)
            assert (refused.status, refused.code) == (403, code)
    told: dict[str, Any] = known.ask("GET", query={"x-tiergate-node": ""}).document()
    assert told["memory"]["slabs"] == str(node.memory_dir / "slabs" / "slabs")
    assert told["origin"]["endpoint"] == node.origin
    for secret in (KEYS["TIERGATE_SECRET_ACCESS_KEY"], ORIGIN_SECRET):
        assert secret not in json.dumps(told)
        assert secret not in node.log
    lease = {"x-tiergate-lease": told["memory"]["token"]}
    granted = known.ask("POST", bucket, "key", query={"x-tiergate-grant": "", "size": "5"}, headers=lease)
    assert granted.is_done, granted
    assert known.ask("POST", "no-such-bucket-here", "k", query=VERBS[1][3], headers=lease).code == "NoSuchBucket"
