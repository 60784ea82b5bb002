"""`headrace member` and `headrace person`: which requests they send, and for which organisation."""

from typing import Any

from tests.unit.producers.cli.conftest import FakeServer, Run

ADA: dict[str, Any] = {
    "id": "ada-abcdef",
    "name": "Ada",
    "email": "ada@example.org",
    "role": "owner",
    "joined_at": "2026-01-01T00:00:00Z",
}
MEMBERS = "/organisations/main/members"


def test_members_are_those_of_the_keys_organisation_or_of_a_named_one(
    server: FakeServer, headrace: Run
) -> None:
    page = {"members": [ADA], "total_count": 1, "has_more": False, "next_offset": None}
    server.answer("GET", "/whoami", {"organisation": None})
    server.answer("GET", MEMBERS, page)
    server.answer("GET", "/organisations/other/members", page)
    assert "ada@example.org" in headrace("member", "list").out
    assert headrace("member", "list", "--organisation", "other", "--json").document["members"] == [
        ADA
    ]


def test_an_invitation_is_printed_alone_on_its_line(server: FakeServer, headrace: Run) -> None:
    made = {
        "invitation": {"expires_at": "2026-01-08T00:00:00Z"},
        "organisation": "main",
        "url": "http://s/join?code=c",
    }
    server.answer("GET", "/whoami", {"organisation": "main"})
    server.answer("POST", "/organisations/main/invitations", made, 201)
    ran = headrace("member", "invite", "--role", "viewer", "--email", "bea@example.org")
    assert ran.out == "http://s/join?code=c\n"
    assert "this link into main works once" in ran.err
    assert server.requests[-1].document == {"role": "viewer", "email": "bea@example.org"}


def test_roles_and_members_are_changed_by_an_address(server: FakeServer, headrace: Run) -> None:
    path = f"{MEMBERS}/ada@example.org"
    server.answer("PUT", path, {"member": ADA})
    server.answer("DELETE", path, {"removed": "ada-abcdef", "name": "Ada"})
    options = ("ada@example.org", "--org", "main")
    assert "is owner now" in headrace("member", "role", options[0], "owner", *options[1:]).out
    assert server.requests[-1].document == {"role": "owner"}
    assert "removed Ada" in headrace("member", "remove", *options).out
    assert headrace("member", "role", options[0], "admin").code == 2


def test_invitations_are_listed_and_ended(server: FakeServer, headrace: Run) -> None:
    path = "/organisations/main/invitations"
    one = {
        "id": "k3f9x2m1ab",
        "role": "member",
        "email": None,
        "created_by": "ada",
        "expires_at": "2026-01-08T00:00:00Z",
    }
    server.answer("GET", path, {"invitations": [one], "total_count": 1})
    server.answer("DELETE", f"{path}/k3f9x2m1ab", {"revoked": "k3f9x2m1ab"})
    assert "anyone" in headrace("member", "invitations", "--org", "main").out
    assert "ended" in headrace("member", "uninvite", "k3f9x2m1ab", "--org", "main").out


def test_the_operator_lists_and_removes_people(server: FakeServer, headrace: Run) -> None:
    known = {**ADA, "created_at": ADA["joined_at"], "removed_at": None}
    page = {"people": [known], "total_count": 1, "has_more": False, "next_offset": None}
    server.answer("GET", "/people", page)
    server.answer("DELETE", "/people/ada-abcdef", {"removed": "ada-abcdef", "name": "Ada"})
    assert "Ada" in headrace("person", "list", "--all").out
    assert "removed=true" in server.requests[-1].query
    assert "removed Ada" in headrace("person", "remove", "ada-abcdef").out
