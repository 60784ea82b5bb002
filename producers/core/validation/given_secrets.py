"""Secrets that a request gives for its run or evaluation alone."""

from collections.abc import Mapping

from schemas.config import EvalConfig, RunConfig
from schemas.errors import InvalidConfig, Issue
from schemas.secrets.rules import check_secret_name, check_secret_value, how_to_set
from schemas.secrets.secret_value import SecretValue


class SecretsNotSet(InvalidConfig):
    """Secrets that an evaluation requires (`names`) are not set, so it cannot be repeated without
    them."""

    def __init__(self, names: tuple[str, ...]) -> None:
        message = (
            f"{how_to_set(names, pushed=False)}, or give them for this retry alone "
            "(headrace eval retry --secrets-file)"
        )
        super().__init__(message, issues=(Issue("secrets.required", message),))
        self.names = names


def check_given_secrets(given: Mapping[str, SecretValue], config: RunConfig | EvalConfig) -> None:
    """Raise InvalidConfig with an issue for each secret that is given and may not be: its name is not
    among those that the config requires, or its value is not allowed. No issue shows a value."""
    issues = []
    for name, value in given.items():
        key = f"secrets.{name[:80]}"
        if name not in config.secrets.required:
            required = ", ".join(config.secrets.required) or "none"
            message = f"is given and not required; secrets.required has: {required}"
            issues.append(Issue(key, message))
            continue
        try:
            check_secret_name(name)
            check_secret_value(value.reveal())
        except InvalidConfig as error:
            issues.append(Issue(key, error.message))
    if issues:
        first = issues[0]
        raise InvalidConfig(f"{first.key}: {first.message}", issues=tuple(issues))
