"""`headrace workspace quotas` and `headrace org quotas`: limits and use, and setting limits."""

from tests.unit.producers.cli.conftest import FakeServer, Run

QUOTAS = [
    {"holder": "workspace", "name": "runs_at_once", "most": 4, "used": 3, "frees_at": None},
    {
        "holder": "API key",
        "name": "runs_per_day",
        "most": None,
        "used": 7,
        "frees_at": "2026-01-02T00:00:00Z",
    },
]


def test_limits_and_use_are_shown_and_set(server: FakeServer, headrace: Run) -> None:
    answer = {"workspace": "sums", "quotas": QUOTAS}
    server.answer("GET", "/workspaces/sums/quotas", answer)
    server.answer("POST", "/workspaces/sums/quotas", answer)
    lines = headrace("workspace", "quotas", "sums").out.splitlines()
    [workspace] = [line for line in lines if "runs_at_once" in line]
    [key] = [line for line in lines if "runs_per_day" in line]
    assert all(text in workspace for text in ("workspace", "4", "3", "when a run ends"))
    assert all(text in key for text in ("API key", "unlimited", "7", "2026-01-02 00:00 UTC"))
    headrace("workspace", "quotas", "sums", "--set", "runs_at_once=4", "--set", "runs_per_day=1")
    assert server.requests[-1].document == {"limits": {"runs_at_once": "4", "runs_per_day": "1"}}
    refused = headrace("workspace", "quotas", "sums", "--set", "runs_at_once")
    assert refused.code == 1


def test_those_of_an_organisation_are_shown_and_set(server: FakeServer, headrace: Run) -> None:
    state = {"holder": "organisation", "name": "members", "most": 9, "used": 2, "frees_at": None}
    answer = {"organisation": "rivers", "quotas": [state]}
    server.answer("GET", "/organisations/rivers/quotas", answer)
    server.answer("POST", "/organisations/rivers/quotas", answer)
    [line] = [
        line for line in headrace("org", "quotas", "rivers").out.splitlines() if "members" in line
    ]
    assert all(text in line for text in ("organisation", "9", "2", "when one is removed"))
    headrace("org", "quotas", "rivers", "--set", "members=9")
    assert server.requests[-1].document == {"limits": {"members": "9"}}
