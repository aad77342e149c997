"""A browser's form upload (PostObject): signed in its fields, and a PutObject for all that follows.

https://docs.aws.amazon.com/AmazonS3/latest/API/RESTObjectPOST.html
"""

from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from urllib.parse import parse_qsl, quote, urlencode, urlsplit, urlunsplit

from tiergate.engine.calls import Answer, Call, Framing
from tiergate.errors import RequestError
from tiergate.s3 import wire
from tiergate.s3.bodyverifier import BodyVerifier, unknown_algorithms
from tiergate.s3.formdata import FormReader, boundary_of, malformed_form
from tiergate.s3.operations import Target, parse, unknown_parts
from tiergate.s3.postpolicy import POLICY, check_form, check_length, parse_policy
from tiergate.s3.sigv4 import UNSIGNED_PAYLOAD
from tiergate.s3.target import check_key
from tiergate.s3.xml import Node, parse_xml, render_xml
from tiergate.server.bodies import WireBody

OPERATION = "PostObject"

_PLAIN_HEADERS = frozenset(
    {"cache-control", "content-disposition", "content-encoding", "content-language", "content-type", "expires"}
)
_SIGNING = frozenset({"x-amz-algorithm", "x-amz-credential", "x-amz-date", "x-amz-signature", "x-amz-security-token"})
_STATUSES = frozenset({"200", "201", "204"})


class FileBody:
    """The file in a form (implements `engine.calls.IncomingBody`)."""

    framing = Framing(chunked=False)

    def __init__(
        self,
        request: WireBody,
        form: AsyncIterator[bytes | memoryview],
        reader: FormReader,
        size_bytes: int,
        verifier: BodyVerifier,
    ) -> None:
        self._request = request
        self._form = form
        self._reader = reader
        self._verifier = verifier
        self.size_bytes: int | None = size_bytes

    async def pieces(self) -> AsyncIterator[bytes | memoryview]:
        """As `IncomingBody.pieces`.

        Raises:
            RequestError: MalformedPOSTRequest, beside what the request's own body raises.
        """
        count = 0
        piece = self._reader.rest()
        while True:
            count += len(piece)
            if count > (self.size_bytes or 0):
                raise malformed_form("the file is not the last field")
            if piece:
                self._verifier.update(piece)
                yield piece
            data = await anext(self._form, None)
            if data is None:
                break
            piece = self._reader.feed(data)
        self._reader.finish()
        if count != self.size_bytes:
            raise malformed_form("the file is not the last field")

    async def verify(self) -> dict[str, str]:
        """As `IncomingBody.verify`: the form against its headers, and the file against the checksum in the fields."""
        await self._request.verify()
        return self._verifier.finish()


@dataclass(frozen=True, slots=True)
class FormUpload:
    """A form as the PutObject that it stands for, and how its answer looks."""

    call: Call
    fields: Mapping[str, str]
    host: str

    def answered(self, answer: Answer) -> Answer:
        """The answer to the form, made of that to its PutObject."""
        if answer.status != 200:
            return answer
        bucket, key = self.call.target.bucket, self.call.target.key
        etag = answer.headers.get("etag") or answer.headers.get("ETag", "")
        headers = {name: value for name, value in answer.headers.items() if name.lower() != "content-length"}
        redirect = redirect_of(self.fields, bucket, key, etag)
        if redirect:
            return Answer(303, headers | {"location": redirect})
        location = f"http://{self.host}/{bucket}/{quote(key, safe='/-_.~')}"
        headers["location"] = location
        status = self.fields.get("success_action_status", "")
        if status != "201":
            return Answer(int(status) if status in _STATUSES else 204, headers)
        found = [("Location", location), ("Bucket", bucket), ("Key", key), ("ETag", etag)]
        document = Node("PostResponse", children=[Node(name, text) for name, text in found])
        return Answer(201, headers | {"content-type": "application/xml"}, render_xml(document))


def form_boundary(method: str, target: Target, headers: Mapping[str, str]) -> str | None:
    """The boundary of a browser's form upload; None for any other request."""
    if method != "POST" or not target.bucket or target.key or target.query:
        return None
    return boundary_of(headers.get("content-type", ""))


async def read_form(
    body: WireBody,
    boundary: str,
    bucket: str,
    request_headers: Mapping[str, str],
    request_id: str,
    admit: Callable[[Mapping[str, str]], None],
    now_s: float,
) -> FormUpload:
    """Read the fields of a form, and who may send it; the file is left to come. `admit` judges the signature in the
    fields.

    Raises:
        RequestError: what is wrong with the form, its policy or its signature.
    """
    form_bytes = body.size_bytes
    if form_bytes is None:
        raise RequestError("MissingContentLength")
    reader, form = FormReader(boundary), body.pieces()
    async for data in form:
        reader.feed(data)
        if reader.in_file:
            break
    if not reader.in_file:
        reader.finish()
    fields = reader.fields | {"bucket": bucket}
    if "key" not in fields:
        raise RequestError(
            "InvalidArgument",
            "Bucket POST must contain a field named 'key'.  If it is specified, please check the order of the fields.",
            argument_name="key",
        )
    fields["key"] = key = fields["key"].replace("${filename}", reader.filename)
    if not key:
        raise RequestError("InvalidArgument", "User key must have a length greater than 0.", argument_name="key")
    check_key(key)
    admit(fields)
    size_bytes = reader.file_bytes(form_bytes)
    if size_bytes < 0:
        raise malformed_form("it ends early")
    if POLICY in fields:
        policy = parse_policy(fields[POLICY])
        check_form(policy, fields, now_s)
        check_length(policy, size_bytes)
    headers = headers_of(fields) | {"host": request_headers.get("host", ""), "content-length": str(size_bytes)}
    target = Target(bucket, key, ())
    verifier = BodyVerifier(headers.items(), UNSIGNED_PAYLOAD)
    call = Call(
        operation="PutObject",
        method="PUT",
        target=target,
        raw_query="",
        headers=headers,
        params=parse("PutObject", target, headers, b""),
        body=FileBody(body, form, reader, size_bytes, verifier),
        request_id=request_id,
        forwards=bool(unknown_parts("PutObject", target, headers) or unknown_algorithms(headers.items())),
    )
    return FormUpload(call, fields, headers["host"])


def headers_of(fields: Mapping[str, str]) -> dict[str, str]:
    """The headers that a form's fields stand for.

    Raises:
        RequestError: InvalidArgument for a value that no header can carry, MalformedXML for tags.
    """
    found: dict[str, str] = {}
    for name, value in fields.items():
        if name == "tagging":
            name, value = "x-amz-tagging", tags_of(value)
        elif name == "acl":
            name = "x-amz-acl"
        elif name not in _PLAIN_HEADERS and (not name.startswith("x-amz-") or name in _SIGNING):
            continue
        if wire.has_control(value):
            raise RequestError("InvalidArgument", f"{name} holds control characters.", argument_name=name)
        found[name] = value
    return found


def tags_of(document: str) -> str:
    """A Tagging document as the header that says the same.

    Raises:
        RequestError: MalformedXML.
    """
    root = parse_xml(document.encode())
    tags = [tag for group in root.children if group.name == "TagSet" for tag in group.children if tag.name == "Tag"]
    pairs = [{child.name: child.text for child in tag.children} for tag in tags]
    return urlencode([(pair.get("Key", ""), pair.get("Value", "")) for pair in pairs], quote_via=quote)


def redirect_of(fields: Mapping[str, str], bucket: str, key: str, etag: str) -> str:
    """Where the browser is sent after a success; "" for nowhere. What is no URL is ignored, as in S3."""
    wanted = fields.get("success_action_redirect") or fields.get("redirect") or ""
    try:
        parts = urlsplit(wanted)
    except ValueError:
        return ""
    if parts.scheme not in {"http", "https"} or not parts.netloc or wire.has_control(wanted):
        return ""
    query = [*parse_qsl(parts.query, keep_blank_values=True), ("bucket", bucket), ("key", key), ("etag", etag)]
    return urlunsplit(parts._replace(query=urlencode(query, quote_via=quote)))
