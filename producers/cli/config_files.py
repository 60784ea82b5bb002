"""Reading a run or evaluation TOML on the client: only its syntax. What it means, and whether it may
be, the server says, in one place for everyone."""

import tomllib
from datetime import date, time
from pathlib import Path

from producers.cli.display.output import Document
from producers.cli.errors import Failure
from schemas.errors import Issue

MAX_BYTES = 256 << 10
"""The largest file that is parsed: parsing takes longer than linear in what a file can hold."""


def read_config(path: Path) -> Document:
    """The file as a JSON object. Raises Failure when it is missing or is not TOML."""
    try:
        if path.stat().st_size > MAX_BYTES:
            message = (
                f"{path} has more than {MAX_BYTES >> 10} KiB; a config is short: name its data"
            )
            raise Failure("VALIDATION", message, issues=(Issue(str(path), message),))
        text = path.read_text(encoding="utf-8")
        config = tomllib.loads(text)
    except FileNotFoundError as error:
        raise Failure(
            "NOT_FOUND",
            f"there is no config file {path}; configs/training/*.toml is where they live",
        ) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        issue = Issue(str(path), str(error))
        raise Failure(
            "VALIDATION", f"{path} is not valid TOML: {error}", issues=(issue,)
        ) from error
    _reject_dates(config, path, "")
    return config


def _reject_dates(value: object, path: Path, key: str) -> None:
    """Raises Failure where TOML holds what JSON cannot (dates)."""
    if isinstance(value, dict):
        for name, inner in value.items():
            _reject_dates(inner, path, f"{key}.{name}" if key else name)
    elif isinstance(value, list):
        for inner in value:
            _reject_dates(inner, path, key)
    elif isinstance(value, date | time):
        issue = Issue(key, f'write it in quotes, as "{value}"')
        raise Failure("VALIDATION", f"{path}: {key} holds {value}, a date", issues=(issue,))


def needs_workspace(config: Document) -> bool:
    """Whether the config names a rollout, whose code stands in a repository."""
    experiment = config.get("experiment")
    return isinstance(experiment, dict) and bool(experiment.get("rollout"))
