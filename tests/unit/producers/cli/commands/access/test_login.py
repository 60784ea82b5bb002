"""`headrace login`, `logout` and `whoami`: where the API key is kept, and when it is asked for."""

import json
import stat
from pathlib import Path
from typing import Any

import pytest

from producers.cli.client import ServerAddress, read_login, store_login
from tests.unit.producers.cli.conftest import FakeServer, Run

BEGUN: dict[str, Any] = {
    "device_code": "d",
    "user_code": "BCDFG-HJKLM",
    "verification_uri": "http://server/device",
    "verification_uri_complete": "http://server/device?code=BCDFG-HJKLM",
    "expires_in": 600,
    "interval": 5,
}
ISSUED: dict[str, Any] = {
    "api_key": {"id": "abcdefghij", "name": "laptop", "expires_at": "2130-01-01T00:00:00+00:00"},
    "person": {"id": "ada-abcdef", "name": "Ada", "email": "ada@example.org"},
    "secret": "hr_abcdefghij_secret",
}


@pytest.fixture
def paused(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """How long a login paused between its questions. It does not, and no key is set."""
    pauses: list[float] = []
    monkeypatch.setattr("producers.cli.commands.access.login.time.sleep", pauses.append)
    monkeypatch.delenv("HEADRACE_API_KEY")
    return pauses


def refuse(server: FakeServer, *codes: str) -> None:
    for code in codes:
        status = 429 if code == "QUOTA_EXCEEDED" else 400
        server.answer("POST", "/device/token", {"code": code, "detail": "wait"}, status)


def test_a_login_stores_its_key_for_this_server_and_later_commands_use_it(
    server: FakeServer, headrace: Run, paused: list[float], tmp_path: Path
) -> None:
    server.answer("POST", "/device/authorize", BEGUN)
    refuse(server, "AUTHORIZATION_PENDING", "SLOW_DOWN", "QUOTA_EXCEEDED")
    server.answer("POST", "/device/token", ISSUED)
    ran = headrace("login", "--no-browser", "--name", "laptop")
    assert ran.code == 0, ran.err
    assert "http://server/device and enter the code BCDFG-HJKLM" in ran.err
    assert "signed in as Ada (ada@example.org) until 2130-01-01" in ran.out
    assert "hr_abcdefghij_secret" not in ran.out + ran.err
    assert server.requests[0].document == {"device_name": "laptop"}
    assert paused == [5, 5, 10, 15]
    file = tmp_path / "home" / "logins.json"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    server.answer("GET", "/api-keys", {"api_keys": []})
    headrace("key", "list")
    assert server.requests[-1].headers["Authorization"] == "Bearer hr_abcdefghij_secret"


def test_a_login_opens_a_browser_unless_it_shall_not(
    server: FakeServer, headrace: Run, paused: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[str] = []
    monkeypatch.setattr("webbrowser.open", opened.append)
    server.answer("POST", "/device/authorize", BEGUN)
    server.answer("POST", "/device/token", ISSUED)
    document = headrace("login", "--json").document
    assert opened == [BEGUN["verification_uri_complete"]]
    assert "secret" not in document
    assert document["person"]["id"] == "ada-abcdef"


@pytest.mark.parametrize("code", ["ACCESS_DENIED", "EXPIRED_TOKEN"])
def test_a_login_that_is_refused_stores_nothing(
    server: FakeServer, headrace: Run, paused: list[float], tmp_path: Path, code: str
) -> None:
    server.answer("POST", "/device/authorize", BEGUN)
    refuse(server, code)
    ran = headrace("login", "--no-browser", "--json")
    asked, failure = map(json.loads, ran.err.splitlines())
    assert asked == {"verification_uri": "http://server/device", "user_code": "BCDFG-HJKLM"}
    assert (ran.code, failure["error"]["code"]) == (1, code)
    assert not (tmp_path / "home" / "logins.json").exists()


def test_a_login_that_nobody_approves_ends(
    server: FakeServer, headrace: Run, paused: list[float]
) -> None:
    server.answer("POST", "/device/authorize", {**BEGUN, "expires_in": 0})
    assert "nobody approved the code in time" in headrace("login", "--no-browser").err


def test_a_login_beside_a_key_in_the_environment_is_refused(
    server: FakeServer, headrace: Run
) -> None:
    ran = headrace("login", "--no-browser", "--json")
    assert "unset it first" in ran.error["message"]
    assert server.requests == []


def test_each_server_has_a_login_of_its_own_and_the_environment_comes_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEADRACE_HOME", str(tmp_path))
    (tmp_path / "token").write_text("root\n")
    store_login(tmp_path, "http://one.test/", "key-1")
    store_login(tmp_path, "http://two.test", "key-2")
    for url, key in (("http://one.test", "key-1"), ("http://two.test", "key-2")):
        monkeypatch.setenv("HEADRACE_URL", url)
        assert ServerAddress.from_environment().api_key == key
    monkeypatch.setenv("HEADRACE_URL", "http://three.test")
    assert ServerAddress.from_environment().api_key == "root"
    monkeypatch.setenv("HEADRACE_URL", "http://two.test")
    monkeypatch.setenv("HEADRACE_API_KEY", "mine")
    assert ServerAddress.from_environment().api_key == "mine"


@pytest.mark.parametrize("text", ["", "{", "[]", '{"logins": 1}', '{"logins": {"http://a": 3}}'])
def test_a_file_of_logins_that_is_damaged_counts_as_none(tmp_path: Path, text: str) -> None:
    (tmp_path / "logins.json").write_text(text)
    assert read_login(tmp_path, "http://a") is None
    store_login(tmp_path, "http://a", "key")
    assert read_login(tmp_path, "http://a") == "key"


@pytest.mark.parametrize(("status", "revoked"), [(200, "abcdefghij"), (401, None)])
def test_logout_revokes_the_stored_key_and_forgets_it(
    server: FakeServer, headrace: Run, tmp_path: Path, status: int, revoked: str | None
) -> None:
    """Not the key of the environment, and also when the stored one is not valid any more."""
    store_login(tmp_path / "home", server.url, "hr_stored")
    body = {"revoked": "abcdefghij", "code": "UNAUTHORIZED", "detail": "unknown"}
    server.answer("DELETE", "/api-keys/self", body, status)
    assert headrace("logout", "--json").document["revoked"] == revoked
    assert server.requests[-1].headers["Authorization"] == "Bearer hr_stored"
    assert read_login(tmp_path / "home", server.url) is None
    assert headrace("logout", "--json").error["code"] == "NOT_SIGNED_IN"


def test_whoami_shows_the_person_and_the_role(server: FakeServer, headrace: Run) -> None:
    key = {"id": "abcdefghij", "scopes": ["read"], "expires_at": None}
    ids = {"organisation": "16902f1b566d5e66", "workspace": "839571a06fa8500f"}
    names = {"organisation_name": "rivers", "workspace_name": "sums"}
    found = {"owner": "ada-abcdef", **ids, **names, "api_key": key}
    server.answer("GET", "/whoami", {**found, "person": ISSUED["person"], "role": "viewer"})
    out = headrace("whoami").out
    shown = ("Ada (ada@example.org)", "viewer", "rivers", "sums", "never")
    assert all(text in out for text in shown)
    assert not any(identity in out for identity in ids.values())
