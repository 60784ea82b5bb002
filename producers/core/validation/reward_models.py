"""Finds the checkpoints that `advanced.reward_models` names, and pins what a run needs of them."""

import asyncio
from pathlib import Path

from producers.core.lookup import Checkpoint, Lookup
from producers.core.workspaces import Workspace
from schemas.config import EvalConfig, RunConfig
from schemas.errors import InvalidConfig, Issue, NotFound
from schemas.models.reward_model import RewardModelSpec, score_names


async def find_reward_models(
    config: RunConfig | EvalConfig,
    lookup: Lookup,
    workspace: Workspace | None,
    issues: list[Issue],
) -> tuple[RewardModelSpec, ...]:
    """The reward models of a run in this workspace. One that cannot be used becomes an issue."""
    if isinstance(config, EvalConfig):
        return ()
    found = []
    advanced = config.advanced
    named = zip(advanced.reward_models, score_names(advanced.reward_models), strict=True)
    for index, (wanted, name) in enumerate(named):
        try:
            checkpoint = await lookup.checkpoint(wanted.model)
            await asyncio.to_thread(_check, checkpoint, wanted.model, workspace)
        except (InvalidConfig, NotFound) as error:
            issues.append(Issue(f"advanced.reward_models[{index}].model", error.message))
            continue
        found.append(_pin(checkpoint, name=name, weight=wanted.weight))
    return tuple(found)


def _check(checkpoint: Checkpoint, ref: str, workspace: Workspace | None) -> None:
    """Raise InvalidConfig or NotFound when a run in this workspace cannot use the checkpoint."""
    owner = checkpoint.run.owner_workspace
    if owner is not None and workspace is not None and owner != workspace.id:
        raise NotFound(
            f"{ref} belongs to another workspace; name a reward model that was trained in "
            f"{workspace.name}"
        )
    if not checkpoint.is_reward_model:
        algorithm = checkpoint.run.config.advanced.algorithm
        raise InvalidConfig(
            f"{ref} is not a reward model but a policy of {algorithm}; train one with "
            "advanced.algorithm = 'reward_model'"
        )
    base = checkpoint.spec.model
    if base.kind == "directory" and not Path(base.name).exists():
        raise InvalidConfig(
            f"the base model of {ref} is missing: there is no {base.name} on the server; put it back, "
            "or train another reward model"
        )


def _pin(checkpoint: Checkpoint, *, name: str, weight: float) -> RewardModelSpec:
    run, spec = checkpoint.run, checkpoint.spec
    weights = spec.state.weights
    if weights is None:
        raise AssertionError("a checkpoint whose weights were not stored has no manifest")
    return RewardModelSpec(
        name=name,
        weight=weight,
        checkpoint=f"{spec.run}@{spec.step}",
        base=spec.model,
        weights=weights,
        lora_alpha=run.config.advanced.lora_alpha,
        lora_scaling=run.config.advanced.lora_scaling,
        date=run.today,
    )
