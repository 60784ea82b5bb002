"""The one door for validation: every check of a TOML is reached through this module.

Submit, `train submit --dry-run` and `eval submit` all parse the TOML and then call `require_valid`:

| what is checked | where |
|---|---|
| sections, keys, types, bounds | `schemas/toml/parser.py`, `schemas/config.py` |
| keys that contradict each other, unread keys, unsupported values | `schemas/toml/config_issues.py` |
| datasets, models and workspaces exist | `producers/core/validation/references.py` |
| the datasets have the rows and columns that the run needs | `dataset_issues.py` |
| recorded groups fit the model and the mode of the run | `trajectory_issues.py` |
| the lengths fit into the model's context | `model_issues.py` |
| the commit has the rollout | `rollout_issues.py` |
| the operator allows the addresses | `address_issues.py` |
| the judges are known and may be reached | `judge_issues.py` |

The parser raises the issues of single keys first, because without a config nothing else can be checked.
`validate` collects all other issues, so one refused request shows them together.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

from producers.core.models.model_facts import ModelFacts
from producers.core.validation.address_issues import network_issues, provider_address_issues
from producers.core.validation.dataset_issues import (
    dataset_issues,
    dataset_warnings,
    validation_dataset_issues,
)
from producers.core.validation.judge_issues import judge_issues, judges_of
from producers.core.validation.model_issues import (
    length_issues,
    unknown_characters,
    vllm_issues,
)
from producers.core.validation.references import References
from producers.core.validation.rollout_issues import rollout_issues, rollout_warnings
from producers.core.validation.trajectory_issues import (
    staleness_warnings,
    trajectory_issues,
    validation_trajectory_issues,
)
from producers.core.workspaces import Workspace
from schemas.config import EvalConfig, RunConfig
from schemas.errors import Issue
from schemas.events import DatasetRegistered
from schemas.models.reward_model import RewardModelSpec
from schemas.models.teacher import TeacherRef
from schemas.sampling import ModelRef
from schemas.toml.config_issues import config_issues
from schemas.toml.parser import MOST_ISSUES, refuse


def validate(config: RunConfig | EvalConfig, references: References) -> tuple[Issue, ...]:
    """All issues of a config, or an empty tuple. `references` is what its names refer to."""
    return tuple(islice(_issues(config, references), MOST_ISSUES))


@dataclass(frozen=True, slots=True)
class Valid:
    """The objects that a valid config refers to, and warnings for its user."""

    dataset: DatasetRegistered
    validation: DatasetRegistered | None
    model: ModelRef
    facts: ModelFacts
    teacher: TeacherRef | None
    workspace: Workspace | None
    """that of the rollout"""
    warnings: tuple[str, ...]
    reward_models: tuple[RewardModelSpec, ...] = ()
    owner: Workspace | None = None
    """the one that the request names for a run without a rollout"""


def require_valid(config: RunConfig | EvalConfig, references: References) -> Valid:
    """Returns the objects that a valid config refers to. Raises InvalidConfig with every issue, or
    NotFound when only the request's workspace is wrong."""
    if issues := validate(config, references):
        raise refuse("training" if isinstance(config, RunConfig) else "evaluation", issues)
    if references.no_workspace is not None:
        raise references.no_workspace
    if references.dataset is None or references.model is None:
        raise AssertionError("a dataset or model was not found, and no issue says so")
    return Valid(
        dataset=references.dataset,
        validation=references.validation,
        model=references.model,
        facts=references.facts,
        teacher=references.teacher,
        workspace=references.workspace,
        owner=references.owner,
        warnings=tuple(_warnings(config, references)),
        reward_models=references.reward_models,
    )


def _issues(config: RunConfig | EvalConfig, references: References) -> Iterator[Issue]:
    yield from config_issues(config)
    yield from references.issues
    dataset, validation = references.dataset, references.validation
    if dataset is not None:
        yield from dataset_issues(config, dataset)
        yield from trajectory_issues(config, dataset)
    if isinstance(config, RunConfig) and validation is not None:
        yield from validation_dataset_issues(config, validation)
        yield from validation_trajectory_issues(validation)
    if references.vllm is not None and isinstance(config, RunConfig):
        yield from vllm_issues(config, tuning=references.vllm)
    yield from length_issues(config, references.facts.context)
    yield from rollout_issues(config.experiment, references.commits)
    if references.workspace is not None:
        name, allowed = references.workspace.name, references.network
        yield from network_issues(config, name, allowed)
        if references.model is not None and (own := references.model.provider) is not None:
            yield from provider_address_issues(own, "advanced.base_url", name, allowed)
        if references.teacher is not None and (server := references.teacher.server) is not None:
            yield from provider_address_issues(server, "advanced.teacher_base_url", name, allowed)
        yield from judge_issues(judges_of(config, references.commits), name, allowed)


def _warnings(config: RunConfig | EvalConfig, references: References) -> Iterator[str]:
    yield from unknown_characters(references.facts, references.dataset, references.validation)
    if references.dataset is not None:
        yield from dataset_warnings(config, references.dataset)
    if references.dataset is not None and references.model is not None:
        yield from staleness_warnings(config, references.dataset, references.model)
    yield from rollout_warnings(config.experiment, references.commits)
