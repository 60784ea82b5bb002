"""The work of deployments: load a checkpoint into the engine that serves, and choose the best
checkpoint of a run."""

from dataclasses import dataclass

from infra.settings.settings import Settings
from infra.spine.ports.event_log import Cursor, EventStore
from schemas.deployments import ServedModel, is_deployment_name
from schemas.effects import CheckpointChosen, ChooseCheckpoint, LoadModel, ModelLoaded
from schemas.errors import InvalidConfig, NotFound, Refused
from schemas.events import (
    CheckpointSaved,
    EvaluationSettled,
    RunArchived,
    RunRenamed,
    RunRequested,
)
from schemas.ids import checkpoint_stream
from schemas.models.served import served_model
from schemas.sampling import DrawKey, Message, Sampler, SampleRequest, SamplingParams

PAGE = 1000


@dataclass(frozen=True, slots=True)
class DeployPorts:
    """The sampler of the process that serves, its limits, and the log."""

    sampler: Sampler
    settings: Settings
    log: EventStore


async def load_model(effect: LoadModel, ports: DeployPorts) -> ModelLoaded:
    """Load a checkpoint and sample one token from it, so that the first request finds it ready. Raises
    Refused when there are too many deployments, or when the engine cannot serve this one."""
    most = ports.settings.serving.max_deployments
    if effect.others >= most:
        raise Refused(
            f"{effect.others} checkpoints are deployed, and HEADRACE_MAX_DEPLOYMENTS allows {most}; "
            "undeploy one first, or raise the setting"
        )
    served = effect.served
    try:
        await ports.sampler.sample(first_request(served))
    except NotFound as error:
        raise Refused(
            f"the weights of {served.ref} do not exist any more ({error.message}); deploy another "
            "checkpoint"
        ) from error
    return ModelLoaded(effect)


def first_request(served: ServedModel) -> SampleRequest:
    """A request for one token, which loads a deployment and its base."""
    return SampleRequest(
        model=served.model,
        policy=served.policy,
        lora_alpha=served.lora_alpha,
        lora_scaling=served.lora_scaling,
        params=SamplingParams(temperature=0, max_new_tokens=1, date=served.date),
        key=DrawKey(purpose="serve", step=0, slot=0, replacement=0, sample=0),
        messages=(Message(role="user", content="1"),),
    )


async def choose_checkpoint(effect: ChooseCheckpoint, ports: DeployPorts) -> CheckpointChosen:
    """The checkpoint of a run with the highest held-out reward; the latest of several."""
    if not is_deployment_name(effect.name):
        reason = f"{effect.name!r} is not a name for a deployment; set advanced.deploy_name"
        return CheckpointChosen(effect, None, reason)
    run: RunRequested | None = None
    name, rewards = "", dict[int, float]()
    types = [kind.type for kind in (RunRequested, RunRenamed, RunArchived, EvaluationSettled)]
    after = Cursor()
    while page := await ports.log.read(effect.run, after=after, limit=PAGE, types=types):
        for recorded in page:
            match recorded.event:
                case RunRequested() as run:
                    name = run.run_name
                case RunRenamed(run_name=name) | RunArchived(run_name=name):
                    pass
                case EvaluationSettled(step=step, reward=float() as reward):
                    rewards[step] = reward
        after = page[-1].cursor
    if run is None:
        return CheckpointChosen(effect, None, "the run was deleted")
    return await _best_of(effect, run.model_copy(update={"run_name": name}), rewards, ports)


async def _best_of(
    effect: ChooseCheckpoint, run: RunRequested, rewards: dict[int, float], ports: DeployPorts
) -> CheckpointChosen:
    stream = checkpoint_stream(effect.run)
    saved = {
        recorded.event.spec.step: recorded.event.spec
        for recorded in (await ports.log.load({stream: 0}))[stream]
        if isinstance(recorded.event, CheckpointSaved)
    }
    scored = [(rewards[step], step) for step in saved if step in rewards]
    if not scored:
        reason = (
            "no checkpoint has a held-out reward; set advanced.validation_dataset, and "
            "checkpoints.eval_interval so that checkpoints are validated"
        )
        return CheckpointChosen(effect, None, reason, run.owner_workspace)
    reward, step = max(scored)
    try:
        served = served_model(run, saved[step], name=effect.name, reward=reward)
    except InvalidConfig as error:
        return CheckpointChosen(effect, None, error.message, run.owner_workspace)
    return CheckpointChosen(effect, served, workspace=run.owner_workspace)
