"""Issues with the judges of a run: their providers, their addresses and their keys."""

from collections.abc import Collection, Iterator, Mapping, Sequence

from infra.model_api.providers.endpoints import (
    MisdirectedKey,
    check_base_url,
    is_own_server,
    provider_ref,
)
from infra.settings.network_policy import VARIABLE
from producers.core.validation.rollout_issues import SyncedCommit, entrypoint_of
from schemas.config import EvalConfig, RunConfig
from schemas.errors import InvalidConfig, Issue
from schemas.network import NetworkAddress
from schemas.specs import RubricSpec, rubric_specs

REWARDS = "advanced.rewards"


def judges_of(
    config: RunConfig | EvalConfig, commits: Sequence[SyncedCommit]
) -> Mapping[str, RubricSpec]:
    """Return the rubrics of a config by their keys, and those of the entry point that the newest synced
    commit has and the config names."""
    found = {
        f"advanced.rubrics[{index}]": rubric
        for index, rubric in enumerate(rubric_specs(config.advanced))
    }
    wanted, names = entrypoint_of(config.experiment), [r.name for r in config.advanced.rewards]
    rollouts = (commit.find_rollout(wanted) for commit in reversed(commits))
    newest = next((rollout for rollout in rollouts if rollout is not None), None)
    for rubric in newest.rubrics if newest is not None else ():
        if rubric.name in names:
            found[f"{REWARDS}[{names.index(rubric.name)}]"] = rubric
    return found


def judge_secrets(judges: Mapping[str, RubricSpec]) -> Mapping[str, str]:
    """Return the names of the secrets with the keys of judges, by the keys of the config."""
    found = {}
    for key, rubric in judges.items():
        try:
            ref = provider_ref(rubric.model, base_url=rubric.base_url, secret=rubric.api_key_secret)
        except InvalidConfig:
            continue
        if ref.secret is not None:
            found[key] = ref.secret
    return found


def judge_issues(
    judges: Mapping[str, RubricSpec], workspace: str, allowed: Collection[NetworkAddress]
) -> Iterator[Issue]:
    """An issue for each judge whose provider is not known, or whose address the operator does not allow
    this workspace."""
    for key, rubric in judges.items():
        try:
            provider_ref(rubric.model, base_url=rubric.base_url, secret=rubric.api_key_secret)
            if rubric.base_url is None or is_own_server(rubric.base_url.rstrip("/")):
                continue
            address = check_base_url(rubric.base_url)
        except MisdirectedKey as error:
            yield Issue(f"{key}.api_key_secret", str(error))
            continue
        except InvalidConfig as error:
            yield Issue(
                f"{key}.model" if rubric.base_url is None else f"{key}.base_url", str(error)
            )
            continue
        if address not in allowed:
            yield Issue(
                f"{key}.base_url",
                f"the operator does not allow workspace {workspace} to ask a judge at {address}; ask "
                f"for {VARIABLE}={workspace}={address}, or use a provider",
            )
