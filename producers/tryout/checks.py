"""The checks of `headrace rollout validate`: everything that a sync and a submit would say."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from consumers.process.tryout import Tryout, rollout_ref
from headrace.tools.mcp_config import InvalidMcpConfig, mcp_servers
from producers.tryout import plan
from producers.tryout.request import TryoutRequest
from producers.tryout.working_tree import snapshot_of
from schemas.config import RunConfig
from schemas.errors import Issue, NotFound, Refused
from schemas.limits import batch_size
from schemas.specs import DiscoveredRollout, Entrypoint
from schemas.toml.config_issues import config_issues
from schemas.toml.generated_tasks import is_generated

Status = Literal["ok", "problem", "note"]


@dataclass(frozen=True, slots=True)
class RolloutCheck:
    """One thing that was checked, and what was found."""

    what: str
    status: Status
    message: str

    def document(self) -> dict[str, object]:
        return asdict(self)


async def check_rollout(request: TryoutRequest, tryout: Tryout) -> AsyncIterator[RolloutCheck]:
    """Every check of a rollout, as soon as it is made. None of them raises: a fault is in the
    result."""
    try:
        config = plan.parse_config(request)
    except Refused as error:
        for check in _problems("config", error):
            yield check
        config = None
    if config is not None:
        found = _config_checks(request, config)
        for check in found:
            yield check
    async for check in _code_checks(request, tryout, config):
        yield check
    if config is not None:
        for check in await asyncio.to_thread(_dataset_checks, request, config):
            yield check


def _problems(what: str, error: Refused) -> Iterator[RolloutCheck]:
    issues = error.issues or (Issue("", error.message),)
    for issue in issues:
        text = f"{issue.key}: {issue.message}" if issue.key else issue.message
        yield RolloutCheck(what, "problem", text)


def _config_checks(request: TryoutRequest, config: plan.Config) -> list[RolloutCheck]:
    where = request.config_path or "no config; the defaults are used"
    issues = list(config_issues(config))
    found = [RolloutCheck("config", "problem", f"{i.key}: {i.message}") for i in issues]
    if not issues:
        found.append(RolloutCheck("config", "ok", where))
    return found


async def _code_checks(
    request: TryoutRequest, tryout: Tryout, config: plan.Config | None
) -> AsyncIterator[RolloutCheck]:
    entrypoint = plan.entrypoint_of(request, config)
    try:
        snapshot = await asyncio.to_thread(snapshot_of, request.workspace)
        discovered = await tryout.discover(snapshot, [entrypoint])
        found = next((one for one in discovered if one.entrypoint == entrypoint), None)
        if config is not None:
            rollout_ref(config, entrypoint, discovered, await tryout.store(snapshot))
    except Refused as error:
        for check in _problems("code", error):
            yield check
        return
    if found is None or found.error is not None:
        why = found.error if found else f"there is no {_path(entrypoint)}"
        yield RolloutCheck("code", "problem", str(why))
        return
    yield RolloutCheck("code", "ok", f"{_path(entrypoint)} has {_definitions(found)}")
    yield _packages_check(found)
    for check in await asyncio.to_thread(_mcp_checks, request.workspace, found):
        yield check


def _packages_check(found: DiscoveredRollout) -> RolloutCheck:
    """How many packages the code was imported with."""
    if found.environment is None:
        return RolloutCheck("packages", "ok", "none; it uses the standard library and the SDK")
    count, python = found.environment.packages, found.environment.python
    return RolloutCheck("packages", "ok", f"{count} installed, for Python {python}")


def _mcp_checks(workspace: Path, found: DiscoveredRollout) -> Iterator[RolloutCheck]:
    """Whether the MCP servers of the workspace can be read, and which of them the rollout uses."""
    try:
        known = mcp_servers(workspace)
    except InvalidMcpConfig as error:
        yield RolloutCheck("mcp", "problem", str(error))
        return
    for server in known:
        program = server.command[0] if server.command else ""
        is_file = "/" in program and not program.startswith("/")
        if is_file and not (workspace / program).is_file():
            yield RolloutCheck("mcp", "problem", f"{server.name}: there is no file {program}")
            return
    if known:
        unused = [server.name for server in known if server.name not in found.mcp]
        text = f"uses {', '.join(found.mcp) or 'none'}"
        more = f"; not used: {', '.join(unused)}" if unused else ""
        yield RolloutCheck("mcp", "ok", f"{text}{more}. They are first started by a run")


def _path(entrypoint: Entrypoint) -> str:
    return f"rollouts/{entrypoint.rollout}/{entrypoint.path}"


def _definitions(found: DiscoveredRollout) -> str:
    if found.kind == "server":
        return "a rollout server, which is first started by a run"
    named = [
        f"workflow {found.workflow}" if found.workflow else "no workflow",
        f"grader {found.grader}" if found.grader else "no grader",
    ]
    if found.rewards:
        named.append(f"rewards {', '.join(found.rewards)}")
    if found.tools:
        named.append(f"tools {', '.join(found.tools)}")
    return ", ".join(named)


def _dataset_checks(request: TryoutRequest, config: plan.Config) -> list[RolloutCheck]:
    try:
        path = plan.dataset_path(request, config)
    except NotFound as error:
        if not is_generated(config.experiment.dataset):
            return list(_problems("dataset", error))
        text = f"a submit generates the rows; to try the rollout before: {error}"
        return [RolloutCheck("dataset", "note", text)]
    except Refused as error:
        return list(_problems("dataset", error))
    try:
        file = plan.read_dataset(path)
        plan.check_rows(file)
    except Refused as error:
        return list(_problems("dataset", error))
    columns = ", ".join(file.report.columns)
    checks = [RolloutCheck("dataset", "ok", f"{file.path.name}: {len(file.rows)} rows, {columns}")]
    if isinstance(config, RunConfig) and batch_size(config) > len(file.rows):
        text = (
            f"training.rollout_batch_size is {batch_size(config)}, and {file.path.name} has only "
            f"{len(file.rows)} rows; use a smaller batch or more rows"
        )
        checks.append(RolloutCheck("dataset", "problem", text))
    return checks
