"""The queries of the API about deployments. For an API key that is bound to a workspace
or an organisation, the deployments of others do not exist."""

from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal, TypedDict, cast

from infra.ports.actor import visible_workspaces
from infra.spine.ports.visible_workspaces import all_rows
from infra.spine.postgres.pool import Database
from infra.spine.postgres.queries import queries
from schemas.deployments import NO_WORKSPACE, ActiveModel, ServedModel

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
    """A name within a workspace, the checkpoint that it serves or served last, the ref that is being
    loaded (`pending`) and why the last request failed (`error`), if it did."""

    name: str
    workspace: str | None
    workspace_name: str | None
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
    def ref(self) -> str:
        """A name that means this deployment whatever others have its name."""
        return f"{self.workspace or NO_WORKSPACE}/{self.name}"

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

    async def find_named(self, name: str) -> list[Deployment]:
        """The deployments that have or had this name, one for each workspace."""
        rows = await self._pool.fetch(SQL["deployments_of_name"], visible_workspaces(), name)
        return [_deployment(row) for row in rows]

    async def active(self) -> list[ServedModel]:
        """The models that are served now, in all workspaces, in the order of deployment. They share the
        places of the installation, so a request for another one needs all of them: callers name
        none that their sender may not see."""
        with all_rows():
            rows = await self._pool.fetch(SQL["active_deployments"])
        return [ServedModel.model_validate_json(row["served"]) for row in rows]

    async def active_with_workspaces(self) -> list[ActiveModel]:
        """Like `active`, with the names of their workspaces."""
        with all_rows():
            rows = await self._pool.fetch(SQL["active_with_workspaces"])
        return [
            ActiveModel(ServedModel.model_validate_json(row["served"]), row["workspace_name"])
            for row in rows
        ]

    async def usage(self, served: ServedModel) -> list[ApiKeyUsageJson]:
        """The use of a deployed model by each API key, the largest use first; at most 100 keys."""
        rows = await self._pool.fetch(SQL["usage_of_model"], served.full_name)
        return [cast(ApiKeyUsageJson, dict(row)) for row in rows]


def _deployment(row: Any) -> Deployment:
    return Deployment(
        name=row["deployment"],
        workspace=row["workspace"],
        workspace_name=row["workspace_name"],
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
