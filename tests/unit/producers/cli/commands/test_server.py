"""`headrace open` and `headrace up` print a link that signs a browser in, also in a pipe."""

from pathlib import Path

import pytest

from infra.operations.local import supervisor
from infra.sandbox.levels import probe
from schemas.errors import InvalidConfig
from tests.unit.producers.cli.conftest import FakeServer, Run

LINK = "http://127.0.0.1:1/login?code=abc"


def test_open_prints_a_new_link(server: FakeServer, headrace: Run) -> None:
    server.answer("POST", "/login-links", {"url": LINK, "expires_s": 600}, 201)
    ran = headrace("open")
    assert ran.out == f"{LINK}\n"
    assert "opens once, within 10 minutes" in ran.err
    assert headrace("open", "--json").document["url"] == LINK
    assert len(server.requests) == 2, "each link opens once"


def test_up_in_a_pipe_prints_a_link(
    server: FakeServer, headrace: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.answer("POST", "/login-links", {"url": LINK, "expires_s": 600}, 201)
    monkeypatch.setattr(supervisor, "supervise", lambda *_, on_ready: on_ready())
    assert f"Dashboard: {LINK}" in headrace("up").out
    assert LINK not in headrace("up", "--json").out


def test_up_says_once_that_code_cannot_be_confined_and_starts_nothing(
    server: FakeServer, headrace: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def refuse(_: str) -> None:
        raise InvalidConfig("bubblewrap cannot confine user code here")

    monkeypatch.setattr(probe, "choose_level", refuse)
    monkeypatch.setattr(supervisor, "supervise", lambda *_, on_ready: pytest.fail("started"))
    ran = headrace("up")
    assert ran.code == 1
    assert ran.err.count("bubblewrap cannot confine") == 1
    assert not (tmp_path / "home").exists()
