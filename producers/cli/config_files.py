"""Reads the TOML file of a run or evaluation on the client. Only its syntax is checked here. The server
validates its content, in one place for all clients."""

import json
import sys
import tomllib
from collections.abc import Mapping
from datetime import date, time
from pathlib import Path
from typing import Literal

from producers.cli.display.output import Document
from producers.cli.errors import Failure
from schemas.errors import Issue
from schemas.secrets.rules import SECRET_NAME
from schemas.toml.finite import non_finite_issues

MAX_BYTES = 256 << 10
"""The size of the largest file that is parsed. It is limited because the time to parse grows faster than
the size."""


def read_config(path: Path) -> Document:
    """The file as a JSON object. Raises Failure when it is missing or is not TOML."""
    try:
        if path.stat().st_size > MAX_BYTES:
            message = (
                f"{path} is larger than {MAX_BYTES >> 10} KiB; keep data in a dataset and name that"
            )
            raise Failure("VALIDATION", message, issues=(Issue(str(path), message),))
        text = path.read_text(encoding="utf-8")
        config = tomllib.loads(text)
        _reject_dates(config, path, "")
        json.dumps(config)  # refuses integers of thousands of digits, as `loads` does
    except FileNotFoundError as error:
        raise Failure(
            "NOT_FOUND",
            f"the config file {path} does not exist; give a path like configs/training/run.toml",
        ) from error
    except (ValueError, RecursionError) as error:
        issue = Issue(str(path), str(error))
        raise Failure(
            "VALIDATION", f"{path} is not valid TOML: {error}", issues=(issue,)
        ) from error
    if issues := tuple(non_finite_issues(text, config)):
        first = issues[0]
        raise Failure("VALIDATION", f"{path}: {first.key}: {first.message}", issues=issues)
    return config


def read_secrets(file: str | None) -> dict[str, str]:
    """The secrets in a file of lines NAME=value, or in stdin for `-`; none without a file. Quotes around
    a value are left out, and so are empty lines and comments. Raises Failure, which names a line and
    never shows it."""
    if file is None:
        return {}
    try:
        data = sys.stdin.buffer.read(MAX_BYTES + 1) if file == "-" else Path(file).read_bytes()
        text = data[: MAX_BYTES + 1].decode()
    except OSError as error:
        raise Failure(
            "NOT_FOUND",
            f"the file of secrets {file} cannot be read: {error.strerror}; give another",
        ) from error
    except UnicodeDecodeError:
        raise Failure(
            "VALIDATION", f"{file} is not text in UTF-8; write NAME=value in each line"
        ) from None
    if len(data) > MAX_BYTES:
        raise Failure("VALIDATION", f"{file} is larger than {MAX_BYTES >> 10} KiB; give less")
    found: dict[str, str] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        name, equals, value = line.strip().removeprefix("export ").partition("=")
        if not line.strip() or line.strip().startswith("#"):
            continue
        if not equals or not SECRET_NAME.fullmatch(name.strip()):
            raise Failure(
                "VALIDATION",
                f"line {number} of {file} is not NAME=value with a name of capital letters, digits "
                "and _; write one secret in each line",
            )
        value = value.strip()
        is_quoted = len(value) >= 2 and value[0] == value[-1] and value[0] in "\"'"
        found[name.strip()] = value[1:-1] if is_quoted else value
    return found


def _reject_dates(value: object, path: Path, key: str) -> None:
    """Raises Failure when `value` holds a date. TOML has dates, but JSON does not."""
    if isinstance(value, dict):
        for name, inner in value.items():
            _reject_dates(inner, path, f"{key}.{name}" if key else name)
    elif isinstance(value, list):
        for inner in value:
            _reject_dates(inner, path, key)
    elif isinstance(value, date | time):
        issue = Issue(key, f'put it in quotes: "{value}"')
        raise Failure(
            "VALIDATION",
            f"{path}: {key} = {value} is a date, which is not supported",
            issues=(issue,),
        )


ONLY_IN: Mapping[str, tuple[str, ...]] = {
    "train": ("training", "sampling", "checkpoints"),
    "eval": ("evaluation",),
}
"""The group of commands whose `submit` takes a file -> the sections that only such a file has."""


def check_kind(config: Document, path: Path, *, group: Literal["train", "eval"]) -> None:
    """Raises Failure when the file is one for the other `submit`. A file with sections of both kinds is
    left to the server."""
    other, kind = ("eval", "an evaluation") if group == "train" else ("train", "a training run")
    found = [section for section in ONLY_IN[other] if section in config]
    if found and not any(section in config for section in ONLY_IN[group]):
        raise Failure(
            "VALIDATION",
            f"{path} is the file of {kind}, because it has [{found[0]}]; submit it with "
            f"`headrace {other} submit {path}`",
        )


def needs_workspace(config: Document) -> bool:
    """Whether the config names a rollout, whose code is in a repository."""
    experiment = config.get("experiment")
    return isinstance(experiment, dict) and bool(experiment.get("rollout"))
