"""`headrace key`, `headrace sessions` and `headrace audit`, for programs and for people."""

import json
from typing import Any

from tests.unit.producers.cli.conftest import FakeServer, Run

API_KEY: dict[str, Any] = {
    "id": "abcdefghij",
    "name": "ci",
    "owner": "ada",
    "prefix": "hr_abcdefghij",
    "scopes": ["read", "submit"],
    "workspace": "839571a06fa8500f",
    "workspace_name": "sums",
    "organisation_name": "rivers",
    "expires_at": "2130-01-01T00:00:00+00:00",
    "created_at": "2026-01-01T00:00:00Z",
    "created_by": "admin/root",
    "last_used_at": None,
    "revoked_at": None,
    "old_secret_until": "2026-06-01T13:00:00+00:00",
}


def test_a_new_api_key_is_printed_alone_on_its_line(server: FakeServer, headrace: Run) -> None:
    server.answer("POST", "/api-keys", {"api_key": API_KEY, "secret": "hr_abcdefghij_s"}, 201)
    options = ["--scope", "read", "--scope", "submit", "--expires", "90d", "--owner", "ada"]
    ran = headrace("key", "create", "ci", *options)
    assert ran.out == "hr_abcdefghij_s\n"
    assert "it is not shown again" in ran.err
    assert server.requests[-1].document == {
        "name": "ci",
        "scopes": ["read", "submit"],
        "owner": "ada",
        "expires_s": 90 * 24 * 3600,
    }


def test_an_api_key_reads_and_expires_unless_something_else_is_said(
    server: FakeServer, headrace: Run
) -> None:
    server.answer("POST", "/api-keys", {"api_key": API_KEY, "secret": "hr_x"}, 201)
    assert "it expires: 2130-01-01 00:00 UTC" in headrace("key", "create", "ci").err
    assert server.requests[-1].document == {"name": "ci", "scopes": ["read"]}
    headrace("key", "create", "ci", "--expires", "never")
    assert server.requests[-1].document["expires_s"] == "never"
    assert headrace("key", "create", "ci", "--expires", "soon").code == 1


def test_a_rotation_prints_the_new_secret_and_how_long_the_old_one_is_valid(
    server: FakeServer, headrace: Run
) -> None:
    server.answer(
        "POST", "/api-keys/ci/rotate", {"api_key": API_KEY, "secret": "hr_abcdefghij_new"}
    )
    ran = headrace("key", "rotate", "ci")
    assert ran.out == "hr_abcdefghij_new\n"
    assert "the old secret is valid until 2026-06-01 13:00 UTC" in ran.err
    assert server.requests[-1].document == {"overlap_s": 3600}
    headrace("key", "rotate", "ci", "--overlap", "0s", "--expires", "30d")
    assert server.requests[-1].document == {"overlap_s": 0, "expires_s": 30 * 24 * 3600}


def test_the_list_shows_when_api_keys_expire(server: FakeServer, headrace: Run) -> None:
    expiries = {
        "2130-01-01T00:00:00+00:00": "2130-01-01 00:00 UTC",
        "2026-01-02T00:00:00+00:00": "expired",
        None: "never",
    }
    api_keys = [API_KEY | {"expires_at": expiry} for expiry in expiries]
    server.answer("GET", "/api-keys", {"api_keys": api_keys, "has_more": False})
    lines = [line for line in headrace("key", "list").out.splitlines() if "ada" in line]
    for line, wanted in zip(lines, expiries.values(), strict=True):
        assert wanted in line


def test_api_keys_are_listed_and_revoked(server: FakeServer, headrace: Run) -> None:
    server.answer("GET", "/api-keys", {"api_keys": [API_KEY], "has_more": False})
    server.answer("DELETE", "/api-keys/ci", {"revoked": "abcdefghij", "name": "ci"})
    shown = headrace("key", "list").out
    assert "hr_abcdefghij" in shown
    assert "sums" in shown
    assert "839571a06fa8500f" not in shown
    assert json.loads(headrace("key", "list", "--all", "--json").out)["total_count"] == 1
    assert "revoked=true" in server.requests[-1].query
    assert "revoked the API key ci" in headrace("key", "revoke", "ci").out


def test_the_old_command_and_option_work_and_are_in_no_help(
    server: FakeServer, headrace: Run
) -> None:
    server.answer("GET", "/api-keys", {"api_keys": [API_KEY], "has_more": False})
    server.answer("GET", "/audit", {"audit": [], "has_more": False})
    assert headrace("token", "list").out == headrace("key", "list").out
    assert headrace("audit", "--token", "ada").code == 0
    assert "api_key=ada" in server.requests[-1].query
    assert "token" not in headrace("--help").out
    assert "--token" not in headrace("audit", "--help").out


def test_sessions_are_listed_and_a_user_is_signed_out_everywhere(
    server: FakeServer, headrace: Run
) -> None:
    one = {
        "id": "0123456789ab",
        "owner": "ada",
        "api_key": "abcdefghij",
        "api_key_name": "desk",
        "created_at": "2026-01-01T00:00:00+00:00",
        "expires_at": "2026-01-01T12:00:00+00:00",
    }
    server.answer("GET", "/sessions", {"sessions": [one], "total_count": 1})
    server.answer("DELETE", "/sessions", {"ended": 3})
    listed = headrace("sessions", "list", "--all").out
    assert "desk" in listed
    assert "2026-01-01 12:00 UTC" in listed
    assert server.requests[-1].query == "all=true"
    assert "ended 3 sessions" in headrace("sessions", "end", "--owner", "ada").out
    assert server.requests[-1].query == "owner=ada"


def test_the_audit_list_says_who_was_refused(server: FakeServer, headrace: Run) -> None:
    entry = {
        "at": "2026-01-01T00:00:00Z",
        "api_key": "abcdefghij",
        "owner": "ada",
        "address": "192.0.2.1",
        "method": "POST",
        "subject": "/api/v1/gc\x1b[2J",
        "status": 403,
        "allowed": False,
        "count": 3,
    }
    server.answer("GET", "/audit", {"audit": [entry], "has_more": False})
    ran = headrace("audit", "--since", "2d", "--key", "ada")
    assert "ada/abcdefghij" in ran.out
    assert "403 refused" in ran.out
    assert "\x1b" not in ran.out
    assert "api_key=ada" in server.requests[-1].query
    assert "since=" in server.requests[-1].query
