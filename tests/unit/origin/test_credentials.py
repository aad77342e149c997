"""The AWS chain as the origin uses it: credentials and region, never an endpoint."""

import pytest

from tiergate.clock import SystemClock
from tiergate.errors import OriginCredentialsError
from tiergate.origin.credentials import CredentialChain, standard_session
from tiergate.origin.signing import Keys


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/nonexistent")
    monkeypatch.setenv("AWS_CONFIG_FILE", "/nonexistent")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "eu-west-1")


def test_region_comes_from_the_chain() -> None:
    assert CredentialChain(SystemClock()).region() == "eu-west-1"


def test_roles_are_assumed_without_the_environment_s_endpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9000")
    monkeypatch.setenv("AWS_ENDPOINT_URL_STS", "http://127.0.0.1:9000")
    client = standard_session().create_client("sts")
    assert client.meta.endpoint_url == "https://sts.eu-west-1.amazonaws.com"
    client.close()


async def test_keys_of_the_environment_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "id")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.setenv("AWS_SESSION_TOKEN", "token")
    assert await CredentialChain(SystemClock()).frozen() == Keys("id", "secret", "token")


async def test_no_keys_anywhere_is_an_error_of_credentials() -> None:
    with pytest.raises(OriginCredentialsError):
        await CredentialChain(SystemClock()).frozen()
