"""The queries of the API about deployments. For an API key that is bound to a workspace
or an organisation, the deployments of others do not exist."""

from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal, TypedDict, cast

from infra.ports.actor import visible_workspaces
from infra.spine.postgres.pool import Database
from infra.spine.postgres.queries import queries
from schemas.deployments import ServedModel

SQL = queries("infra/readmodel/deployments.sql")

DeploymentStatus = Literal["active", "inactive", "loading", "failed"]


@dataclass(frozen=True, slots=True)
class DeploymentUsage:
    """The use of a deployment, in all."""

    requests: int
    prompt_tokens: int
    completion_tokens: int


@dataclass(frozen=True, slots=True)
class Deployment:
    """A name, the checkpoint that it serves or served last, the ref that is being loaded (`pending`) and
    why the last request failed (`error`), if it did."""

    name: str
    workspace: str | None
    is_active: bool
    number: int | None
    served: ServedModel | None
    pending: str
    error: str
    requested_by: str | None
    created_at: datetime
    updated_at: datetime | None
    deployed_at: datetime | None
    usage: DeploymentUsage

    @property
    def status(self) -> DeploymentStatus:
        """The status that clients get: `loading` and `failed` only while nothing is served."""
        if self.is_active:
            return "active"
        if self.pending:
            return "loading"
        return "failed" if self.error else "inactive"


class ApiKeyUsageJson(TypedDict):
    """The use of a model by one API key. `api_key_name` and `owner` are None for the root key, of
    the installation itself."""

    api_key: str
    api_key_name: str | None
    owner: str | None
    requests: int
    prompt_tokens: int
    completion_tokens: int
    last_at: datetime


class Deployments:
    """Queries over deployments and what was used of them."""

    def __init__(self, database: Database) -> None:
        self._pool = database.durable

    async def all_deployments(self) -> list[Deployment]:
        """All deployments, the active ones first, then the newest."""
        rows = await self._pool.fetch(SQL["deployments"], visible_workspaces())
        return [_deployment(row) for row in rows]

    async def get_deployment(self, name: str) -> Deployment | None:
        """The deployment with this name; None when there never was one."""
        row = await self._pool.fetchrow(SQL["deployment"], visible_workspaces(), name)
        return _deployment(row) if row else None

    async def is_of_other(self, name: str, workspace: str | None) -> bool:
        """Whether a deployment of another workspace has or had this name."""
        return bool(await self._pool.fetchval(SQL["is_deployment_of_other"], name, workspace))

    async def active(self) -> list[ServedModel]:
        """The models that are served now, in all workspaces, in the order of deployment."""
        rows = await self._pool.fetch(SQL["active_deployments"])
        return [ServedModel.model_validate_json(row["served"]) for row in rows]

    async def usage(self, model: str) -> list[ApiKeyUsageJson]:
        """The use of a model by each API key, the largest use first; at most 100 keys."""
        rows = await self._pool.fetch(SQL["usage_of_model"], model)
        return [cast(ApiKeyUsageJson, dict(row)) for row in rows]


def _deployment(row: Any) -> Deployment:
    return Deployment(
        name=row["deployment"],
        workspace=row["workspace"],
        is_active=row["status"] == "active",
        number=row["number"],
        served=ServedModel.model_validate_json(row["served"]) if row["served"] else None,
        pending=row["pending"],
        error=row["error"],
        requested_by=row["requested_by"],
        created_at=row["created_at"],
        updated_at=row["updated_at"],
        deployed_at=row["deployed_at"],
        usage=DeploymentUsage(row["requests"], row["prompt_tokens"], row["completion_tokens"]),
    )
