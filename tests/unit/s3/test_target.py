import pytest

from tiergate.errors import RequestError
from tiergate.s3.target import Target, percent_decode, split_target

SUFFIXES = ["s3.example.com", "example.com:9000"]


def split(raw: str, host: str = "127.0.0.1:9000") -> Target:
    return split_target(raw, host, SUFFIXES)


@pytest.mark.parametrize(
    ("raw", "bucket", "key"),
    [
        ("/", "", ""),
        ("/bkt", "bkt", ""),
        ("/bkt/", "bkt", ""),
        ("/bkt/key", "bkt", "key"),
        ("/bkt//key", "bkt", "/key"),
        ("/bkt/a//b/", "bkt", "a//b/"),
        ("/bkt/./x", "bkt", "./x"),
        ("/bkt/../x/..", "bkt", "../x/.."),
        ("/bkt/a+b%2Bc%20d", "bkt", "a+b+c d"),
        ("/bkt/100%25/%2541", "bkt", "100%/%41"),
        ("/bkt/%E2%82%AC", "bkt", "€"),
        ("/bkt/\udce2\udc82\udcac", "bkt", "€"),
        ("/bkt/€", "bkt", "€"),
        ("/bkt/a%3Fb%23c", "bkt", "a?b#c"),
        ("/bkt/%2Flead", "bkt", "/lead"),
        ("/Old_Bucket.Name/k", "Old_Bucket.Name", "k"),
    ],
)
def test_path_style_target_is_decoded_once(raw: str, bucket: str, key: str) -> None:
    assert split(raw) == Target(bucket, key, ())


@pytest.mark.parametrize(
    ("host", "bucket", "key"),
    [
        ("bkt.s3.example.com", "bkt", "a/b"),
        ("BKT.S3.Example.Com:80", "bkt", "a/b"),
        ("dotted.name.s3.example.com:1234", "dotted.name", "a/b"),
        ("s3.example.com", "aaa", "b"),
        ("bkt.example.com", "bkt", "a/b"),
        ("elsewhere.org", "aaa", "b"),
        ("[::1]:9000", "aaa", "b"),
        ("", "aaa", "b"),
    ],
)
def test_host_decides_between_virtual_host_and_path_style(host: str, bucket: str, key: str) -> None:
    raw = "/a/b" if bucket != "aaa" else "/aaa/b"
    assert split(raw, host) == Target(bucket, key, ())


def test_virtual_host_keeps_a_leading_slash_of_the_key() -> None:
    assert split("//a", "bkt.s3.example.com").key == "/a"
    assert split("/", "bkt.s3.example.com") == Target("bkt", "", ())


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        ("http://bkt.s3.example.com/k?x=1", Target("bkt", "k", (("x", "1"),))),
        ("HTTPS://h:1/bkt/k", Target("bkt", "k", ())),
        ("http://bkt.s3.example.com?list-type=2", Target("bkt", "", (("list-type", "2"),))),
        ("http://h", Target("", "", ())),
    ],
)
def test_absolute_form_overrides_the_host(raw: str, expected: Target) -> None:
    assert split(raw, "other.s3.example.com") == expected


def test_query_decodes_plus_as_space_and_keeps_order_and_absence() -> None:
    target = split("/bkt?prefix=a+b%2Bc&uploads&empty=&=x&&delimiter=%2F%3D&prefix=2")
    assert target.query == (
        ("prefix", "a b+c"),
        ("uploads", None),
        ("empty", ""),
        ("", "x"),
        ("delimiter", "/="),
        ("prefix", "2"),
    )
    assert target.parameter("prefix") == "a b+c"
    assert target.parameter("uploads") == ""
    assert target.parameter("none") is None


@pytest.mark.parametrize(
    ("raw", "code"),
    [
        ("/bkt/%zz", "InvalidURI"),
        ("/bkt/%", "InvalidURI"),
        ("/bkt/%ff", "InvalidURI"),
        ("/bkt/%ED%A0%80", "InvalidURI"),
        ("/bkt?x=%C3", "InvalidURI"),
        ("*", "InvalidURI"),
        ("bkt/key", "InvalidURI"),
        ("/ab", "InvalidBucketName"),
        ("/-bad/k", "InvalidBucketName"),
        ("/a..b/k", "InvalidBucketName"),
        ("/10.1.2.3/k", "InvalidBucketName"),
        ("/bad%2Fbucket/k", "InvalidBucketName"),
        ("//k", "InvalidBucketName"),
        ("/bkt/" + "k" * 1025, "KeyTooLongError"),
        ("/bkt/" + "%E2%82%AC" * 342, "KeyTooLongError"),
        ("/bkt/a%00b", "KeyTooLongError"),
    ],
)
def test_bad_target_is_refused_with_the_code(raw: str, code: str) -> None:
    with pytest.raises(RequestError) as caught:
        split(raw)
    assert caught.value.code == code


def test_key_of_exactly_1024_bytes_is_accepted() -> None:
    assert len(split("/bkt/" + "k" * 1024).key) == 1024


def test_percent_decode_twice_encoded_is_decoded_once() -> None:
    assert percent_decode("%252F+") == "%2F+"
