"""The sandbox owner of a run's user code, with the values of the secrets that the run requires.

Values are looked up whenever user code is called, so a new value is used by the next call. They go to
the sandbox and nowhere else: the events hold names.
"""

from infra.ports.secrets import SecretStore
from infra.ports.services import SandboxOwner
from schemas.errors import FailureCategory, UserCodeError
from schemas.ids import run_of_owner
from schemas.secrets.rules import how_to_set
from schemas.specs import GroupSpec, RolloutRef


async def sandbox_owner(
    spec: GroupSpec, rollout: RolloutRef, secrets: SecretStore, *, owner: str | None = None
) -> SandboxOwner:
    """Return the owner of the sandbox that a group's user code runs in. With `owner` (the id of a
    regrade) it is that, which does not get what was given for the group's run alone: another person may
    have chosen its code. Raises UserCodeError, which names the secrets that are not set."""
    owner = owner or spec.owner
    if not rollout.secrets:
        return SandboxOwner(run=owner)
    submitter = None if rollout.pushed else rollout.submitter
    values = await secrets.resolve(
        rollout.secrets,
        workspace=rollout.workspace,
        submitter=submitter,
        run=run_of_owner(owner),
    )
    if missing := [name for name in rollout.secrets if name not in values]:
        raise UserCodeError(
            FailureCategory.VALIDATION, how_to_set(missing, pushed=submitter is None)
        )
    return SandboxOwner(run=owner, secrets=values)
