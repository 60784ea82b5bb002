"""Submissions of runs and of evaluations: the sections of a TOML as the client sends them, and the
secrets that a run requires."""

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import ClassVar

from pydantic import Field
from starlette.requests import Request

from infra.ports.secrets import SecretOwner
from producers.core.workspaces import Workspace
from producers.dialects.osmosis.errors import ClientRefused
from producers.dialects.osmosis.requests import Wire, services
from producers.http.auth import actor_of
from schemas.errors import InvalidConfig
from schemas.secrets.secret_value import SecretValue

OF_SECRETS = ("secrets.required", "advanced.api_key_secret")
"""The keys of the issues about secrets that are not set: those of user code, and a provider's key."""

COMMON = {"experiment_config": "experiment", "advanced_config": "advanced", "env_config": "env"}
"""The sections that every TOML has, by their names on the wire."""


class SecretsWire(Wire):
    """The names of secrets that user code needs, and the values of those that the sender gives for this
    run alone."""

    required: tuple[str, ...] = ()
    provided: dict[str, str] = Field(default={}, repr=False)

    def values(self) -> Mapping[str, SecretValue]:
        """The values that are given, which nothing prints."""
        return {name: SecretValue(value) for name, value in self.provided.items()}


class SubmitWire(Wire):
    """The sections of a TOML that runs and evaluations have. They are checked as those of a TOML are, so
    here they may hold anything."""

    experiment_config: object = None
    advanced_config: object = None
    env_config: object = None
    secrets: SecretsWire = SecretsWire()
    kind: ClassVar[str]
    """The word for it in refusals."""

    def document(self, sections: Mapping[str, str]) -> Mapping[str, object]:
        """The document that the TOML makes. `sections` names the further sections, from their names on
        the wire. A section that the client left out is absent."""
        names = {**COMMON, **sections}
        found = {
            name: getattr(self, wire)
            for wire, name in names.items()
            if getattr(self, wire) is not None
        }
        if self.secrets.required:
            found["secrets"] = {"required": list(self.secrets.required)}
        return found


class SubmittedWire(Wire):
    """The answer to a submission."""

    id: str
    name: str
    status: str
    created_at: datetime
    platform_url: str | None


async def refused_submission(
    request: Request, error: InvalidConfig, body: SubmitWire, workspace: Workspace
) -> InvalidConfig | ClientRefused:
    """The refusal of a submission as the client expects it: with all issues, or, when nothing else is
    wrong than that secrets are not set, with their names in a form that the client turns into a
    hint."""
    if not error.issues:
        return error
    refused = ClientRefused(400, "VALIDATION", f"Invalid {body.kind} config", issues=error.issues)
    if any(issue.key not in OF_SECRETS for issue in error.issues):
        return refused
    core = services(request)
    wanted = [name for name in body.secrets.required if name not in body.secrets.provided]
    missing = await core.secret_store.missing(
        wanted, workspace=workspace.id, submitter=actor_of(request).person
    )
    if not missing:
        return refused
    return ClientRefused(
        404,
        "SECRETS_NOT_FOUND",
        f"Secret(s) not found: {', '.join(missing)}",
        fields={"platform_url": core.settings.public_url},
    )


async def secret_scopes(
    request: Request, names: Sequence[str], workspace: Workspace, *, submitter: str | None
) -> dict[str, str]:
    """The owner of each secret that a run uses today, in the words of the client. A secret that nobody
    has is absent."""
    if not names:
        return {}
    owners = [SecretOwner("workspace", workspace.id)]
    owners += [SecretOwner("personal", submitter)] if submitter is not None else []
    stored = await services(request).secret_store.all_secrets(owners)
    of_workspace = {one.name for one in stored if one.owner.scope == "workspace"}
    of_person = {one.name for one in stored if one.owner.scope == "personal"}
    found = {}
    for name in names:
        if name in of_person:
            found[name] = "user_override" if name in of_workspace else "user"
        elif name in of_workspace:
            found[name] = "workspace"
    return found
