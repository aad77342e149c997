"""What lets a browser's form upload in: a policy, its signature, and whether the form keeps to it.

https://docs.aws.amazon.com/AmazonS3/latest/API/sigv4-HTTPPOSTConstructPolicy.html
https://docs.aws.amazon.com/AmazonS3/latest/API/sigv4-authentication-HTTPPOST.html
"""

import base64
import binascii
import hashlib
import hmac
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tiergate.errors import RequestError
from tiergate.s3 import wire
from tiergate.s3.canonical import ALGORITHM, sign_text, signing_key
from tiergate.s3.claim import split_credential
from tiergate.s3.sigv4 import SecretFor, signature_mismatch, unknown_access_key

POLICY = "policy"
_V4 = ("x-amz-algorithm", "x-amz-credential", "x-amz-date", "x-amz-signature")
_V2 = ("awsaccesskeyid", "signature")
_UNCONDITIONED = frozenset({POLICY, "file", "x-amz-signature", *_V2})
_IGNORED_PREFIX = "x-ignore-"
_LENGTH_RANGE = "content-length-range"
_OPERATORS = frozenset({"eq", "starts-with"})


@dataclass(frozen=True, slots=True)
class Policy:
    """`rules` are (operator, field in lower case, value); the range of lengths is inclusive."""

    expires_s: float
    rules: tuple[tuple[str, str, str], ...]
    least_bytes: int = 0
    most_bytes: int | None = None


def check_signature(fields: Mapping[str, str], secret_for: SecretFor) -> str:
    """Check who signed the policy in a form's fields (names in lower case); the access key.

    Raises:
        RequestError: AccessDenied without a policy, InvalidArgument for what is missing or malformed,
            InvalidAccessKeyId, SignatureDoesNotMatch.
    """
    policy = fields.get(POLICY)
    if policy is None:
        raise RequestError("AccessDenied", "Access Denied")
    if "awsaccesskeyid" in fields:
        access_key, given = (_must(fields, name) for name in _V2)
        digest = hmac.new(_secret(access_key, secret_for).encode(), policy.encode(), hashlib.sha1).digest()
        expected = base64.b64encode(digest).decode()
    else:
        algorithm, credential, _, given = (_must(fields, name) for name in _V4)
        if algorithm != ALGORITHM:
            raise RequestError("InvalidArgument", f'X-Amz-Algorithm only supports "{ALGORITHM}"')
        access_key, date, region = split_credential(credential, presigned=True)
        expected = sign_text(signing_key(_secret(access_key, secret_for), date, region), policy)
    if not hmac.compare_digest(expected.encode(), given.encode()):
        raise signature_mismatch(access_key)
    return access_key


def _must(fields: Mapping[str, str], name: str) -> str:
    if not fields.get(name):
        raise RequestError(
            "InvalidArgument",
            f"Bucket POST must contain a field named '{name}'.  If it is specified, please check the order of the "
            "fields.",
            argument_name=name,
        )
    return fields[name]


def _secret(access_key: str, secret_for: SecretFor) -> str:
    secret = secret_for(access_key)
    if secret is None:
        raise unknown_access_key(access_key)
    return secret


def parse_policy(text: str) -> Policy:
    """Read a policy as a form carries it, in base64.

    Raises:
        RequestError: InvalidPolicyDocument.
    """
    try:
        document = json.loads(base64.b64decode("".join(text.split()), validate=True))
    except (binascii.Error, ValueError, RecursionError) as error:
        raise _invalid("Invalid JSON.") from error
    if not isinstance(document, dict) or not document.keys() <= {"expiration", "conditions"}:
        raise _invalid("Unexpected member.")
    expiration, conditions = document.get("expiration"), document.get("conditions")
    if not isinstance(expiration, str):
        raise _invalid("Policy missing expiration.")
    if not isinstance(conditions, list):
        raise _invalid("Policy missing conditions.")
    try:
        expires_s = wire.parse_time(expiration).timestamp()
    except (ValueError, TypeError) as error:
        raise _invalid(f"Invalid 'expiration' value: '{expiration}'") from error
    rules: list[tuple[str, str, str]] = []
    least_bytes, most_bytes = 0, None
    for condition in conditions:
        match condition:
            case dict() if len(condition) == 1 and all(isinstance(value, str) for value in condition.values()):
                rules += [("eq", name.lower(), value) for name, value in condition.items()]
            case [str(word), low, high] if word.lower() == _LENGTH_RANGE:
                least_bytes, most_bytes = _bound(low), _bound(high)
            case [str(word), str(name), str(value)] if word.lower() in _OPERATORS and name.startswith("$"):
                rules.append((word.lower(), name[1:].lower(), value))
            case _:
                raise _invalid("Invalid Simple-Condition.")
    return Policy(expires_s, tuple(rules), least_bytes, most_bytes)


def _bound(value: Any) -> int:
    try:
        bound = value if isinstance(value, int) and not isinstance(value, bool) else wire.parse_integer(str(value))
    except ValueError as error:
        raise _invalid("Invalid content-length-range.") from error
    if bound < 0:
        raise _invalid("Invalid content-length-range.")
    return bound


def check_form(policy: Policy, fields: Mapping[str, str], now_s: float) -> None:
    """Hold a form to its policy; `fields` by lower-case name, `bucket` and the final `key` among them.

    Raises:
        RequestError: AccessDenied.
    """
    if now_s > policy.expires_s:
        raise _denied("Policy expired.")
    for operator, name, value in policy.rules:
        given = fields.get(name)
        if given is None or not _holds(operator, name, value, given):
            raise _denied(f'Policy Condition failed: ["{operator}", "${name}", "{value}"]')
    ruled = {name for _, name, _ in policy.rules} | _UNCONDITIONED | {"bucket"}
    extra = sorted(name for name in fields if name not in ruled and not name.startswith(_IGNORED_PREFIX))
    if extra:
        raise _denied(f"Extra input fields: {extra[0]}")


def check_length(policy: Policy, size_bytes: int) -> None:
    """Hold the file to the lengths the policy allows.

    Raises:
        RequestError: EntityTooLarge, EntityTooSmall.
    """
    if policy.most_bytes is not None and size_bytes > policy.most_bytes:
        raise RequestError("EntityTooLarge", proposed_size=size_bytes, max_size_allowed=policy.most_bytes)
    if size_bytes < policy.least_bytes:
        raise RequestError("EntityTooSmall", proposed_size=size_bytes, min_size_allowed=policy.least_bytes)


def _holds(operator: str, name: str, value: str, given: str) -> bool:
    if operator == "eq":
        return given == value
    # A list of content types must keep to the rule in each of its members.
    members = given.split(",") if name == "content-type" else [given]
    return all(member.strip().startswith(value) for member in members)


def _invalid(why: str) -> RequestError:
    return RequestError("InvalidPolicyDocument", f"Invalid Policy: {why}")


def _denied(why: str) -> RequestError:
    return RequestError("AccessDenied", f"Invalid according to Policy: {why}")
