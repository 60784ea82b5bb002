"""Checks TOML texts as far as the text alone allows."""

from collections.abc import Callable, Mapping

from schemas.config import EvalConfig, RunConfig
from schemas.errors import InvalidConfig, Issue
from schemas.toml.config_issues import config_issues
from schemas.toml.parser import parse_eval, parse_run

Parse = Callable[[Mapping[str, object]], RunConfig | EvalConfig]


def run_issues(data: Mapping[str, object]) -> tuple[Issue, ...]:
    """The issues of a training TOML, checked without its dataset and its model."""
    return _issues(parse_run, data)


def eval_issues(data: Mapping[str, object]) -> tuple[Issue, ...]:
    """The issues of an evaluation TOML, checked without its dataset and its model."""
    return _issues(parse_eval, data)


def _issues(parse: Parse, data: Mapping[str, object]) -> tuple[Issue, ...]:
    try:
        return tuple(config_issues(parse(data)))
    except InvalidConfig as error:
        return error.issues
