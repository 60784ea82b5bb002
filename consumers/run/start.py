"""How a run starts: from its request and, where user code is needed, from the synced workspace.

RunRequested is appended in the same write as the CommitRequested that asks for the workspace, and
before it. So the workspace's answer always finds the request in the stream. A run that waits for
approval has no CommitRequested yet: it is appended with RunApproved.
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Literal, TypedDict

from consumers.run.state import RunEvent, RunState
from schemas.algorithms import REINFORCED, failed_rewards, samples_nothing
from schemas.artifact_refs import ArtifactRef
from schemas.config import Advanced, EvalAdvanced, EvalConfig, RunConfig
from schemas.errors import Refused
from schemas.events import (
    RunApproved,
    RunRejected,
    RunRequested,
    RunStarted,
    WorkspaceRejected,
    WorkspaceSynced,
)
from schemas.events.decider_version import ATTESTS
from schemas.learner import RULES
from schemas.limits import batch_size, longest_answer, most_samples, rubric_bytes, total_steps
from schemas.models.reward_model import RewardModelSpec
from schemas.sampling import PolicyRef, SamplingParams
from schemas.specs import (
    MOST_RUBRIC_BYTES,
    DiscoveredRollout,
    Entrypoint,
    GroupTemplate,
    JudgeBudget,
    Plan,
    RewardSpec,
    RolloutRef,
    RubricSpec,
    TrainSpec,
    judge_budget,
    rubric_specs,
)


class Scoring(TypedDict):
    """How samples are scored, as fields of a RolloutRef."""

    grader: str | None
    rewards: tuple[RewardSpec, ...]
    rubrics: tuple[RubricSpec, ...]
    judge: JudgeBudget | None


def start(
    state: RunState, message: RunRequested | RunApproved | WorkspaceSynced | WorkspaceRejected
) -> tuple[RunEvent, ...]:
    """Return RunStarted or RunRejected; nothing while the approval or the workspace is awaited, or if
    the run has started."""
    request = state.request
    if request is None or state.started is not None or state.waits_for_approval:
        return ()
    rules = state.rules or RULES
    match message:
        case RunRequested() | RunApproved():
            return () if request.workspace else (_run_started(request, None, rules),)
        case WorkspaceRejected():
            return (RunRejected(run=request.run, message=message.message),)
        case WorkspaceSynced():
            return (_start_with_workspace(request, message, rules),)


def _start_with_workspace(
    request: RunRequested, synced: WorkspaceSynced, rules: int
) -> RunStarted | RunRejected:
    config = request.config
    try:
        rollout = rollout_of(
            config,
            entrypoint_of(config),
            synced.rollouts,
            snapshot=synced.snapshot,
            commit=synced.commit,
            workspace=request.workspace,
            submitter=request.submitter,
            pushed=request.origin is not None,
            failed=failed_rewards(config.advanced),
            reward_models=request.reward_models,
            num_samples=config.training.n_samples_per_prompt,
        )
    except Refused as error:
        return RunRejected(run=request.run, message=error.message)
    return _run_started(request, rollout, rules)


def entrypoint_of(config: RunConfig | EvalConfig) -> Entrypoint:
    """Return the entry point that a config names."""
    named = config.experiment
    return Entrypoint(rollout=named.rollout or "", path=named.entrypoint or "")


def rollout_of(
    config: RunConfig | EvalConfig,
    entrypoint: Entrypoint,
    discovered: Sequence[DiscoveredRollout],
    *,
    snapshot: ArtifactRef,
    commit: str,
    workspace: str | None,
    submitter: str | None = None,
    pushed: bool = False,
    failed: Mapping[str, float | Literal["grade"]] = MappingProxyType({}),
    reward_models: Sequence[RewardModelSpec] = (),
    num_samples: int = 1,
) -> RolloutRef:
    """Return the rollout of a config: one of those that were discovered in a commit. `failed` are the
    rewards of samples that the policy made fail, and `reward_models` score samples. Raises Refused when
    the entry point cannot be used with this config."""
    found = next((one for one in discovered if one.entrypoint == entrypoint), None)
    problem = entry_point_problem(found, entrypoint, config.advanced, num_samples=num_samples)
    if found is None or problem is not None:
        raise Refused(problem or "no entry point")
    limits = config.training if isinstance(config, RunConfig) else config.evaluation
    lengths = config.training if isinstance(config, RunConfig) else config.advanced
    return RolloutRef(
        snapshot=snapshot,
        commit=commit,
        entrypoint=entrypoint,
        kind=found.kind,
        workflow=found.workflow,
        **scoring_of(found, config.advanced),
        env=config.env,
        secrets=config.secrets.required,
        network=config.advanced.network,
        pushed=pushed,
        workspace=workspace,
        submitter=submitter,
        environment=found.environment,
        max_turns=config.advanced.max_turns,
        max_sample_tokens=config.advanced.max_sample_tokens,
        max_response_tokens=lengths.max_response_length,
        failed_rewards=dict(failed),
        reward_models=tuple(reward_models),
        workflow_timeout_s=limits.agent_workflow_timeout_s,
        grader_timeout_s=limits.grader_timeout_s,
    )


def entry_point_problem(
    found: DiscoveredRollout | None,
    entrypoint: Entrypoint,
    advanced: Advanced | EvalAdvanced,
    *,
    num_samples: int = 1,
) -> str | None:
    """Return why an entry point cannot be run with the rewards and the network of a config, or None if
    it can."""
    rewards = [reward.name for reward in advanced.rewards]
    where = f"rollouts/{entrypoint.rollout}/{entrypoint.path}"
    if found is None:
        return f"there is no {where} in this commit; check experiment.rollout and entrypoint"
    if found.error is not None:
        return found.error
    if found.kind == "server":
        problem = _server_problem(where, rewards)
        return problem or _rubric_problem(chosen_rubrics(found, advanced), [], num_samples)
    known = (*found.rewards, *(rubric.name for rubric in found.rubrics))
    missing = [name for name in rewards if name not in known]
    if missing:
        has = ", ".join(known) or "none"
        return f"{where} has no reward function {', '.join(missing)}; it has: {has}"
    has_models = isinstance(advanced, Advanced) and bool(advanced.reward_models)
    if not rewards and not advanced.rubrics and not has_models and found.grader is None:
        return f"{where} has no Grader; write one, or name reward functions in advanced.rewards"
    absent = [address for address in found.mcp_addresses if address not in advanced.network]
    if absent:
        return (
            f"the MCP servers of {where} are at {', '.join(absent)}, which the run may not connect to; "
            "add them to advanced.network"
        )
    return _rubric_problem(chosen_rubrics(found, advanced), rewards, num_samples)


def _rubric_problem(
    rubrics: tuple[RubricSpec, ...], rewards: list[str], num_samples: int
) -> str | None:
    """Return why the events of a group cannot hold these rubrics, or None if they can."""
    size, names = rubric_bytes(rubrics), {rubric.name for rubric in rubrics}
    if size > MOST_RUBRIC_BYTES:
        return f"the rubrics of the run have {size} bytes; use at most {MOST_RUBRIC_BYTES} in all"
    most = most_samples([name for name in rewards if name not in names], rubrics)
    if rubrics and num_samples > most:
        return (
            f"with these rubrics a group has at most {most} samples, got {num_samples}; use fewer"
        )
    return None


def scoring_of(found: DiscoveredRollout, advanced: Advanced | EvalAdvanced) -> Scoring:
    """Return the fields of a RolloutRef that say how its samples are scored."""
    names = {rubric.name for rubric in found.rubrics}
    rewards = tuple(
        RewardSpec(name=r.name, weight=r.weight) for r in advanced.rewards if r.name not in names
    )
    rubrics = chosen_rubrics(found, advanced)
    return {
        "grader": None if advanced.rewards else found.grader,
        "rewards": rewards,
        "rubrics": rubrics,
        "judge": judge_budget(advanced) if rubrics else None,
    }


def chosen_rubrics(
    found: DiscoveredRollout, advanced: Advanced | EvalAdvanced
) -> tuple[RubricSpec, ...]:
    """Return the rubrics of a config, and those of the entry point that `advanced.rewards` names."""
    weights = {reward.name: reward.weight for reward in advanced.rewards}
    own = tuple(
        rubric.model_copy(update={"weight": weights[rubric.name], "asks": True})
        for rubric in found.rubrics
        if rubric.name in weights
    )
    return (*rubric_specs(advanced), *own)


def _server_problem(where: str, rewards: list[str]) -> str | None:
    """Return why a rollout server cannot be run with these reward functions, or None if it can."""
    if not rewards:
        return None
    return (
        f"{where} is a rollout server, which grades its samples itself, so advanced.rewards cannot name "
        f"{', '.join(rewards)}; leave advanced.rewards out"
    )


def _run_started(request: RunRequested, rollout: RolloutRef | None, rules: int) -> RunStarted:
    config = request.config
    steps = total_steps(config, request.dataset.num_rows)
    return RunStarted(
        run=request.run,
        plan=Plan(
            total_steps=steps,
            batch_size=batch_size(config),
            num_samples=config.training.n_samples_per_prompt,
            num_rows=request.dataset.num_rows,
        ),
        spec=TrainSpec(
            run=request.run,
            config=config,
            model=request.model,
            total_steps=steps,
            dataset=request.dataset,
            validation=request.validation if rollout is None else None,
            rules=rules,
            date=request.today,
            teacher=request.teacher,
            attests=_attests(request),
        ),
        template=_template(request, rollout, rules, validation=False) if rollout else None,
        validation=(
            _template(request, rollout, rules, validation=True)
            if rollout is not None and request.validation is not None
            else None
        ),
        commit=rollout.commit if rollout else None,
        fork=request.fork,
    )


def _attests(request: RunRequested) -> bool:
    """Whether the run tests its samples before it trains them."""
    advanced = request.config.advanced
    is_on = advanced.attest is not False and advanced.algorithm in REINFORCED
    return is_on and not samples_nothing(advanced) and request.decider >= ATTESTS


def _template(
    request: RunRequested, rollout: RolloutRef, rules: int, *, validation: bool
) -> GroupTemplate:
    config: RunConfig = request.config
    advanced = config.advanced
    temperature = (
        advanced.validation_temperature if validation else config.sampling.rollout_temperature
    )
    return GroupTemplate(
        dataset=request.validation if validation and request.validation else request.dataset,
        model=request.model,
        policy=PolicyRef(version=0),
        tuning=advanced.tuning,
        lora_alpha=advanced.lora_alpha,
        lora_scaling=advanced.lora_scaling,
        params=SamplingParams(
            temperature=temperature,
            top_p=1.0 if validation else config.sampling.rollout_top_p,
            max_prompt_tokens=config.training.max_prompt_length,
            max_new_tokens=longest_answer(config.training),
            seed=advanced.seed,
            deterministic=advanced.deterministic,
            date=request.today,
            allows_wide_native=not advanced.deterministic,
        ),
        num_samples=(
            advanced.validation_samples if validation else config.training.n_samples_per_prompt
        ),
        # The figures of a validation do not depend on what the run trains on.
        rollout=rollout.model_copy(update={"failed_rewards": {}}) if validation else rollout,
        run=request.run,
        teacher_hint=None if validation else advanced.teacher_hint,
        teacher_server=None if validation or not request.teacher else request.teacher.server,
        rules=rules,
    )
