"""`headrace secret` as a user sees it: the value comes from anywhere but an argument."""

import io
import sys
from pathlib import Path

import click
import pytest

from tests.unit.producers.cli.conftest import FakeServer, Run

VALUE = "hush-hush-1"
STORED = {
    "name": "KEY",
    "scope": "workspace",
    "workspace": "w",
    "updated_at": "2026-01-01T00:00:00Z",
    "updated_by": "admin",
    "used_at": None,
}


class Stdin:
    """Standard input with these bytes."""

    def __init__(self, data: bytes, *, terminal: bool = False) -> None:
        self.buffer = io.BytesIO(data)
        self._terminal = terminal

    def isatty(self) -> bool:
        return self._terminal


@pytest.fixture
def stored(server: FakeServer) -> FakeServer:
    server.answer("PUT", "/secrets/KEY", {"secret": STORED}, status=201)
    return server


@pytest.mark.parametrize("data", [b"hush-hush-1", b"hush-hush-1\n", b"hush-hush-1\r\n"])
def test_a_value_comes_from_stdin_without_its_line_break(
    headrace: Run, stored: FakeServer, monkeypatch: pytest.MonkeyPatch, data: bytes
) -> None:
    monkeypatch.setattr(sys, "stdin", Stdin(data))
    ran = headrace("secret", "set", "KEY", "--workspace", "w")
    assert ran.code == 0, ran.err
    [request] = stored.requests
    assert request.document == {"scope": "workspace", "workspace": "w", "value": VALUE}
    assert VALUE not in ran.out + ran.err + request.path + request.query
    assert 'required = ["KEY"]' in ran.out


def test_a_value_comes_from_a_file_or_a_variable(
    headrace: Run, stored: FakeServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("MINE", VALUE)
    path = tmp_path / "key"
    path.write_text(f"{VALUE}\n")
    assert headrace("secret", "set", "KEY", "--env", "MINE", "--scope", "personal").code == 0
    assert headrace("secret", "set", "KEY", "--file", str(path), "--json").code == 0
    assert [request.document["value"] for request in stored.requests] == [VALUE, VALUE]
    assert headrace("secret", "set", "KEY", "--file", str(path), "--env", "MINE").code == 2


def test_a_terminal_is_asked_and_shows_nothing(
    headrace: Run, stored: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[object] = []

    def prompt(text: str, **options: object) -> str:
        asked.append((text, options["hide_input"]))
        return VALUE

    monkeypatch.setattr(sys, "stdin", Stdin(b"", terminal=True))
    monkeypatch.setattr(click, "prompt", prompt)
    assert headrace("secret", "set", "KEY").code == 0
    assert asked == [("value of KEY", True)]


def test_an_argument_is_no_way_to_pass_a_value(headrace: Run, server: FakeServer) -> None:
    assert headrace("secret", "set", "KEY", VALUE).code == 2
    assert headrace("secret", "set", VALUE).code == 1, "nor instead of the name"
    assert server.requests == []


@pytest.mark.parametrize(("data", "says"), [(b"\xff\xfe" * 9, "UTF-8"), (b"ab1!" * 9000, "32 KiB")])
def test_an_invalid_value_is_refused_before_it_is_sent(
    headrace: Run, server: FakeServer, monkeypatch: pytest.MonkeyPatch, data: bytes, says: str
) -> None:
    monkeypatch.setattr(sys, "stdin", Stdin(data))
    ran = headrace("secret", "set", "KEY")
    assert ran.code == 1
    assert says in ran.err
    unset = headrace("secret", "set", "KEY", "--env", "NOT_SET_HERE")
    assert "NOT_SET_HERE is not set" in unset.err
    assert server.requests == []


def test_secrets_are_listed_and_deleted(headrace: Run, server: FakeServer) -> None:
    server.answer("GET", "/secrets", {"secrets": [], "total_count": 0})
    server.answer("GET", "/secrets", {"secrets": [STORED], "total_count": 1})
    server.answer("DELETE", "/secrets/KEY", {"deleted": {"name": "KEY"}})
    server.answer("POST", "/secrets/rotate-key", {"key": "local:1", "secrets": 2, "connections": 3})
    assert "headrace secret set NAME" in headrace("secret", "list").out
    assert "never" in headrace("secret", "list").out
    assert headrace("secret", "list", "--json").document["total_count"] == 1
    assert headrace("secret", "delete", "KEY", "--scope", "personal").code == 0
    assert server.requests[-1].query == "scope=personal"
    assert "2 secrets and 3 values" in headrace("secret", "rotate-key").out
