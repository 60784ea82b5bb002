"""Keys of a training TOML that deploy its best checkpoint."""

from collections.abc import Iterator

from schemas.config import RunConfig
from schemas.deployments import NAME_RULE, is_deployment_name
from schemas.errors import Issue


def deploy_issues(config: RunConfig) -> Iterator[Issue]:
    """Issues with `advanced.deploy`, which would only show when the run has ended."""
    advanced, name = config.advanced, config.deploy_as
    if advanced.deploy is None:
        if advanced.deploy_name is not None:
            yield Issue("advanced.deploy_name", 'needs advanced.deploy = "best"; set it too')
        return
    if advanced.tuning != "lora":
        yield Issue("advanced.deploy", 'needs advanced.tuning = "lora", got "full"')
    if advanced.validation_dataset is None:
        yield Issue("advanced.deploy", "compares held-out rewards; set advanced.validation_dataset")
    elif advanced.algorithm == "sft" and not config.experiment.rollout:
        yield Issue("advanced.deploy", "compares held-out rewards; set experiment.rollout")
    if name is not None and not is_deployment_name(name):
        yield Issue("advanced.deploy_name", f"is {name!r} by default; set a name with {NAME_RULE}")
