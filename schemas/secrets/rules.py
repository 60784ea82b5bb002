"""The rules of secrets: which names and values may be stored."""

import re
from collections.abc import Sequence
from typing import Literal, get_args

from schemas.errors import InvalidConfig, Issue
from schemas.toml.env_vars import reserved_env

SecretScope = Literal["workspace", "personal"]
SCOPES: tuple[SecretScope, ...] = get_args(SecretScope)

SECRET_NAME = re.compile(r"[A-Z][A-Z0-9_]*")
LONGEST_SECRET_NAME = 64
FEWEST_CHARACTERS = 8
MOST_BYTES = 32 << 10
FEWEST_DIFFERENT = 4

MOST_SECRETS = 100
"""How many secrets one workspace or one person may have."""


def check_secret_name(name: str) -> None:
    """Raise InvalidConfig unless a secret may have this name."""
    if not SECRET_NAME.fullmatch(name) or len(name) > LONGEST_SECRET_NAME:
        raise _refuse(
            "name",
            f"must be capital letters, digits and _, begin with a letter and have at most "
            f"{LONGEST_SECRET_NAME} characters, got {name[:80]!r}",
        )
    if reason := reserved_env(name):
        raise _refuse("name", f"{name} {reason}")


def check_secret_value(value: str) -> None:
    """Raise InvalidConfig unless a secret may have this value. The message shows no part of it."""
    try:
        size = len(value.encode())
    except UnicodeEncodeError as error:
        raise _refuse("value", "is not text in UTF-8; encode it, for example as base64") from error
    if "\0" in value:
        raise _refuse("value", "holds a NUL character, which no environment variable can hold")
    if size > MOST_BYTES:
        raise _refuse("value", f"has {size} bytes; give at most {MOST_BYTES}")
    if len(value.strip()) < FEWEST_CHARACTERS:
        raise _refuse(
            "value",
            f"is too short to be masked safely, because it would be found in other words; give at "
            f"least {FEWEST_CHARACTERS} characters, or pass it in [env] if it is not secret",
        )
    if len(set(value.strip())) < FEWEST_DIFFERENT:
        raise _refuse(
            "value",
            f"has fewer than {FEWEST_DIFFERENT} different characters, so it cannot be masked safely; "
            "give a random value",
        )


def _refuse(key: str, message: str) -> InvalidConfig:
    return InvalidConfig(f"the {key} of a secret {message}", issues=(Issue(key, message),))


def how_to_set(names: Sequence[str], *, pushed: bool) -> str:
    """Return the sentence about secrets that are required and not set. The run of a push gets the
    secrets of its workspace only."""
    scope = " --scope workspace" if pushed else ""
    command = f"headrace secret set {names[0]}{scope}"
    if len(names) == 1:
        return f"secret {names[0]} is not set; set it with: {command}"
    return f"secrets {', '.join(names)} are not set; set each with: {command}"
