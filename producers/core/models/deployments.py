"""Deploys and undeploys: checks a request against what is deployed, and appends it to the log.

The owner of the deployments' stream decides. The checks here answer a mistake at once.
"""

from collections.abc import Sequence
from uuid import UUID

from infra.ports.actor import may_see
from infra.readmodel.deployments import Deployment, Deployments
from infra.spine.ports.event_log import Cursor, EventStore
from producers.core.lookup import Checkpoint, Lookup
from schemas.deployments import (
    CHECKPOINT_NAME,
    NAME_RULE,
    ServedModel,
    checkpoint_name,
    is_deployment_name,
    other_base,
    ref_of_name,
)
from schemas.errors import Conflict, InvalidConfig, Issue, NotFound
from schemas.events import EvaluationSettled, ModelDeployRequested, ModelUndeployRequested
from schemas.models.served import served_model

PAGE = 1000


class DeploymentRequests:
    """Requests deployments and ends them."""

    def __init__(
        self, log: EventStore, lookup: Lookup, deployments: Deployments, *, most: int
    ) -> None:
        """`most` is how many may be active."""
        self._log = log
        self._lookup = lookup
        self._deployments = deployments
        self._most = most

    async def deploy(self, ref: str, *, name: str | None, cause: UUID) -> tuple[str, Cursor]:
        """Request that a checkpoint is served under a name; without one, under that of its run, or that
        of the checkpoint when `ref` is RUN-step-N. Returns the name and the cursor of the request.
        Raises NotFound, InvalidConfig and Conflict."""
        checkpoint = await self._lookup.checkpoint(ref)
        chosen = name or await self._own_name(ref, checkpoint)
        if not is_deployment_name(chosen):
            message = f"{chosen!r} is not a name for a deployment; use {NAME_RULE}"
            raise InvalidConfig(message, issues=(Issue("name", message),))
        served = served_model(
            checkpoint.run,
            checkpoint.spec,
            name=chosen,
            reward=await self._held_out_reward(checkpoint),
        )
        await self._check(served)
        asked = ModelDeployRequested(deployment=chosen, request=cause.hex, served=served)
        recorded = await self._log.append([asked], cause=cause)
        return chosen, recorded[-1].cursor

    async def undeploy(self, name: str, *, cause: UUID) -> tuple[str, Cursor]:
        """End a deployment, by its name or that of its checkpoint. Returns its name and the cursor of
        the request. Undeploying again changes nothing. Raises NotFound."""
        found = await find_deployment(self._deployments, name)
        asked = ModelUndeployRequested(deployment=found.name, request=cause.hex)
        recorded = await self._log.append([asked], cause=cause)
        return found.name, recorded[-1].cursor

    async def _own_name(self, ref: str, checkpoint: Checkpoint) -> str:
        """The name of a deployment that nobody chose. A checkpoint that was named as a model keeps the
        deployment that it has. Where its name cannot be used, it is deployed under the id of its run:
        clients find it by the name of the checkpoint, too."""
        run, step = checkpoint.run, checkpoint.spec.step
        if CHECKPOINT_NAME.fullmatch(ref) is None:
            return run.run_name
        wanted = checkpoint_name(run.run_name, step)
        active = await self._deployments.active()
        kept = [other.name for other in active if (other.run, other.step) == (run.run, step)]
        if kept:
            return kept[0]
        if is_deployment_name(wanted) and not await self._deployments.is_of_other(
            wanted, run.owner_workspace
        ):
            return wanted
        return checkpoint_name(run.run, step)

    async def _check(self, served: ServedModel) -> None:
        """Raise Conflict when a checkpoint cannot be deployed next to what is deployed."""
        if not self._most:
            raise Conflict(
                "HEADRACE_MAX_DEPLOYMENTS is 0, so nothing is deployed; set it to at least 1"
            )
        active = await self._deployments.active()
        own = next((other for other in active if other.name == served.name), None)
        if own is not None and own.workspace != served.workspace:
            who = own.ref if may_see(own.workspace) else "another workspace"
            raise Conflict(
                f"the name {served.name} is in use by {who}; choose another name with --name"
            )
        for other in active:
            if other.base_key != served.base_key:
                is_visible = may_see(other.workspace)
                raise Conflict(other_base(served, other, is_visible=is_visible))
        if own is None and len(active) >= self._most:
            names = ", ".join(other.name for other in active if may_see(other.workspace))
            raise Conflict(
                f"{len(active)} checkpoints are deployed ({names or 'of other workspaces'}), and "
                f"HEADRACE_MAX_DEPLOYMENTS allows {self._most}; undeploy one first"
            )

    async def _held_out_reward(self, checkpoint: Checkpoint) -> float | None:
        """The held-out reward of a checkpoint's step, if it was measured and is still in the log."""
        found, after = None, Cursor()
        types = [EvaluationSettled.type]
        while page := await self._log.read(
            checkpoint.run.run, after=after, limit=PAGE, types=types
        ):
            for recorded in page:
                event = recorded.event
                if isinstance(event, EvaluationSettled) and event.step == checkpoint.spec.step:
                    found = event.reward
            after = page[-1].cursor
        return found


async def find_deployment(deployments: Deployments, name: str) -> Deployment:
    """The deployment with this name, or of the checkpoint with this name (RUN-step-N). Raises
    NotFound."""
    found = await deployments.get_deployment(name)
    if found is None and CHECKPOINT_NAME.fullmatch(name):
        found = deployment_of(await deployments.all_deployments(), ref_of_name(name))
    if found is None:
        raise unknown_deployment(name)
    return found


def deployment_of(deployments: Sequence[Deployment], ref: str) -> Deployment | None:
    """The first of these deployments that serves the checkpoint RUN@N, is loading it or served it
    last."""
    served = (one for one in deployments if one.served is not None and one.served.ref == ref)
    loading = (one for one in deployments if one.pending == ref)
    return next(loading, None) or next(served, None)


def unknown_deployment(name: str) -> NotFound:
    """The error for a name that was never deployed."""
    return NotFound(f"there is no deployment {name[:80]!r}; `headrace model list` shows all")
