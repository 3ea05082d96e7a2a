"""What the settings of the judge refuse."""

import pytest

from r3lite.core.config import UsageError
from r3lite.core.invocation import resolve
from r3lite.settings import JudgeSettings, PpoConfig
from tests.errors import raises


@pytest.mark.parametrize("address", ["https://example.com", "http://127.0.0.1:8080/v1/", "http://[::1]:80", None])
def test_addresses(address):
    assert JudgeSettings(judge_base_url=address).judge_base_url == address


@pytest.mark.parametrize(
    "address",
    [
        "",
        "example.com",
        "ftp://example.com",
        "file:///etc/passwd",
        "http://",
        "http:///path",
        "http://exam ple.com",
        "http://example.com\n",
        "http://[::1",
        "http://example.com:port",
        "https://me:s3cret@example.com",
        "https://s3cret@example.com",
        "ftp://me:s3cret@example.com",
        "me:s3cret@example.com",
        "https://example.com/?key=s3cret",
        "https://example.com/#s3cret",
    ],
)
def test_what_is_no_address_is_refused_and_no_secret_is_shown(address):
    with pytest.raises(UsageError, match=r"judge.base.url") as error:
        resolve("ppo", PpoConfig(), ["--judge-base-url", address])
    assert "s3cret" not in str(error.value) and error.value.__cause__ is None


@pytest.mark.parametrize("name", ["", "a b", "a?b", "gemini\n", "x#y"])
def test_what_no_model_is_named(name):
    with raises(UsageError, "judge-model-name"):
        JudgeSettings(judge_model=name).check()
