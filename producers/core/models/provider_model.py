"""The provider's model that an evaluation names, with its bounds and the owner of its key."""

from infra.model_api.providers.endpoints import provider_ref
from schemas.config import EvalConfig
from schemas.sampling import PROVIDER_PREFIX, ModelRef


def provider_model(config: EvalConfig) -> ModelRef:
    """The provider's model of an evaluation, without an owner. Raises InvalidConfig when its name or its
    base URL is wrong."""
    advanced = config.advanced
    name = config.experiment.model_path.removeprefix(PROVIDER_PREFIX)
    ref = provider_ref(name, base_url=advanced.base_url, secret=advanced.api_key_secret)
    bounds = {
        "max_calls": advanced.max_calls,
        "max_usd": advanced.max_usd,
        "usd_per_million": advanced.usd_per_million,
        "timeout_s": advanced.provider_timeout_s,
    }
    return ModelRef(kind="provider", name=name, provider=ref.model_copy(update=bounds))


def owned_model(
    model: ModelRef, *, owner: str, workspace: str | None, submitter: str | None
) -> ModelRef:
    """The model as the evaluation `owner` uses it, with the key of its workspace or its submitter. Other
    models stay as they are."""
    if model.provider is None:
        return model
    whose = {"owner": owner, "workspace": workspace, "submitter": submitter}
    return model.model_copy(update={"provider": model.provider.model_copy(update=whose)})
