"""Checks of the keys of a provider's model. An evaluation may name such a model, and a run may not."""

from collections.abc import Iterator

from schemas.config import EvalConfig, RunConfig
from schemas.errors import Issue
from schemas.sampling import PROVIDER_PREFIX
from schemas.toml.rubric_keys import SAYS_PRICE, price_problem

MODEL = "experiment.model_path"
KEYS = (
    "base_url",
    "api_key_secret",
    "usd_per_million",
    "max_calls",
    "max_usd",
    "provider_timeout_s",
)
"""The keys in `[advanced]` that only a provider's model reads."""


def provider_issues(config: RunConfig | EvalConfig) -> Iterator[Issue]:
    """Every issue with a provider's model, and with keys that have no meaning without one."""
    path = config.experiment.model_path
    if isinstance(config, RunConfig):
        if path.startswith(PROVIDER_PREFIX):
            yield Issue(
                MODEL,
                f"names a model of a provider, {path[:120]!r}, which has no weights to train; name "
                "another model, or measure this one with `headrace eval submit`",
            )
        return
    advanced = config.advanced
    if not path.startswith(PROVIDER_PREFIX):
        for key in KEYS:
            if key in advanced.model_fields_set:
                yield Issue(
                    f"advanced.{key}",
                    f"needs a provider's model; set {MODEL} to {PROVIDER_PREFIX}NAME, or leave it out",
                )
        return
    if advanced.deterministic:
        yield Issue(
            "advanced.deterministic",
            "cannot be promised for a provider's model; leave it out",
        )
    if problem := price_problem(advanced.usd_per_million):
        yield Issue("advanced.usd_per_million", problem)
    name = path.removeprefix(PROVIDER_PREFIX)
    has_price = advanced.usd_per_million is not None or name.startswith(SAYS_PRICE)
    if advanced.max_usd is not None and not has_price:
        yield Issue(
            "advanced.max_usd",
            "needs the price of the model; set advanced.usd_per_million = [PROMPT, ANSWER]",
        )
