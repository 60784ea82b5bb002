"""Deploys checkpoints: decides which version each name serves, and loads it.
Reads: ModelDeployRequested, ModelUndeployRequested, RunFinished.  Emits: ModelDeployRequested,
ModelDeployed, ModelDeployFailed, ModelDeploySkipped, ModelUndeployed.  Stream: model.
Does: loads checkpoints into the engine that serves, chooses the best of a run (lane: serve).
Waits for: nothing.
Safe to repeat because: a request has an id, and a deployment remembers the last one that was answered.

A name is unique in its workspace, and deployments of equal names of two workspaces have nothing to do
with each other. A newer request for a deployment replaces one that is still being loaded, unless that
one, when a run asks for its best checkpoint, has a better reward. While a version is loaded the one
before is served, so a failure changes nothing. All deployments have one base model, which is loaded
once.

Events of earlier releases do not say whose name they mean. A name was unique in the installation then,
so they mean its holder of that time.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import assert_never

from consumers.deploy.loading import DeployPorts, choose_checkpoint, load_model
from infra.spine.runtime.consumer import NOTHING, Consumer, Decision, Meta
from infra.spine.runtime.error_excerpt import excerpt
from schemas.deployments import ServedModel, deployment_key, other_base
from schemas.effects import CheckpointChosen, ChooseCheckpoint, Failed, LoadModel, ModelLoaded
from schemas.events import (
    ModelDeployed,
    ModelDeployFailed,
    ModelDeployRequested,
    ModelDeploySkipped,
    ModelUndeployed,
    ModelUndeployRequested,
    RunFinished,
)
from schemas.ids import ConsumerName, StreamName, model_stream

ModelEvent = (
    ModelDeployRequested
    | ModelDeployed
    | ModelDeployFailed
    | ModelDeploySkipped
    | ModelUndeployRequested
    | ModelUndeployed
)
ModelMessage = (
    ModelDeployRequested
    | ModelUndeployRequested
    | RunFinished
    | ModelLoaded
    | CheckpointChosen
    | Failed
)
DeployEffect = LoadModel | ChooseCheckpoint


@dataclass(frozen=True, slots=True)
class DeploymentsState:
    """By the key of the deployment, `active` are the served versions, and `pending` the requests that
    are being loaded. `answered` is the id of the last request of each deployment that was answered, and
    `answered_by_name` that of each name whose workspace the answer does not say. `count` is how many
    versions were deployed."""

    active: Mapping[str, ServedModel] = field(default_factory=dict)
    pending: Mapping[str, ModelDeployRequested] = field(default_factory=dict)
    answered: Mapping[str, str] = field(default_factory=dict)
    answered_by_name: Mapping[str, str] = field(default_factory=dict)
    count: int = 0

    def keys_of(self, event: ModelUndeployRequested | ModelUndeployed) -> set[str]:
        """The deployments that an event means, of those that are served or being loaded."""
        held = {**self.pending, **self.active}
        if event.scope is None:
            return {key for key in held if key.rpartition("/")[2] == event.deployment}
        return {deployment_key(event.deployment, event.scope)} & set(held)

    def has_answered(self, request: str, name: str, workspace: str | None) -> bool:
        """Whether a request for a deployment was answered."""
        last = self.answered.get(deployment_key(name, workspace))
        return request in (last, self.answered_by_name.get(name))


def evolve(state: DeploymentsState, event: ModelEvent) -> DeploymentsState:
    """Return the state after one event of the deployments."""
    name, request, scope = event.deployment, event.request, event.scope
    match event:
        case ModelDeployRequested(served=served):
            return replace(state, pending={**state.pending, served.key: event})
        case ModelDeployed(served=served):
            active = {**state.active, served.key: served}
            state = replace(state, active=active, count=event.number)
            scope = served.workspace or ""
        case ModelUndeployed():
            ended = state.keys_of(event)
            left = {key: served for key, served in state.active.items() if key not in ended}
            pending = {key: asked for key, asked in state.pending.items() if key not in ended}
            state = replace(state, active=left, pending=pending)
        case ModelUndeployRequested():
            return state
        case ModelDeployFailed() | ModelDeploySkipped():
            pass
        case _:
            assert_never(event)
    pending = {key: asked for key, asked in state.pending.items() if asked.request != request}
    state = replace(state, pending=pending)
    if scope is None:
        return replace(state, answered_by_name={**state.answered_by_name, name: request})
    answered = {**state.answered, deployment_key(name, scope): request}
    return replace(state, answered=answered)


def handle(state: DeploymentsState, message: ModelMessage, meta: Meta) -> Decision:
    """Decide what becomes of a request: load it, serve what was loaded, or say why not."""
    match message:
        case ModelDeployRequested():
            return _begin(state, message)
        case ModelUndeployRequested():
            return _end(state, message)
        case RunFinished(deploy_as=str() as name):
            return Decision(effects=(ChooseCheckpoint(run=message.run, name=name),))
        case RunFinished():
            return NOTHING
        case CheckpointChosen():
            return _compare(state, message)
        case ModelLoaded(effect=effect):
            return _serve(state, effect)
        case Failed():
            return _fail(state, message)
        case _:
            assert_never(message)


def _begin(state: DeploymentsState, message: ModelDeployRequested) -> Decision:
    """Load the checkpoint of a request. The state may hold the request already."""
    served, request = message.served, message.request
    if state.has_answered(request, served.name, served.workspace):
        return NOTHING
    if served.key not in state.pending:
        state = evolve(state, message)
    if state.pending[served.key].request != request:
        return NOTHING
    return _load(state, message)


def _load(state: DeploymentsState, message: ModelDeployRequested) -> Decision:
    served = message.served
    if (problem := _conflict(state, served)) is not None:
        return Decision(events=(_failure(served, message.request, problem),))
    keys = [*state.pending]  # in the order of their requests
    earlier = keys[: keys.index(served.key)]
    others = {*state.active, *earlier} - {served.key}
    effect = LoadModel(
        request=message.request, served=served, others=len(others), scope=served.workspace or ""
    )
    return Decision(effects=(effect,))


def _conflict(state: DeploymentsState, served: ServedModel) -> str | None:
    """Why a checkpoint cannot be deployed next to what is deployed; None if it can."""
    for other in state.active.values():
        if other.base_key != served.base_key:
            is_visible = served.workspace in (None, other.workspace)
            return other_base(served, other, is_visible=is_visible)
    return None


def _serve(state: DeploymentsState, effect: LoadModel) -> Decision:
    served = effect.served
    asked = state.pending.get(served.key)
    if asked is None or asked.request != effect.request:
        return NOTHING
    if (problem := _conflict(state, served)) is not None:  # another was loaded in the meantime
        return Decision(events=(_failure(served, effect.request, problem),))
    deployed = ModelDeployed(
        deployment=served.name,
        scope=served.workspace or "",
        request=effect.request,
        served=served,
        number=state.count + 1,
    )
    return Decision(events=(deployed,))


def _fail(state: DeploymentsState, message: Failed) -> Decision:
    text = excerpt(message.message)
    match message.effect:
        case LoadModel(served=served, request=request):
            asked = state.pending.get(served.key)
            if asked is None or asked.request != request:
                return NOTHING
            return Decision(events=(_failure(served, request, text),))
        case ChooseCheckpoint() as effect:
            return _skip(state, effect, text, scope=None)
        case _:
            return NOTHING


def _failure(served: ServedModel, request: str, message: str) -> ModelDeployFailed:
    return ModelDeployFailed(
        deployment=served.name, scope=served.workspace or "", request=request, message=message
    )


def _compare(state: DeploymentsState, message: CheckpointChosen) -> Decision:
    """Deploy the best checkpoint of a run if it is better than what is deployed, and than what is being
    loaded under that name."""
    effect, served = message.effect, message.served
    if served is None:
        return _skip(state, effect, message.reason, scope=message.workspace or "")
    scope = served.workspace or ""
    loading = state.pending.get(served.key)
    now = loading.served if loading is not None else state.active.get(served.key)
    if now is not None and now.reward is not None and (served.reward or 0.0) <= now.reward:
        reason = (
            f"the best held-out reward of {served.run_name} is {served.reward:.4g} ({served.ref}), and "
            f"{now.ref} with {now.reward:.4g} is {'being loaded' if loading else 'deployed'}"
        )
        return _skip(state, effect, reason, scope=scope)
    if _is_known(state, effect, scope):
        return NOTHING
    asked = ModelDeployRequested(
        deployment=effect.name, scope=scope, request=_best(effect.run), served=served
    )
    replaced = () if loading is None else _answer_replaced(loading, served)
    begun = _load(evolve(state, asked), asked)
    return Decision(events=(*replaced, asked, *begun.events), effects=begun.effects)


def _answer_replaced(
    loading: ModelDeployRequested, served: ServedModel
) -> tuple[ModelDeploySkipped, ...]:
    """The answer to a run whose best checkpoint was still being loaded when a better one came."""
    if loading.request != _best(loading.served.run):
        return ()
    better = f"{served.ref} with {served.reward:.4g} is better than {loading.served.ref}"
    skipped = ModelDeploySkipped(
        deployment=loading.deployment,
        scope=loading.served.workspace or "",
        request=loading.request,
        run=loading.served.run,
        reason=f"{better}, which was being loaded",
    )
    return (skipped,)


def _skip(
    state: DeploymentsState, effect: ChooseCheckpoint, reason: str, *, scope: str | None
) -> Decision:
    """Say why a run deploys nothing. `scope` is its workspace, None where that is not known."""
    if _is_known(state, effect, scope):
        return NOTHING
    skipped = ModelDeploySkipped(
        deployment=effect.name,
        scope=scope,
        request=_best(effect.run),
        run=effect.run,
        reason=reason,
    )
    return Decision(events=(skipped,))


def _is_known(state: DeploymentsState, effect: ChooseCheckpoint, scope: str | None) -> bool:
    request = _best(effect.run)
    asked = state.pending.get(deployment_key(effect.name, scope))
    return state.has_answered(request, effect.name, scope) or (
        asked is not None and asked.request == request
    )


def _best(run: str) -> str:
    """The id of a run's request to deploy its best checkpoint."""
    return f"best-{run}"


def _end(state: DeploymentsState, message: ModelUndeployRequested) -> Decision:
    meant = state.keys_of(message)
    if len(meant) != 1:  # several: an earlier release asked, which does not say whose
        return NOTHING
    scope = next(iter(meant)).rpartition("/")[0]
    ended = ModelUndeployed(deployment=message.deployment, scope=scope, request=message.request)
    return Decision(events=(ended,))


def routes(message: ModelMessage) -> tuple[StreamName, ...]:
    """Return the stream of all deployments; none for a run that deploys nothing."""
    if isinstance(message, RunFinished) and message.deploy_as is None:
        return ()
    return (model_stream(),)


async def perform(effect: DeployEffect, ports: DeployPorts) -> ModelMessage:
    """Load a checkpoint, or choose the best one of a run. Raises Refused when it cannot be served."""
    match effect:
        case LoadModel():
            return await load_model(effect, ports)
        case ChooseCheckpoint():
            return await choose_checkpoint(effect, ports)


CONSUMER: Consumer[DeploymentsState, ModelEvent, ModelMessage, DeployEffect, DeployPorts] = (
    Consumer(
        name=ConsumerName("deploy"),
        category="model",
        reads=(ModelDeployRequested, ModelUndeployRequested, RunFinished),
        emits=(
            ModelDeployRequested,
            ModelDeployed,
            ModelDeployFailed,
            ModelDeploySkipped,
            ModelUndeployed,
        ),
        effects=(LoadModel, ChooseCheckpoint),
        initial=DeploymentsState(),
        fold_version=2,
        evolve=evolve,
        handle=handle,
        routes=routes,
        perform=perform,
        ports=DeployPorts,
    )
)
