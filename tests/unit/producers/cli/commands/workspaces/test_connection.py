"""`headrace workspace connect`, `disconnect` and `rotate-secret` as a user sees them."""

from pathlib import Path
from typing import Any

import pytest

from tests.unit.producers.cli.conftest import FakeServer, Run

URL = "https://git.example/o/r"
WORKSPACE = {"id": "w", "name": "r", "url": URL}
KEY = "-----BEGIN OPENSSH PRIVATE KEY-----\nhush\n"


def answer(forge: str = "gitea", **hook: object) -> dict[str, Any]:
    made = {"url": "https://h/webhooks/r", "secret": "s3cret", "made": True, "problem": None}
    return {"workspace": WORKSPACE, "forge": forge, "hook": {**made, **hook}}


def test_a_token_travels_in_the_body_only(
    headrace: Run, server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORGE_TOKEN", "hush-token\n")
    server.answer("POST", "/workspaces/connect", answer(), status=201)
    ran = headrace("workspace", "connect", URL, "--forge", "gitea", "--token-env", "FORGE_TOKEN")
    assert ran.code == 0, ran.err
    [request] = server.requests
    assert request.document == {"url": URL, "forge": "gitea", "token": "hush-token"}
    assert "hush" not in request.path + request.query + str(request.headers)
    assert "posts pushes to https://h/webhooks/r" in ran.out
    assert "s3cret" not in ran.out
    assert "hush" not in ran.out


def test_the_old_option_works_and_is_in_no_help(headrace: Run, server: FakeServer) -> None:
    server.answer("POST", "/workspaces/connect", answer(), status=201)
    assert headrace("workspace", "connect", URL, "--provider", "gitea").code == 0
    assert server.requests[-1].document == {"url": URL, "forge": "gitea"}
    assert "--provider" not in headrace("workspace", "connect", "--help").out


def test_keys_are_read_from_files(headrace: Run, server: FakeServer, tmp_path: Path) -> None:
    key = tmp_path / "key.pem"
    key.write_text(KEY)
    server.answer("POST", "/workspaces/connect", answer(), status=201)
    assert headrace("workspace", "connect", URL, "--deploy-key-file", str(key)).code == 0
    app = ("--app-id", "7", "--app-key-file", str(key))
    assert headrace("workspace", "connect", URL, "--name", "x", *app).code == 0
    first, second = (request.document for request in server.requests)
    assert first == {"url": URL, "deploy_key": KEY}
    assert second == {"url": URL, "name": "x", "app": {"id": "7", "private_key": KEY}}


@pytest.mark.parametrize(
    ("forge", "said"),
    [
        ("github", "Payload URL"),
        ("gitea", "Target URL"),
        ("gitlab", "Secret token"),
        ("none", "X-Hub-Signature-256"),
    ],
)
def test_without_a_token_the_steps_are_printed(
    headrace: Run, server: FakeServer, forge: str, said: str
) -> None:
    server.answer("POST", "/workspaces/connect", answer(forge, made=False), status=201)
    out = headrace("workspace", "connect", URL).out
    assert said in out
    assert "  1. " in out
    assert "  3. " in out
    assert "https://h/webhooks/r" in out
    assert "s3cret" in out


def test_a_hook_that_was_refused_is_said(headrace: Run, server: FakeServer) -> None:
    refused = answer(made=False, problem="git.example answers 403", secret=None)
    server.answer("POST", "/workspaces/connect", refused, status=201)
    out = headrace("workspace", "connect", URL).out
    assert "could not be made: git.example answers 403" in out
    assert "headrace workspace rotate-secret r" in out


def test_a_path_is_sent_as_the_server_reads_it(
    headrace: Run, server: FakeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    server.answer("POST", "/workspaces/connect", answer("none"), status=201)
    headrace("workspace", "connect", ".")
    assert server.requests[0].document == {"url": str(tmp_path)}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--token-env", "NOT_SET"), "NOT_SET is not set or empty"),
        (("--deploy-key-file", "{}/binary"), "cannot be read (it is not text)"),
        (("--deploy-key-file", "{}/huge"), "has more than 64 KiB"),
        (("--app-id", "7"), "belong together"),
        (("--forge", "bitbucket"), "bitbucket"),
        (("--deploy-key-file", "{}/missing"), "does not exist"),
    ],
)
def test_wrong_options_send_nothing(
    headrace: Run, server: FakeServer, tmp_path: Path, arguments: tuple[str, ...], said: str
) -> None:
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    (tmp_path / "huge").write_bytes(b"x" * (65 << 10))
    ran = headrace("workspace", "connect", URL, *(one.format(tmp_path) for one in arguments))
    assert ran.code in (1, 2)
    assert said in " ".join(ran.err.split())
    assert server.requests == []


def test_disconnect_and_rotate_say_which_hook_and_secret_remain(
    headrace: Run, server: FakeServer
) -> None:
    for problem, deleted in (("git.example answers 500", False), (None, False), (None, True)):
        gone = {"workspace": WORKSPACE, "hook": {"deleted": deleted, "problem": problem}}
        server.answer("DELETE", "/workspaces/r/connection", gone)
    said = [headrace("workspace", "disconnect", "r").out for _ in range(3)]
    assert "still on the forge" in said[0]
    assert "entered by hand stays" in said[1]
    assert len(said[2].splitlines()) == 1
    server.answer("POST", "/workspaces/r/rotate-secret", answer(made=False))
    out = headrace("workspace", "rotate-secret", "r", "--now").out
    assert "s3cret" in out
    assert server.requests[-1].document == {"now": True}


def test_json_is_the_answer(headrace: Run, server: FakeServer) -> None:
    server.answer("POST", "/workspaces/connect", answer(), status=201)
    server.answer("POST", "/workspaces/r/rotate-secret", answer())
    gone = {"workspace": WORKSPACE, "hook": {"deleted": True, "problem": None}}
    server.answer("DELETE", "/workspaces/r/connection", gone)
    for arguments in (("connect", URL), ("rotate-secret", "r"), ("disconnect", "r")):
        ran = headrace("workspace", *arguments, "--json")
        assert ran.document["workspace"] == WORKSPACE
