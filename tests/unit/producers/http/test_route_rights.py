"""Every route against every kind of API key: which scope it needs, and what a key of a workspace
gets from its own workspace and from another one."""

from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.responses import Response
from starlette.routing import Mount, Route

from infra.identity.api_key_format import api_key_id, digest
from infra.identity.sessions import Bearer, form_key
from infra.ports.actor import CONTAINED, ROLE_SCOPES, ROLES, SCOPES, Role
from producers.http.browsers import COOKIE
from producers.http.routing import Reach, RouteScope, scoped_routes, scoped_table
from tests.kit.application import Application, application, rows
from tests.kit.people import member
from tests.kit.tenants import Tenant, ask, create_api_key, tenant

pytestmark = pytest.mark.postgres

JSONL = {"content": rows(5).encode()}


@dataclass(frozen=True)
class Row:
    """A route, the scope it needs, and the status for an API key of the workspace that `path`
    names."""

    method: str
    path: str
    scope: RouteScope
    own: int = 200
    reach: Reach = "workspace"
    content: dict[str, Any] = field(default_factory=dict)

    @property
    def is_about_a_thing(self) -> bool:
        return "{" in self.path

    @property
    def is_form(self) -> bool:
        """Whether a page's form sends the request, with the cookie of a session."""
        is_page = not self.path.startswith(("/api/", "/v1/", "/webhooks/"))
        return is_page and self.method == "POST" and self.scope != "open"


SUBMITTED: dict[str, Any] = {"json": {"config": {}}}
REWEIGHED: dict[str, Any] = {"json": {"weights": {"no part": 2.0}}}
RENAMED: dict[str, Any] = {"json": {"name": "renamed"}}
UPLOADED: dict[str, Any] = {"json": {"repository": "org/name"}}
PATHS: dict[str, Any] = {"json": {"paths": ["index.jsonl"]}}
PATH: dict[str, Any] = {"json": {"path": "index.jsonl"}}
MADE: dict[str, Any] = {"json": {"name": "a b"}}

TABLE = [
    Row("GET", "/healthz", "open"),
    Row("GET", "/readyz", "open"),
    Row("POST", "/webhooks/{workspace}", "open", 401),
    Row("GET", "/metrics", "metrics", reach="installation"),
    Row("GET", "/api/v1/status", "read", reach="installation"),
    Row("GET", "/api/v1/models", "read"),
    Row("GET", "/api/v1/asyncapi.json", "read"),
    Row("POST", "/api/v1/runs", "submit", 400, content=SUBMITTED),
    Row("GET", "/api/v1/runs", "read"),
    Row("GET", "/api/v1/runs/{run}", "read"),
    Row("GET", "/api/v1/runs/{run}/metrics", "read"),
    Row("POST", "/api/v1/runs/{run}/fork", "submit", 400, content={"json": {"at": "1"}}),
    Row("GET", "/api/v1/runs/{run}/forks", "read"),
    Row("GET", "/api/v1/runs/{run}/diff/{run}", "read", 400),
    Row("GET", "/api/v1/runs/{run}/checkpoints", "read"),
    Row("GET", "/api/v1/checkpoints", "read"),
    Row("GET", "/api/v1/cost", "read"),
    Row("GET", "/api/v1/runs/{run}/logs", "read"),
    Row("GET", "/api/v1/runs/{run}/events", "read"),
    Row("GET", "/api/v1/runs/{run}/samples", "read"),
    Row("GET", "/api/v1/runs/{run}/search?text=a", "read"),
    Row("GET", "/api/v1/runs/{run}/samples/{run}-train-1-0-0.0", "read"),
    Row("GET", "/api/v1/runs/{run}/samples/{run}-train-1-0-0.0/files/nothing", "read", 404),
    Row("GET", "/api/v1/runs/{run}/trace?sample={run}-train-1-0-0.0", "read"),
    Row("POST", "/api/v1/runs/{run}/regrades", "submit", 400, content=REWEIGHED),
    Row("GET", "/api/v1/runs/{run}/regrades", "read"),
    Row("GET", "/api/v1/regrades/{regrade}", "read"),
    Row("GET", "/api/v1/datasets", "read"),
    Row("POST", "/api/v1/datasets", "submit", 400, content=MADE),
    Row("POST", "/api/v1/datasets/from-run", "submit", 400, content=MADE),
    Row("POST", "/api/v1/datasets/validate?file_name=a.jsonl", "submit", content=JSONL),
    Row("GET", "/api/v1/datasets/{dataset}", "read"),
    Row("GET", "/api/v1/datasets/{dataset}/content", "read"),
    Row("GET", "/api/v1/datasets/{dataset}/preview", "read"),
    Row("PUT", "/api/v1/datasets/{dataset}/content", "submit", 409, content=JSONL),
    Row("GET", "/api/v1/datasets/{dataset}/upload", "submit", 404),
    Row("POST", "/api/v1/datasets/{dataset}/complete", "submit", 404, content={"json": {}}),
    Row("POST", "/api/v1/datasets/{dataset}/abort", "submit", 404),
    Row("GET", "/api/v1/datasets/{dataset}/logs", "read"),
    Row("GET", "/api/v1/datasets/{dataset}/versions", "read"),
    Row("GET", "/api/v1/datasets/{dataset}/url", "read"),
    Row("PUT", "/api/v1/transfers/uploads/{dataset}/{run}", "open", 400),
    Row("GET", "/api/v1/transfers/datasets/{dataset}", "open", 400),
    Row("GET", "/api/v1/artifacts", "read"),
    Row("POST", "/api/v1/artifacts", "submit", 400, content=MADE),
    Row("POST", "/api/v1/artifacts/uploads", "submit", 400, content=MADE),
    Row("GET", "/api/v1/artifacts/{dataset}/{run_name}", "read", 404),
    Row("GET", "/api/v1/artifacts/{dataset}/{run_name}/versions", "read", 404),
    Row("GET", "/api/v1/artifacts/{dataset}/{run_name}/url", "read", 404),
    Row("DELETE", "/api/v1/artifacts/{dataset}/{run_name}", "admin", 403, reach="organisation"),
    Row("GET", "/api/v1/transfers/artifacts/{dataset}", "open", 400),
    Row("GET", "/api/v1/transfers/evals/{evaluation}/nothing", "open", 400),
    Row("GET", "/api/v1/workspaces", "read"),
    Row("GET", "/api/v1/workspaces/{workspace}", "read"),
    Row("GET", "/api/v1/workspaces/{workspace}/rollouts", "read"),
    Row("GET", "/api/v1/workspaces/{workspace}/deliveries", "read"),
    Row("GET", "/api/v1/workspaces/{workspace}/quotas", "read"),
    Row("POST", "/api/v1/workspaces/{workspace}/quotas", "admin", reach="organisation"),
    Row("POST", "/api/v1/workspaces/{workspace}/sync", "control", 202),
    Row("POST", "/api/v1/workspaces/{workspace}/rotate-secret", "admin", 404),
    Row("DELETE", "/api/v1/workspaces/{workspace}/connection", "admin", 404),
    Row("POST", "/api/v1/evals", "submit", 400, content=SUBMITTED),
    Row("GET", "/api/v1/evals", "read"),
    Row("GET", "/api/v1/evals/{evaluation}", "read"),
    Row("GET", "/api/v1/evals/{run}v", "read"),
    Row("GET", "/api/v1/evals/{evaluation}/logs", "read"),
    Row("GET", "/api/v1/evals/{evaluation}/samples?offset=9", "read"),
    Row("GET", "/api/v1/evals/{evaluation}/rows", "read"),
    Row("GET", "/api/v1/evals/{evaluation}/summary", "read"),
    Row("GET", "/api/v1/evals/{evaluation}/files", "read"),
    Row("GET", "/api/v1/evals/{evaluation}/files/nothing", "read", 404),
    Row("GET", "/api/v1/evals/{evaluation}/samples/{evaluation}-evaluate-0-0-0.0", "read", 404),
    Row(
        "GET",
        "/api/v1/evals/{evaluation}/samples/{evaluation}-evaluate-0-0-0.0/files/nothing",
        "read",
        404,
    ),
    Row("GET", "/api/v1/evals/{evaluation}/compare/{evaluation}", "read"),
    Row("POST", "/api/v1/evals/imports", "submit", 400, content={"json": {}}),
    Row("GET", "/api/v1/evals/imports/nothing", "submit", 404),
    Row("POST", "/api/v1/evals/imports/nothing/uploads", "submit", 404, content=PATHS),
    Row("POST", "/api/v1/evals/imports/nothing/uploads/complete", "submit", 404, content=PATH),
    Row("POST", "/api/v1/evals/imports/nothing/finalize", "submit", 404),
    Row("POST", "/api/v1/evals/{evaluation}/retry", "control", 409),
    Row("POST", "/api/v1/evals/{evaluation}/stop", "control"),
    Row("GET", "/api/v1/checkpoints/{run_name}@3", "read"),
    Row("GET", "/api/v1/checkpoints/{run_name}@3/files/nothing", "read", 404),
    Row("GET", "/api/v1/checkpoints/{run_name}@3/compare/{run_name}@3", "read"),
    Row("GET", "/api/v1/checkpoints/{run_name}@3/uploads", "read"),
    Row("POST", "/api/v1/checkpoints/{run_name}@3/uploads", "control", 400, content=UPLOADED),
    Row("DELETE", "/api/v1/checkpoints/{run_name}@3/uploads/nothing", "control", 404),
    Row("GET", "/api/v1/checkpoints/{run_name}@3/pushes", "read"),
    Row("POST", "/api/v1/checkpoints/{run_name}@3/pushes", "control", 400, content=UPLOADED),
    Row("DELETE", "/api/v1/checkpoints/{run_name}@3/pushes/nothing", "control", 404),
    Row("POST", "/api/v1/checkpoints/{run_name}@3/chat", "inference", 400),
    Row("GET", "/api/v1/deployments", "read"),
    Row("POST", "/api/v1/deployments", "control", 400, content=MADE),
    Row("GET", "/api/v1/deployments/{run_name}", "read", 404),
    Row("DELETE", "/api/v1/deployments/{run_name}", "control", 404),
    Row("GET", "/v1/models", "inference"),
    Row("GET", "/v1/models/{run_name}", "inference", 404),
    Row("POST", "/v1/chat/completions", "inference", 400),
    Row("POST", "/v1/completions", "inference", 400),
    Row("POST", "/api/v1/runs/{run}/verify", "control", 202),
    Row("GET", "/api/v1/verifications/{verification}", "read"),
    Row("POST", "/api/v1/runs/{run}/stop", "control", 409),
    Row("POST", "/api/v1/runs/{run}/pause", "control", 409),
    Row("POST", "/api/v1/runs/{run}/resume", "control", 409),
    Row("POST", "/api/v1/runs/{run}/approve", "control", 409),
    Row("POST", "/api/v1/runs/{run}/shares", "control", 201),
    Row("GET", "/api/v1/runs/{run}/shares", "control"),
    Row("DELETE", "/api/v1/runs/{run}/shares/{run_name}", "control", 404),
    Row("POST", "/api/v1/runs/{run}/tags", "control", content={"json": {"add": ["a"]}}),
    Row("PUT", "/api/v1/runs/{run}/note", "control", content={"json": {"note": "a"}}),
    Row("POST", "/api/v1/runs/{run}/rename", "control", content=RENAMED),
    Row("POST", "/api/v1/runs/{run}/archive", "control"),
    Row("POST", "/api/v1/runs/{run}/restore", "control"),
    Row("DELETE", "/api/v1/runs/{run}", "control"),
    Row("DELETE", "/api/v1/evals/{evaluation}", "control", 409),
    Row("DELETE", "/api/v1/datasets/{dataset}", "control"),
    Row(
        "PUT", "/api/v1/secrets/API_KEY", "control", 201, content={"json": {"value": "k-12345678"}}
    ),
    Row("GET", "/api/v1/secrets?workspace={workspace}", "read"),
    Row("DELETE", "/api/v1/secrets/API_KEY?workspace={workspace}", "control"),
    Row("POST", "/api/v1/secrets/rotate-key", "admin", reach="installation"),
    Row("GET", "/api/v1/workspaces/{workspace}/alerts", "control"),
    Row(
        "POST",
        "/api/v1/workspaces/{workspace}/alerts",
        "control",
        400,
        content={"json": {"medium": "fax", "address": "1"}},
    ),
    Row("DELETE", "/api/v1/workspaces/{workspace}/alerts/{run_name}", "control", 404),
    Row("POST", "/api/v1/workspaces/{workspace}/alerts/{run_name}/rotate", "control", 404),
    Row("POST", "/api/v1/device/authorize", "open", 400),
    Row("POST", "/api/v1/device/token", "open", 400),
    Row("GET", "/api/v1/whoami", "any"),
    Row("GET", "/api/v1/organisations/{organisation}/members", "read", reach="organisation"),
    Row(
        "PUT",
        "/api/v1/organisations/{organisation}/members/{run_name}",
        "admin",
        reach="organisation",
    ),
    Row(
        "DELETE",
        "/api/v1/organisations/{organisation}/members/{run_name}",
        "read",
        reach="organisation",
    ),
    Row("GET", "/api/v1/organisations/{organisation}/invitations", "admin", reach="organisation"),
    Row(
        "POST",
        "/api/v1/organisations/{organisation}/invitations",
        "admin",
        reach="organisation",
        content={"json": {"role": "viewer"}},
    ),
    Row(
        "DELETE",
        "/api/v1/organisations/{organisation}/invitations/{run_name}",
        "admin",
        reach="organisation",
    ),
    Row("GET", "/api/v1/people", "admin", reach="installation"),
    Row("DELETE", "/api/v1/people/{run_name}", "admin", reach="installation"),
    Row("GET", "/api/v1/api-keys", "admin"),
    Row("POST", "/api/v1/api-keys", "admin", 400, content=MADE),
    Row("DELETE", "/api/v1/api-keys/{run_name}", "admin", 404),
    Row("POST", "/api/v1/api-keys/{run_name}/rotate", "admin", 404),
    Row("GET", "/api/v1/tokens", "admin"),
    Row("POST", "/api/v1/tokens", "admin", 400, content=MADE),
    Row("DELETE", "/api/v1/tokens/{run_name}", "admin", 404),
    Row("POST", "/api/v1/tokens/{run_name}/rotate", "admin", 404),
    Row("POST", "/api/v1/login-links", "read", 201),
    Row("GET", "/api/v1/sessions", "read"),
    Row("DELETE", "/api/v1/sessions", "read"),
    Row("GET", "/api/v1/audit", "admin"),
    Row("GET", "/api/v1/audit/export", "admin", reach="installation"),
    Row("GET", "/api/v1/audit/verification", "admin", reach="installation"),
    Row("GET", "/api/v1/organisations/{organisation}/quotas", "read", reach="organisation"),
    Row("POST", "/api/v1/organisations/{organisation}/quotas", "admin", reach="installation"),
    Row("GET", "/api/v1/organisations", "read"),
    Row("GET", "/api/v1/organisations/main", "read"),
    Row("POST", "/api/v1/organisations", "admin", reach="installation"),
    Row("PUT", "/api/v1/organisations/{organisation}", "admin", reach="organisation"),
    Row("POST", "/api/v1/workspaces", "admin", reach="organisation"),
    Row("POST", "/api/v1/workspaces/connect", "admin", reach="organisation"),
    Row("PUT", "/api/v1/workspaces/{workspace}/repository", "admin", reach="organisation"),
    Row("GET", "/api/v1/dead-letters", "admin", reach="installation"),
    Row("GET", "/api/v1/dead-letters/{run}", "admin", reach="installation"),
    Row("POST", "/api/v1/dead-letters/{run}/redrive", "admin", reach="installation"),
    Row("POST", "/api/v1/rebuild", "admin", reach="installation"),
    Row("GET", "/api/v1/gc", "admin", reach="installation"),
    Row("POST", "/api/v1/gc", "admin", reach="installation"),
    Row("DELETE", "/api/v1/api-keys/self", "any"),
]
WITHIN: dict[str, Any] = {"headers": {"X-Osmosis-Workspace": "ours"}}
"""The workspace that requests of the osmosis client name."""

OSMOSIS = [
    Row("GET", "/api/cli/verify", "any", content=WITHIN),
    Row("DELETE", "/api/cli/tokens/{run_name}", "any", 404, content=WITHIN),
    Row("POST", "/api/cli/device/authorize", "open"),
    Row("POST", "/api/cli/device/token", "open", 400),
    Row("GET", "/api/cli/workspaces", "read", content=WITHIN),
    Row("GET", "/api/cli/quickstart?organizationId={workspace}", "read", content=WITHIN),
    Row("POST", "/api/cli/quickstart", "read", 400, content=WITHIN),
    Row("GET", "/api/cli/training-runs", "read", content=WITHIN),
    Row("POST", "/api/cli/training-runs", "submit", 400, content=WITHIN),
    Row("GET", "/api/cli/training-runs/{run}", "read", content=WITHIN),
    Row("GET", "/api/cli/training-runs/{run}/checkpoints", "read", content=WITHIN),
    Row("GET", "/api/cli/training-runs/{run}/metrics", "read", content=WITHIN),
    Row("GET", "/api/cli/training-runs/{run}/logs", "read", content=WITHIN),
    Row("POST", "/api/cli/training-runs/{run}/stop", "control", 409, content=WITHIN),
    Row("GET", "/api/cli/environment-secrets", "read", content=WITHIN),
    Row("POST", "/api/cli/environment-secrets", "control", 400, content=WITHIN),
    Row("DELETE", "/api/cli/environment-secrets", "control", 400, content=WITHIN),
    Row("GET", "/api/cli/rollouts", "read", content=WITHIN),
    Row("GET", "/api/cli/eval-runs", "read", content=WITHIN),
    Row("POST", "/api/cli/eval-runs", "submit", 400, content=WITHIN),
    Row("GET", "/api/cli/eval-runs/{evaluation}", "read", content=WITHIN),
    Row("GET", "/api/cli/eval-runs/{evaluation}/metrics", "read", content=WITHIN),
    Row("GET", "/api/cli/eval-runs/{evaluation}/logs", "read", content=WITHIN),
    Row("GET", "/api/cli/eval-runs/{evaluation}/samples/manifest", "read", content=WITHIN),
    Row(
        "POST", "/api/cli/eval-runs/{evaluation}/samples/download-urls", "read", 400, content=WITHIN
    ),
    Row("POST", "/api/cli/eval-runs/imports", "submit", 400, content=WITHIN),
    Row("POST", "/api/cli/eval-runs/imports/nothing/uploads", "submit", 400, content=WITHIN),
    Row(
        "POST", "/api/cli/eval-runs/imports/nothing/uploads/complete", "submit", 400, content=WITHIN
    ),
    Row("POST", "/api/cli/eval-runs/imports/nothing/finalize", "submit", 404, content=WITHIN),
    Row("POST", "/api/cli/eval-runs/{evaluation}/stop", "control", content=WITHIN),
    Row("POST", "/api/cli/eval-runs/{evaluation}/retry", "control", 409, content=WITHIN),
    Row("GET", "/api/cli/models/base", "read", content=WITHIN),
    Row("GET", "/api/cli/models/base/{run_name}", "read", 404, content=WITHIN),
    Row("GET", "/api/cli/models/lora", "read", content=WITHIN),
    Row("GET", "/api/cli/models/{run_name}-step-3", "read", content=WITHIN),
    Row("POST", "/api/cli/models/{run_name}-step-3/undeploy", "control", content=WITHIN),
    Row("POST", "/api/cli/models/{run_name}-step-9/deploy", "control", 404, content=WITHIN),
    Row("GET", "/api/cli/datasets", "read", content=WITHIN),
    Row("POST", "/api/cli/datasets", "submit", 400, content=WITHIN),
    Row("GET", "/api/cli/datasets/{dataset}", "read", content=WITHIN),
    Row("POST", "/api/cli/datasets/{dataset}/complete", "submit", 404, content=WITHIN),
    Row("POST", "/api/cli/datasets/{dataset}/abort", "submit", 404, content=WITHIN),
    Row("GET", "/api/cli/datasets/{dataset}/download", "read", content=WITHIN),
    Row("GET", "/api/cli/datasets/{dataset}/logs", "read", content=WITHIN),
]
PAGES = [
    Row("GET", "/static/nothing", "open", 404),
    Row("POST", "/reports", "open", 204),
    Row("GET", "/login", "open"),
    Row("GET", "/sign-in/oidc", "open", 404),
    Row("GET", "/sign-in/oidc/callback", "open", 404),
    Row("GET", "/sign-in/organisation", "read", 404),
    Row("POST", "/sign-in/organisation", "read", 404),
    Row("GET", "/join", "open", 401),
    Row("POST", "/join", "open", 403),
    Row("GET", "/device", "read"),
    Row("POST", "/device", "read"),
    Row("GET", "/members", "read", reach="organisation"),
    Row("POST", "/members", "admin", 403, reach="organisation"),
    Row("POST", "/members/{run_name}/role", "admin", 403, reach="organisation"),
    Row("POST", "/members/{run_name}/remove", "read", 403, reach="organisation"),
    Row("POST", "/invitations/{run_name}/revoke", "admin", 403, reach="organisation"),
    Row("POST", "/login", "open", 403),
    Row("GET", "/", "read"),
    Row("GET", "/cost", "read"),
    Row("GET", "/runs.json", "read"),
    Row("GET", "/runs.csv", "read"),
    Row("GET", "/runs/{run}", "read"),
    Row("GET", "/runs/{run}/curves.json", "read"),
    Row("GET", "/runs/{run}/curve.csv", "read"),
    Row("GET", "/runs/{run}/live", "read", 204),
    Row("GET", "/runs/{run}/samples", "read"),
    Row("GET", "/runs/{run}/samples.json", "read"),
    Row("GET", "/runs/{run}/search", "read"),
    Row("GET", "/runs/{run}/search.json?text=a", "read"),
    Row("GET", "/runs/{run}/forks", "read"),
    Row("GET", "/runs/{run}/regrades", "read"),
    Row("GET", "/runs/{run}/regrades/{regrade}", "read"),
    Row("GET", "/runs/{run}/regrades/{regrade}/report.json", "read"),
    Row("GET", "/runs/{run}/seeds", "read"),
    Row("GET", "/runs/{run}/seeds.json", "read"),
    Row("GET", "/runs/{run}/health", "read"),
    Row("GET", "/runs/{run}/health.json", "read"),
    Row("GET", "/runs/{run}/events.json", "read"),
    Row("GET", "/runs/{run}/at/{run}", "read", 400),
    Row("GET", "/runs/{run}/at/{run}/state.json", "read", 400),
    Row("GET", "/runs/{run}/timeline", "read"),
    Row("GET", "/runs/{run}/timeline.json", "read"),
    Row("GET", "/runs/{run}/samples/{run}-train-1-0-0.0/text", "read"),
    Row("GET", "/runs/{run}/samples/{run}-train-1-0-0.0/files/nothing", "read", 404),
    Row("GET", "/runs/{run}/events", "read"),
    Row("GET", "/runs/{run}/trace/{run}-train-1-0-0.0", "read"),
    Row("GET", "/runs/{run}/trace/{run}-train-1-0-0.0/hops.json", "read"),
    Row("GET", "/compare?runs={run},{run_name}", "read"),
    Row("GET", "/compare.json?runs={run},{run_name}", "read"),
    Row("GET", "/evals", "read"),
    Row("GET", "/evals.json", "read"),
    Row("GET", "/evals/{evaluation}", "read"),
    Row("GET", "/evals/{evaluation}/rows.json", "read"),
    Row("GET", "/evals/{evaluation}/samples", "read"),
    Row("GET", "/evals/{evaluation}/samples.json", "read"),
    Row("GET", "/evals/{evaluation}/samples/{evaluation}-evaluate-0-0-0.0/text", "read", 404),
    Row(
        "GET",
        "/evals/{evaluation}/samples/{evaluation}-evaluate-0-0-0.0/files/nothing",
        "read",
        404,
    ),
    Row("GET", "/datasets", "read"),
    Row("GET", "/datasets.json", "read"),
    Row("GET", "/datasets/{dataset}", "read"),
    Row("GET", "/runs/{run}/run.json", "read"),
    Row("GET", "/runs/{run}/log.json", "read"),
    Row("GET", "/datasets/{dataset}/statistics.json", "read"),
    Row("GET", "/workspaces", "read"),
    Row("GET", "/workspaces.json", "read"),
    Row("GET", "/workspaces/{workspace}/deliveries.json", "read"),
    Row("GET", "/workspaces/{workspace}", "read"),
    Row("POST", "/workspaces/{workspace}/sync", "control", 303),
    Row("GET", "/deployments", "read"),
    Row("GET", "/deployments.json", "read"),
    Row("GET", "/deployments/{run_name}", "read", 404),
    Row("GET", "/deployments/{run_name}/usage.json", "read", 404),
    Row("POST", "/deployments", "control", 404),
    Row("POST", "/deployments/{run_name}/undeploy", "control", 404),
    Row("GET", "/playground", "inference"),
    Row("POST", "/playground", "inference", 400),
    Row("POST", "/playground/stream", "inference", 400),
    Row("GET", "/compare/checkpoints?a={run}@3&b={run}@3", "read"),
    Row("GET", "/compare/checkpoints.json?a={run}@3&b={run}@3", "read"),
    Row("GET", "/compare/checkpoints.csv?a={run}@3&b={run}@3", "read"),
    Row("GET", "/compare/evaluations?a={evaluation}&b={evaluation}", "read"),
    Row("GET", "/compare/evaluations.json?a={evaluation}&b={evaluation}", "read"),
    Row("GET", "/compare/evaluations.csv?a={evaluation}&b={evaluation}", "read"),
    Row("GET", "/new?from={run}@3", "submit"),
    Row("POST", "/new", "submit", 400),
    Row("GET", "/new-evaluation?checkpoint={run}@3", "submit"),
    Row("POST", "/new-evaluation", "submit", 400),
    Row("GET", "/platform", "read", reach="installation"),
    Row("GET", "/platform.json", "read", reach="installation"),
    Row("POST", "/platform/dead-letters/{run}/redrive", "admin", reach="installation"),
    Row("GET", "/shared", "open", 404),
    Row("GET", "/runs/{run}/shares", "control"),
    Row("POST", "/runs/{run}/shares", "control", 400),
    Row("POST", "/runs/{run}/shares/{run_name}/revoke", "control", 404),
    Row("POST", "/runs/{run}/notes", "control", 303),
    Row("POST", "/runs/{run}/stop", "control", 409),
    Row("POST", "/runs/{run}/pause", "control", 409),
    Row("POST", "/runs/{run}/resume", "control", 409),
    Row("POST", "/runs/{run}/approve", "control", 409),
    Row("POST", "/logout", "read", 303),
    Row("GET", "/workspaces/{workspace}/alerts", "control"),
    Row("GET", "/workspaces/{workspace}/alerts.json", "control"),
    Row("POST", "/workspaces/{workspace}/alerts", "control", 400),
    Row("POST", "/workspaces/{workspace}/alerts/{run_name}/rotate", "control", 404),
    Row("POST", "/workspaces/{workspace}/alerts/{run_name}/remove", "control", 404),
    Row("GET", "/api-keys", "admin"),
    Row("GET", "/tokens", "admin", 308),
    Row("GET", "/api-keys.json", "admin"),
    Row("POST", "/api-keys", "admin", 400),
    Row("POST", "/api-keys/{run_name}/rotate", "admin", 404),
    Row("POST", "/api-keys/{run_name}/revoke", "admin", 404),
    Row("GET", "/sessions", "read"),
    Row("GET", "/sessions.json", "read"),
    Row("POST", "/sessions/end", "read", 303),
    Row("GET", "/nothing", "read", 404),
]
TABLE = [*PAGES, *OSMOSIS, *TABLE]
"""Requests that would end or delete something come after the ones that read it."""


@pytest.fixture
async def shared(database_url: str, tmp_path: Path) -> AsyncIterator[Application]:
    repositories = ("/ours", "/theirs")
    async with application(database_url, tmp_path / "home", repositories=repositories) as app:
        yield app


@pytest.fixture
async def ours(shared: Application) -> Tenant:
    return await tenant(shared, "ours", "/ours")


@pytest.fixture
async def theirs(shared: Application) -> Tenant:
    return await tenant(shared, "theirs", "/theirs")


async def send(
    app: Application, row: Row, path: str, api_key: str, **content: Any
) -> httpx.Response:
    """The response to the request of a row with an API key. Forms send the cookie of a session that
    the key opened, and its key."""
    identity = api_key_id(api_key)
    if not row.is_form or identity is None:
        return await ask(app, row.method, path, api_key, **content)
    bearer = Bearer(identity, digest(api_key))
    cookie = await app.services.sessions.open(bearer)
    transport = httpx.ASGITransport(app.app, raise_app_exceptions=False)
    here = str(app.api.base_url)
    async with httpx.AsyncClient(transport=transport, base_url=here) as browser:
        headers = {"Cookie": f"{COOKIE}={cookie}", "Origin": here}
        return await browser.post(path, data={"form_key": form_key(bearer)}, headers=headers)


async def test_the_table_has_every_route(app: Application) -> None:
    known = set()
    for top in app.app.routes:
        prefix = top.path if isinstance(top, Mount) else ""
        for route in scoped_routes([top]):
            for method in (route.methods or set()) - {"HEAD"}:
                known.add((method, _shape(prefix + route.path), route.scope, route.reach))
    table = {(row.method, _shape(row.path), row.scope, row.reach) for row in TABLE}
    assert known - table == set(), "add a row to the table of this test"
    assert table - known == set(), "these routes are gone or changed"


async def test_a_route_without_a_scope_does_not_start() -> None:
    async def nothing(_: object) -> Response:
        return Response()

    with pytest.raises(TypeError, match="names no scope"):
        scoped_table([Route("/open", nothing)])


async def test_an_api_key_needs_the_scope_of_the_route(shared: Application) -> None:
    """The requests are about nothing that exists, so that a request with enough rights changes
    nothing."""
    nothing = dict.fromkeys(("run", "run_name", "dataset", "evaluation"), "none")
    nothing |= dict.fromkeys(("workspace", "verification", "regrade", "organisation"), "none")
    for scope in SCOPES:
        api_key = await create_api_key(shared, scope, scope)
        for row in TABLE:
            if row.scope == "open":
                continue
            allowed = row.scope == "any" or row.scope in CONTAINED[scope]
            content = {} if row.reach != "workspace" else row.content
            answer = await send(shared, row, row.path.format(**nothing), api_key, **content)
            assert (answer.status_code == 403) is not allowed, (scope, row, answer.text)
            assert answer.status_code != 401, (scope, row)
            assert allowed or "ask an owner" in answer.text, (scope, row, answer.text)


@pytest.mark.parametrize("role", ROLES)
async def test_a_person_opens_what_the_role_allows_within_the_organisation(
    shared: Application, role: Role
) -> None:
    """With a key of all scopes, on every route, page and form. Nobody reaches the installation."""
    nothing = dict.fromkeys(("run", "run_name", "dataset", "evaluation"), "none")
    nothing |= dict.fromkeys(("workspace", "verification", "regrade", "organisation"), "none")
    person = await member(shared, role, role, scopes=frozenset({"admin"}))
    for row in TABLE:
        if row.scope == "open":
            continue
        has_scope = row.scope in ("any", *ROLE_SCOPES[role])
        allowed = has_scope and row.reach != "installation"
        content = {} if row.reach != "workspace" else row.content
        answer = await send(shared, row, row.path.format(**nothing), person.api_key, **content)
        assert (answer.status_code == 403) is not allowed, (row, answer.text)
        assert answer.status_code != 401, row


async def test_an_api_key_that_is_not_valid_opens_nothing(shared: Application) -> None:
    revoked = await create_api_key(shared, "revoked", "admin")
    expired = await create_api_key(shared, "expired", "admin", expires_s=3600)
    await shared.database.durable.execute(
        "update api_keys set expires_at = $1 where name = 'expired'",
        datetime.now(UTC) - timedelta(seconds=1),
    )
    answer = await shared.api.delete("/api/v1/api-keys/revoked")
    assert answer.status_code == 200
    mistyped = revoked[:-1] + ("0" if revoked[-1] != "0" else "1")
    for row in TABLE:
        for api_key in (revoked, expired, mistyped, "no", ""):
            if row.scope != "open":
                answer = await send(shared, row, row.path, api_key, **row.content)
                assert answer.status_code == 401, (row, api_key)
                assert answer.headers["connection"] == "close"


async def test_a_workspaces_api_key_works_in_its_own_workspace(
    shared: Application, ours: Tenant
) -> None:
    for row in TABLE:
        answer = await send(shared, row, ours.fill(row.path), ours.api_key, **row.content)
        wanted = row.own if row.reach == "workspace" else 403
        assert answer.status_code == wanted, (row, answer.text)
        assert answer.headers["x-content-type-options"] == "nosniff", row


async def test_another_workspaces_things_are_absent(
    shared: Application, ours: Tenant, theirs: Tenant
) -> None:
    for row in TABLE:
        if row.scope == "open" or not row.is_about_a_thing or row.reach != "workspace":
            continue
        answer = await send(shared, row, theirs.fill(row.path), ours.api_key, **row.content)
        absent = (
            theirs.fill(row.path).replace("theirs", "absent").replace(theirs.workspace, "absent")
        )
        for one in (theirs.dataset, theirs.verification, theirs.regrade):
            absent = absent.replace(one, "absent")
        other = await send(shared, row, absent, ours.api_key, **row.content)
        assert answer.status_code == 404, (row, answer.text)
        assert (
            answer.text.replace("theirs", "absent")
            .replace(theirs.workspace, "absent")
            .replace(theirs.dataset, "absent")
            .replace(theirs.verification, "absent")
            .replace(theirs.regrade, "absent")
            == other.text
        )


async def test_lists_leave_out_other_workspaces(
    shared: Application, ours: Tenant, theirs: Tenant
) -> None:
    await shared.upload("common", rows(4))
    for path in ("runs", "datasets", "workspaces", "evals", "api-keys", "audit"):
        answer = await ask(shared, "GET", f"/api/v1/{path}?limit=1000", ours.api_key)
        assert answer.status_code == 200, answer.text
        assert "theirs" not in answer.text
        assert answer.json()["total_count"] == len(answer.json()[path.replace("-", "_")])
        everything = await shared.api.get(f"/api/v1/{path}?limit=1000")
        assert "theirs" in everything.text
    datasets = await ask(shared, "GET", "/api/v1/datasets", ours.api_key)
    assert {row["name"] for row in datasets.json()["datasets"]} == {"common", "ours-data"}


async def test_a_shared_dataset_is_read_by_all_and_deleted_by_none_of_them(
    shared: Application, ours: Tenant
) -> None:
    await shared.upload("common", rows(4))
    answer = await ask(shared, "GET", "/api/v1/datasets/common/content", ours.api_key)
    assert answer.status_code == 200
    answer = await ask(shared, "DELETE", "/api/v1/datasets/common", ours.api_key)
    assert answer.status_code == 409
    assert "shared" in answer.text


def _shape(path: str) -> str:
    """A path without the names of its parameters."""
    parts = path.partition("?")[0].split("/")
    return "/".join(
        "*" if "{" in part or part in ("nothing", "API_KEY", "main") else part for part in parts
    )
