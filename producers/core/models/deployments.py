"""Deploys and undeploys: checks a request against what is deployed, and appends it to the log.

The owner of the deployments' stream decides. The checks here answer a mistake at once.
"""

from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from uuid import UUID

from infra.identity.quotas import Quotas
from infra.ports.actor import may_see
from infra.readmodel.deployments import Deployment, Deployments
from infra.spine.ports.event_log import Cursor, EventStore
from producers.core.lookup import Checkpoint, Lookup
from schemas.deployments import (
    CHECKPOINT_NAME,
    NAME_RULE,
    NO_WORKSPACE,
    ServedModel,
    checkpoint_name,
    in_place,
    is_deployment_name,
    other_base,
    ref_of_name,
)
from schemas.errors import Conflict, InvalidConfig, Issue, NotFound, Refused
from schemas.events import EvaluationSettled, ModelDeployRequested, ModelUndeployRequested
from schemas.models.served import served_model

PAGE = 1000


class DeploymentRequests:
    """Requests deployments and ends them."""

    def __init__(
        self,
        log: EventStore,
        lookup: Lookup,
        deployments: Deployments,
        *,
        most: int,
        quotas: Quotas | None = None,
    ) -> None:
        """`most` is how many may be active."""
        self._quotas = quotas
        self._log = log
        self._lookup = lookup
        self._deployments = deployments
        self._most = most

    async def deploy(self, ref: str, *, name: str | None, cause: UUID) -> tuple[str, Cursor]:
        """Request that a checkpoint is served under a name of its workspace; without one, under that of
        its run, or that of the checkpoint when `ref` is RUN-step-N. Returns the deployment's
        WORKSPACE/NAME and the cursor of the request. Raises NotFound, InvalidConfig, Conflict and
        QuotaExceeded."""
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
        asked = ModelDeployRequested(
            deployment=chosen, scope=served.workspace or "", request=cause.hex, served=served
        )
        async with self._count(served):
            recorded = await self._log.append([asked], cause=cause)
        return f"{served.workspace or NO_WORKSPACE}/{chosen}", recorded[-1].cursor

    @asynccontextmanager
    async def _count(self, served: ServedModel) -> AsyncIterator[None]:
        """Count a deployment that is requested inside the block. Raises QuotaExceeded."""
        if self._quotas is None:
            yield
            return
        await self._quotas.admit_deployment(served.name, workspace=served.workspace)
        try:
            yield
        except Refused:
            await self._quotas.withdraw_deployment(served.name, workspace=served.workspace)
            raise

    async def undeploy(self, name: str, *, cause: UUID) -> tuple[str, Cursor]:
        """End a deployment, by its name or that of its checkpoint. Returns its WORKSPACE/NAME and the
        cursor of the request. Undeploying again changes nothing. Raises NotFound, and Conflict when
        the sender sees several of this name."""
        found = await find_deployment(self._deployments, name)
        asked = ModelUndeployRequested(
            deployment=found.name, scope=found.workspace or "", request=cause.hex
        )
        recorded = await self._log.append([asked], cause=cause)
        return found.ref, recorded[-1].cursor

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
        return wanted if is_deployment_name(wanted) else checkpoint_name(run.run, step)

    async def _check(self, served: ServedModel) -> None:
        """Raise Conflict when a checkpoint cannot be deployed next to what is deployed."""
        if not self._most:
            raise Conflict(
                "HEADRACE_MAX_DEPLOYMENTS is 0, so nothing is deployed; set it to at least 1"
            )
        active = await self._deployments.active()
        own = next((other for other in active if other.key == served.key), None)
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
    """The deployment NAME or WORKSPACE/NAME (the name or the id of a workspace), or of the checkpoint
    with this name (RUN-step-N). Raises NotFound, and Conflict when the sender sees several."""
    place, slash, last = name.rpartition("/")
    found = await deployments.find_named(last)
    if slash:
        found = [one for one in found if in_place(place, one.workspace, one.workspace_name)]
    elif not found and CHECKPOINT_NAME.fullmatch(name):
        ref, known = ref_of_name(name), await deployments.all_deployments()
        places = dict.fromkeys(one.workspace for one in known)
        each = (deployment_of([d for d in known if d.workspace == one], ref) for one in places)
        found = [one for one in each if one is not None]
    if not found:
        raise unknown_deployment(name)
    if len(found) > 1:
        raise Conflict(
            f"{len(found)} deployments have the name {name}: {', '.join(_refs(found))}; give one of "
            "these, or use an API key of its workspace"
        )
    return found[0]


def _refs(deployments: Sequence[Deployment]) -> list[str]:
    """A name for each of these deployments: WORKSPACE/NAME, with the id of the workspace where two of
    these workspaces have one name."""
    names = Counter(one.workspace_name for one in deployments)
    return [
        f"{one.workspace_name}/{one.name}"
        if one.workspace_name and names[one.workspace_name] == 1
        else one.ref
        for one in deployments
    ]


def deployment_of(deployments: Sequence[Deployment], ref: str) -> Deployment | None:
    """The first of these deployments that serves the checkpoint RUN@N, is loading it or served it
    last."""
    served = (one for one in deployments if one.served is not None and one.served.ref == ref)
    loading = (one for one in deployments if one.pending == ref)
    return next(loading, None) or next(served, None)


def unknown_deployment(name: str) -> NotFound:
    """The error for a name that was never deployed."""
    return NotFound(f"there is no deployment {name[:80]!r}; `headrace model list` shows all")
