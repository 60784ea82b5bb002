"""The keys of judges. They come from the secrets of a run's workspace or submitter, go to the provider
of the judge alone, and never enter a sandbox."""

from collections.abc import Mapping

from infra.http.providers.endpoints import provider_ref
from infra.ports.ports import Ports
from schemas.errors import FailureCategory, UserCodeError
from schemas.secrets.rules import how_to_set
from schemas.secrets.secret_value import SecretValue
from schemas.specs import RolloutRef, RubricSpec


def secret_of(rubric: RubricSpec) -> str | None:
    """Return the name of the secret with the key of a rubric's judge, or None if it needs none. Raises
    InvalidConfig when there is no such provider."""
    ref = provider_ref(rubric.model, base_url=rubric.base_url, secret=rubric.api_key_secret)
    return ref.secret


async def judge_keys(rollout: RolloutRef, ports: Ports) -> Mapping[str, SecretValue | None]:
    """Return the keys of the judges by the names of their rubrics. Raises UserCodeError, which names the
    secrets that are not set, and InvalidConfig."""
    names = {rubric.name: secret_of(rubric) for rubric in rollout.rubrics}
    wanted = tuple(sorted({name for name in names.values() if name is not None}))
    if not wanted:
        return dict.fromkeys(names)
    submitter = None if rollout.pushed else rollout.submitter
    values = await ports.require("secrets").resolve(
        wanted, workspace=rollout.workspace, submitter=submitter
    )
    if missing := [name for name in wanted if name not in values]:
        raise UserCodeError(
            FailureCategory.VALIDATION, how_to_set(missing, pushed=submitter is None)
        )
    return {rubric: values[name] if name else None for rubric, name in names.items()}
