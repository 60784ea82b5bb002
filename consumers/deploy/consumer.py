"""Deploys checkpoints: decides which version each name serves, and loads it.
Reads: ModelDeployRequested, ModelUndeployRequested, RunFinished.  Emits: ModelDeployRequested,
ModelDeployed, ModelDeployFailed, ModelDeploySkipped, ModelUndeployed.  Stream: model.
Does: loads checkpoints into the engine that serves, chooses the best of a run (lane: serve).
Waits for: nothing.
Safe to repeat because: a request has an id, and a name remembers the last one that was answered.

A newer request for a name replaces one that is still being loaded, unless that one is of another
workspace or, when a run asks for its best checkpoint, has a better reward. While a version is loaded
the one before is served, so a failure changes nothing. All deployments have one base model, which is
loaded once.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import assert_never

from consumers.deploy.loading import DeployPorts, choose_checkpoint, load_model
from infra.spine.runtime.consumer import NOTHING, Consumer, Decision, Meta
from infra.spine.runtime.error_excerpt import excerpt
from schemas.deployments import ServedModel, other_base
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
    """`active` are the served versions by name, and `pending` the requests that are being loaded.
    `answered` is the id of the last request of each name that was answered. `count` is how many versions
    were deployed."""

    active: Mapping[str, ServedModel] = field(default_factory=dict)
    pending: Mapping[str, ModelDeployRequested] = field(default_factory=dict)
    answered: Mapping[str, str] = field(default_factory=dict)
    count: int = 0


def evolve(state: DeploymentsState, event: ModelEvent) -> DeploymentsState:
    """Return the state after one event of the deployments."""
    name, request = event.deployment, event.request
    match event:
        case ModelDeployRequested():
            before = state.pending.get(name)
            if before is not None and before.served.workspace != event.served.workspace:
                return state
            return replace(state, pending={**state.pending, name: event})
        case ModelDeployed():
            state = replace(state, active={**state.active, name: event.served}, count=event.number)
        case ModelUndeployed():
            left = {key: served for key, served in state.active.items() if key != name}
            pending = {key: asked for key, asked in state.pending.items() if key != name}
            state = replace(state, active=left, pending=pending)
        case ModelUndeployRequested():
            return state
        case ModelDeployFailed() | ModelDeploySkipped():
            pass
        case _:
            assert_never(event)
    pending = {key: asked for key, asked in state.pending.items() if asked.request != request}
    return replace(state, pending=pending, answered={**state.answered, name: request})


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
    name = message.deployment
    if state.answered.get(name) == message.request:
        return NOTHING
    if name not in state.pending:
        state = evolve(state, message)
    asked = state.pending[name]
    if asked.served.workspace != message.served.workspace:
        return Decision(events=(_failure(name, message.request, _name_conflict(name)),))
    if asked.request != message.request:
        return NOTHING
    return _load(state, message)


def _load(state: DeploymentsState, message: ModelDeployRequested) -> Decision:
    served = message.served
    if (problem := _conflict(state, served)) is not None:
        return Decision(events=(_failure(message.deployment, message.request, problem),))
    names = [*state.pending]  # in the order of their requests
    earlier = names[: names.index(message.deployment)]
    others = {*state.active, *earlier} - {message.deployment}
    effect = LoadModel(request=message.request, served=served, others=len(others))
    return Decision(effects=(effect,))


def _conflict(state: DeploymentsState, served: ServedModel) -> str | None:
    """Why a checkpoint cannot be deployed next to what is deployed; None if it can."""
    own = state.active.get(served.name)
    if own is not None and own.workspace != served.workspace:
        return _name_conflict(served.name)
    for other in state.active.values():
        if other.base_key != served.base_key:
            is_visible = served.workspace in (None, other.workspace)
            return other_base(served, other, is_visible=is_visible)
    return None


def _name_conflict(name: str) -> str:
    return f"the name {name} is deployed by another workspace; choose another name"


def _serve(state: DeploymentsState, effect: LoadModel) -> Decision:
    served = effect.served
    asked = state.pending.get(served.name)
    if asked is None or asked.request != effect.request:
        return NOTHING
    if (problem := _conflict(state, served)) is not None:  # another was loaded in the meantime
        return Decision(events=(_failure(served.name, effect.request, problem),))
    deployed = ModelDeployed(
        deployment=served.name, request=effect.request, served=served, number=state.count + 1
    )
    return Decision(events=(deployed,))


def _fail(state: DeploymentsState, message: Failed) -> Decision:
    text = excerpt(message.message)
    match message.effect:
        case LoadModel(served=served, request=request):
            asked = state.pending.get(served.name)
            if asked is None or asked.request != request:
                return NOTHING
            return Decision(events=(_failure(served.name, request, text),))
        case ChooseCheckpoint() as effect:
            return _skip(state, effect, text)
        case _:
            return NOTHING


def _failure(name: str, request: str, message: str) -> ModelDeployFailed:
    return ModelDeployFailed(deployment=name, request=request, message=message)


def _compare(state: DeploymentsState, message: CheckpointChosen) -> Decision:
    """Deploy the best checkpoint of a run if it is better than what is deployed, and than what is being
    loaded under that name."""
    effect, served = message.effect, message.served
    if served is None:
        return _skip(state, effect, message.reason)
    loading = state.pending.get(effect.name)
    if loading is not None and loading.served.workspace != served.workspace:
        return _skip(state, effect, _name_conflict(effect.name))
    now = loading.served if loading is not None else state.active.get(effect.name)
    if now is not None and now.workspace != served.workspace:
        # The name is refused below, without a word about what another workspace deployed.
        now = None
    if now is not None and now.reward is not None and (served.reward or 0.0) <= now.reward:
        reason = (
            f"the best held-out reward of {served.run_name} is {served.reward:.4g} ({served.ref}), and "
            f"{now.ref} with {now.reward:.4g} is {'being loaded' if loading else 'deployed'}"
        )
        return _skip(state, effect, reason)
    if _is_known(state, effect):
        return NOTHING
    asked = ModelDeployRequested(deployment=effect.name, request=_best(effect.run), served=served)
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
    return (
        _skip_event(loading.deployment, loading.served.run, f"{better}, which was being loaded"),
    )


def _skip(state: DeploymentsState, effect: ChooseCheckpoint, reason: str) -> Decision:
    if _is_known(state, effect):
        return NOTHING
    return Decision(events=(_skip_event(effect.name, effect.run, reason),))


def _skip_event(name: str, run: str, reason: str) -> ModelDeploySkipped:
    return ModelDeploySkipped(deployment=name, request=_best(run), run=run, reason=reason)


def _is_known(state: DeploymentsState, effect: ChooseCheckpoint) -> bool:
    request = _best(effect.run)
    asked = state.pending.get(effect.name)
    return state.answered.get(effect.name) == request or (
        asked is not None and asked.request == request
    )


def _best(run: str) -> str:
    """The id of a run's request to deploy its best checkpoint."""
    return f"best-{run}"


def _end(state: DeploymentsState, message: ModelUndeployRequested) -> Decision:
    name = message.deployment
    if name not in state.active and name not in state.pending:
        return NOTHING
    return Decision(events=(ModelUndeployed(deployment=name, request=message.request),))


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
        evolve=evolve,
        handle=handle,
        routes=routes,
        perform=perform,
        ports=DeployPorts,
    )
)
