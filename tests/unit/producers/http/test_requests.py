"""Bodies of requests with values that JSON can hold and Postgres and UTF-8 cannot."""

import json
from typing import Any
from uuid import UUID

import pytest
from starlette.requests import Request

from infra.ports.actor import Actor, acting_as
from producers.http.requests import cause_of
from tests.kit.application import Application

pytestmark = pytest.mark.postgres

HALF = "a\ud800"
"""Half of a surrogate pair, which JSON can escape."""


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/runs", {"config": {}, "workspace": HALF}),
        ("/datasets", {"name": "a", "file_name": HALF}),
        ("/api-keys", {"name": "a", "workspace": HALF}),
        ("/api-keys", {"name": "a", "expires_s": 10**400}),
        ("/api-keys", {"name": "a", "expires_s": -(10**400)}),
        ("/workspaces/w/quotas", {"limits": {HALF: 1}}),
        ("/workspaces/w/quotas", {"limits": {"runs_per_day": 10**400}}),
    ],
)
async def test_values_that_nothing_can_hold_are_refused(
    app: Application, path: str, body: dict[str, Any]
) -> None:
    await app.post("/workspaces", {"url": "/repo", "name": "w"})
    answer = await app.api.post(f"/api/v1{path}", content=json.dumps(body))
    assert answer.status_code == 400, answer.text
    assert answer.json()["code"] == "VALIDATION"


def test_a_workspace_has_idempotency_keys_of_its_own() -> None:
    """So nobody guesses a key of others and gets their run as the answer."""
    scope = {"type": "http", "headers": [(b"idempotency-key", b"k")]}

    def cause(workspace: str | None) -> UUID:
        with acting_as(Actor("a", "ada", frozenset({"submit"}), workspace)):
            return cause_of(Request(scope), "run")

    assert cause("w") == cause("w")
    assert len({cause("w"), cause("v"), cause(None)}) == 3
