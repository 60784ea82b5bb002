"""The triggers of a repository: `headrace.toml`, with the keys of `[[trigger]]`.

The file comes from a repository that is not trusted. Its size is checked before it is parsed, and
everything in it is bounded. All mistakes are reported at once, each with its key.
"""

import difflib
import json
from collections.abc import Iterator
from itertools import islice
from pathlib import PurePosixPath
from typing import Annotated, Any

from pydantic import AfterValidator, Field, StringConstraints, ValidationError

from schemas.config import Section
from schemas.errors import InvalidConfig, Issue
from schemas.specs import Concurrency
from schemas.toml.globs import glob_problem, is_selected
from schemas.toml.mcp_tables import MOST_SERVERS, McpTable
from schemas.toml.name_templates import DEFAULT_TEMPLATE, LONGEST_TEMPLATE, check_template
from schemas.toml.overrides import check_overrides
from schemas.toml.parser import MOST_ISSUES, summarize
from schemas.toml.untrusted import read_untrusted_toml
from schemas.toml.violations import (
    ErrorDetails,
    describe_violation,
    join_key,
    meant_value,
    non_json_issues,
    shorten,
    violation,
)

TRIGGER_FILE = "headrace.toml"
MOST_TRIGGERS = 100
MOST_GLOBS = 50
"""The most patterns in one list."""
MOST_PATH_GLOBS = 500
"""The most patterns in all lists of `paths` together. Each is compared with each changed file."""
LONGEST_CONFIG = 200
BRANCH, TAG = "refs/heads/", "refs/tags/"


def _check_glob(pattern: str) -> str:
    if problem := glob_problem(pattern):
        raise violation(problem)
    return pattern


def _check_config_path(path: str) -> str:
    if len(path.encode()) > LONGEST_CONFIG or not path.isprintable():
        raise violation(f"must be a path of at most {LONGEST_CONFIG} printable characters")
    parts = path.split("/")
    if "\\" in path or path.startswith("/") or {"", ".", ".."} & set(parts):
        raise violation("must be a path inside of the repository, such as configs/training/x.toml")
    if not path.endswith(".toml") or parts[-1] == ".toml":
        raise violation("must be the path of a .toml file")
    return path


Pattern = Annotated[str, AfterValidator(_check_glob)]
Patterns = Annotated[tuple[Pattern, ...], Field(min_length=1, max_length=MOST_GLOBS)]


class Trigger(Section):
    """A push that matches a trigger starts a run. Patterns are globs: `*` matches within a folder, `**`
    matches across folders, and `!` excludes. The last pattern that matches decides."""

    config: Annotated[str, AfterValidator(_check_config_path)]
    """the training TOML of the run, as a path in the repository"""
    branches: Patterns | None = None
    """patterns of branches; without `branches` and `tags`, every branch matches and no tag"""
    tags: Patterns | None = None
    """patterns of tags; with only `tags`, no branch matches"""
    paths: Patterns | None = None
    """patterns of files, of which at least one must have changed; default: any push"""
    name: Annotated[
        str,
        StringConstraints(min_length=1, max_length=LONGEST_TEMPLATE),
        AfterValidator(check_template),
    ] = DEFAULT_TEMPLATE
    """the name of the run, with the fields `{workspace}`, `{branch}`, `{tag}`, `{ref}`, `{sha}`,
    `{short_sha}`, `{config}`, `{number}` and `{date}`"""
    set: Annotated[dict[str, Any], AfterValidator(check_overrides)] = Field(default_factory=dict)
    """values that replace those of the TOML, such as `{ "training.lr" = 1e-4 }`"""
    concurrency: Concurrency = "queue"
    """what happens while an earlier run of this trigger and ref has not ended: the new run waits, or
    the earlier run is stopped, or no run follows"""
    max_runs_per_day: int | None = Field(default=None, ge=1, le=10_000)
    """the most runs of this trigger on one day (UTC); default: no limit"""
    require_approval: bool = False
    """the run waits until a person runs `headrace train approve RUN`"""

    @property
    def stem(self) -> str:
        """The name of the config without its folder and suffix."""
        return PurePosixPath(self.config).stem

    def wants_ref(self, ref: str) -> bool:
        """Whether the trigger follows this ref (its full name)."""
        if ref.startswith(TAG):
            return self.tags is not None and is_selected(ref.removeprefix(TAG), self.tags)
        if not ref.startswith(BRANCH):
            return False
        if self.branches is None:
            return self.tags is None
        return is_selected(ref.removeprefix(BRANCH), self.branches)

    def wants_paths(self, changed: tuple[str, ...] | None) -> bool:
        """Whether the trigger follows one of the changed files. None means that all files changed."""
        if self.paths is None or changed is None:
            return True
        return any(is_selected(path, self.paths) for path in changed)


class WorkspaceTable(Section):
    """The code that the rollouts of a workspace share ([rollouts](rollouts.md#packages))."""

    shared: Annotated[
        tuple[Annotated[str, StringConstraints(min_length=1, max_length=200)], ...],
        Field(max_length=16),
    ] = ()
    """the folders with code that all rollouts import"""


class TriggerTables(Section):
    """A whole `headrace.toml`."""

    trigger: Annotated[tuple[Trigger, ...], Field(max_length=MOST_TRIGGERS)] = ()
    mcp: Annotated[tuple[McpTable, ...], Field(max_length=MOST_SERVERS)] = ()
    workspace: WorkspaceTable = WorkspaceTable()


_TABLES: dict[str, type[Section]] = {"mcp": McpTable, "workspace": WorkspaceTable}


def parse_triggers(content: bytes) -> tuple[Trigger, ...]:
    """The triggers of a `headrace.toml`, in order. Raises InvalidConfig with the issues of all keys."""
    document = read_untrusted_toml(content, TRIGGER_FILE)
    issues = list(_document_issues(document))
    try:
        tables = TriggerTables.model_validate_json(json.dumps(document)) if not issues else None
    except ValidationError as error:
        raise _refuse(*_issues(error)) from error
    if tables is None:
        raise _refuse(*issues[:MOST_ISSUES])
    if sum(len(trigger.paths or ()) for trigger in tables.trigger) > MOST_PATH_GLOBS:
        raise _refuse(
            Issue("trigger", f"has more than {MOST_PATH_GLOBS} patterns in paths; use fewer")
        )
    return tables.trigger


def _document_issues(document: dict[str, Any]) -> Iterator[Issue]:
    """Issues that pydantic is not asked about, because it would describe them worse."""
    for name in TriggerTables.model_fields:
        found = document.get(name)
        if name == "workspace":
            if found is not None and not isinstance(found, dict):
                yield Issue(name, "must be one table, [workspace]")
        elif isinstance(found, dict):
            shown = ", ".join(list(found)[:3])[:60]
            yield Issue(name, f"must be [[{name}]] with two brackets, got one table ({shown})")
    yield from non_json_issues("", document)


def _refuse(*issues: Issue) -> InvalidConfig:
    return InvalidConfig(f"invalid {TRIGGER_FILE}: {summarize(issues)}", issues=issues)


def _issues(error: ValidationError) -> tuple[Issue, ...]:
    """The issues of an error. A list whose entries are all wrong is not also too short."""
    found = error.errors(include_url=False)
    above = {part["loc"][:-1] for part in found}
    kept = (part for part in found if part["type"] != "too_short" or part["loc"] not in above)
    return tuple(dict.fromkeys(map(_issue, islice(kept, MOST_ISSUES))))


def _issue(details: ErrorDetails) -> Issue:
    location = tuple(shorten(part) for part in details["loc"])
    key = join_key(location)
    match details["type"], location:
        case "extra_forbidden", (name,):
            close = difflib.get_close_matches(str(name), ["trigger", "mcp", "workspace"], n=1)
            meant = close[0] if close else None
            message = "unrecognized key; a headrace.toml has [workspace], [[trigger]] and [[mcp]]"
            return Issue(key, message, meant)
        case "extra_forbidden", (table, *_, name):
            known = tuple(_TABLES.get(str(table), Trigger).model_fields)
            close = difflib.get_close_matches(str(name), known, n=1)
            message = f"unrecognized key; the keys are: {', '.join(known)}"
            return Issue(key, message, close[0] if close else None)
        case "missing", _:
            return Issue(key, "is missing; add it")
        case _:
            return Issue(key, describe_violation(details), meant_value(details))
