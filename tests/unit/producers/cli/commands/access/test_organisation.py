"""`headrace org`, and the options that name an organisation or a repository."""

from typing import Any

from tests.unit.producers.cli.conftest import FakeServer, Run

RIVERS: dict[str, Any] = {
    "id": "0123456789abcdef",
    "name": "rivers",
    "title": "Team Rivers",
    "created_at": "2026-01-01T00:00:00Z",
    "created_by": "admin/root",
}
SUMS: dict[str, Any] = {
    "id": "w1",
    "name": "sums",
    "url": "https://host/rivers/sums",
    "status": "synced",
    "commit_sha": None,
    "organisation": "rivers",
    "repository": "rivers/sums",
}


def test_an_organisation_is_made_listed_shown_and_renamed(
    server: FakeServer, headrace: Run
) -> None:
    server.answer("POST", "/organisations", {"organisation": RIVERS}, 201)
    made = headrace("org", "create", "rivers", "--title", "Team Rivers")
    assert "Team Rivers" in made.out
    assert server.requests[-1].document == {"name": "rivers", "title": "Team Rivers"}
    server.answer("GET", "/organisations", {"organisations": [RIVERS], "total_count": 1})
    assert "rivers" in headrace("org", "list").out
    server.answer("GET", "/organisations/rivers", {"organisation": RIVERS, "workspaces": [SUMS]})
    assert "rivers/sums" in headrace("org", "show", "rivers").out
    server.answer("GET", "/organisations/lakes", {"organisation": RIVERS, "workspaces": []})
    assert "workspace add URL --organisation lakes" in headrace("org", "show", "lakes").out
    server.answer("PUT", "/organisations/rivers", {"organisation": {**RIVERS, "title": "Lakes"}})
    assert "Lakes" in headrace("org", "rename", "rivers", "Lakes").out
    assert server.requests[-1].document == {"title": "Lakes"}


def test_a_workspace_is_added_for_an_organisation_and_named_by_a_repository(
    server: FakeServer, headrace: Run
) -> None:
    server.answer("POST", "/workspaces", {"workspace": SUMS}, 201)
    options = ["--organisation", "rivers", "--repository", "rivers/sums"]
    headrace("workspace", "add", SUMS["url"], *options)
    assert server.requests[-1].document == {
        "url": SUMS["url"],
        "organisation": "rivers",
        "repository": "rivers/sums",
    }
    server.answer("PUT", "/workspaces/sums/repository", {"workspace": SUMS})
    assert "rivers/sums" in headrace("workspace", "repository", "sums", "rivers/sums").out
    assert server.requests[-1].document == {"repository": "rivers/sums"}
    headrace("workspace", "repository", "sums", "--none")
    assert server.requests[-1].document == {}
    assert headrace("workspace", "repository", "sums").code == 1
    assert headrace("workspace", "repository", "sums", "a/b", "--none").code == 1
