"""The address and the key of a sandbox service elsewhere."""

from pathlib import Path

import pytest

from infra.sandbox.service.child import ChildService
from infra.sandbox.service.connect import RemoteService, service_of
from infra.settings.settings import BadSetting, Settings

KEY = "a-key-that-nobody-else-has"


def load(home: Path, **environ: str) -> Settings:
    return Settings.load({"HEADRACE_HOME": str(home), **environ})


def test_without_an_address_each_process_has_a_service_of_its_own(tmp_path: Path) -> None:
    settings = load(tmp_path, HEADRACE_SANDBOX_KEY=KEY)
    assert settings.sandbox_service is None
    assert isinstance(service_of(settings), ChildService)


def test_with_an_address_a_process_uses_that_service(tmp_path: Path) -> None:
    url = "tcp://sandbox:8422"
    settings = load(tmp_path, HEADRACE_SANDBOX_URL=url, HEADRACE_SANDBOX_KEY=f" {KEY}\n")
    service = service_of(settings)
    assert isinstance(service, RemoteService)
    assert service.name == "the sandbox service at sandbox:8422"
    assert settings.sandbox_service is not None
    assert settings.sandbox_service.key == KEY.encode()
    assert KEY not in repr(settings)


@pytest.mark.parametrize(
    ("url", "key", "says"),
    [
        ("http://sandbox:8422", KEY, "tcp://host:port"),
        ("tcp://sandbox", KEY, "tcp://host:port"),
        ("tcp://sandbox:0", KEY, "tcp://host:port"),
        ("tcp://sandbox:99999", KEY, "tcp://host:port"),
        ("tcp://:8422", KEY, "tcp://host:port"),
        ("tcp://sandbox:8422/path", KEY, "tcp://host:port"),
        ("tcp://user:hunter2@sandbox:8422", KEY, "tcp://host:port"),
        ("tcp://sandbox:8422", "", "HEADRACE_SANDBOX_KEY is not set"),
        ("tcp://sandbox:8422", "hunter2", "holds a short key"),
    ],
)
def test_a_bad_value_is_one_line_that_shows_no_key(
    tmp_path: Path, url: str, key: str, says: str
) -> None:
    with pytest.raises(BadSetting, match="HEADRACE_SANDBOX_") as raised:
        load(tmp_path, HEADRACE_SANDBOX_URL=url, HEADRACE_SANDBOX_KEY=key)
    assert says in str(raised.value)
    assert "\n" not in str(raised.value)
    assert "hunter2" not in str(raised.value)
    assert KEY not in str(raised.value)
