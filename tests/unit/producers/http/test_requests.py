"""Bodies of requests with values that JSON can hold and Postgres and UTF-8 cannot."""

import json
from typing import Any

import pytest

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
