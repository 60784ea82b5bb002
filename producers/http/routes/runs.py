"""Runs: submit, list and show them, and send them commands."""

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict

from pydantic import ValidationError
from starlette.requests import Request
from starlette.responses import Response

from infra.costs.ledger import costs_of_runs
from infra.ports.actor import Actor
from infra.readmodel.run_pages import RunFilter, RunKind
from infra.readmodel.runs import RunJson
from infra.readmodel.wait_reasons import (
    WaitJson,
    What,
    wait_for_approval,
    waits_of,
    without_machines,
)
from infra.settings.quotas import SAMPLES
from infra.spine.ports.event_log import Cursor
from producers.core.estimates import estimate, has_gpu, readers_of
from producers.core.history.forks import ForkRequest
from producers.core.lookup import archived_error
from producers.core.submit import Resolved, SubmitRequest
from producers.core.validation.past_costs import past_estimate
from producers.http.auth import actor_of
from producers.http.requests import JsonBody, body_of, cause_of, idempotency_key
from producers.http.responses import ApiResponse, flag, number, page_of, page_response, project_of
from producers.http.routing import ScopedRoute
from producers.http.services import Services
from schemas.costs.budget import Budget
from schemas.costs.prices import Prices
from schemas.errors import InvalidConfig, Issue, TransientError
from schemas.events import EvaluationRequested, Event, RunRequested
from schemas.limits import total_steps

STATUSES = (
    "pending",
    "running",
    "finished",
    "failed",
    "crashed",
    "stopped",
    "killed",
    "unknown",
)
HOLDING: tuple[What, ...] = ("release", "letter", "stalled", "workers")
"""The reasons to wait for which a run may not stop until somebody does something."""


def services(request: Request) -> Services:
    """The services of the application that handles this request."""
    found: Services = request.app.state.services
    return found


def request_from(body: JsonBody, actor: Actor) -> SubmitRequest:
    """The submit request in a JSON body of an actor. Raises InvalidConfig when a field is not valid."""
    return SubmitRequest(
        config=body.table("config"),
        workspace=body.optional("workspace"),
        name=body.optional("name"),
        start=body.optional("from"),
        submitter=actor.person,
        creator=actor.owner,
        given=body.secrets("secrets"),
    )


async def submit(request: Request) -> Response:
    body = await body_of(request, ("config", "workspace", "name", "from", "secrets", "dry_run"))
    core = services(request).submitter
    if body.flag("dry_run"):
        return ApiResponse(await _dry_run(request, request_from(body, actor_of(request))))
    wanted = request_from(body, actor_of(request))
    recorded = await core.submit_run(wanted, key=idempotency_key(request))
    run = recorded.event.run_id
    made = await run_json(request, run, after=recorded.cursor)
    return ApiResponse({"run": made, "warnings": warnings_of(recorded.event)}, status_code=201)


def warnings_of(event: Event) -> tuple[str, ...]:
    """The warnings that were recorded when a run or evaluation was requested. Empty for other events."""
    return event.warnings if isinstance(event, RunRequested | EvaluationRequested) else ()


async def _dry_run(request: Request, wanted: SubmitRequest) -> Mapping[str, object]:
    resolved = await services(request).submitter.try_run(wanted)
    steps = total_steps(resolved.config, resolved.valid.dataset.dataset.num_rows)
    return {
        "config": resolved.config.model_dump(mode="json"),
        "total_steps": steps,
        "estimates": await _estimate(request, resolved, steps=steps),
        "issues": [],
        "warnings": resolved.valid.warnings,
    }


async def _estimate(request: Request, resolved: Resolved, *, steps: int) -> Mapping[str, object]:
    core = services(request)
    figures = estimate(
        resolved.config,
        resolved.valid.facts.parameters,
        steps=steps,
        readers=await readers_of(resolved.config, resolved.valid, core.lookup),
        gpu=await asyncio.to_thread(has_gpu),
    )
    past = await core.readmodel.costs.runs_of_model(resolved.config.experiment.model_path)
    prices = Prices.of(core.settings.prices)
    found = past_estimate(resolved.config, past, steps=steps, prices=prices)
    return {**figures, "past": found} if found else figures


FORK_FIELDS = (
    *("at", "set", "config", "commit", "seed", "replay_samples", "name", "secrets", "dry_run"),
)


async def fork(request: Request) -> Response:
    """Fork a run at a step or an event, or say what a fork would change."""
    body, actor, core = await body_of(request, FORK_FIELDS), actor_of(request), services(request)
    has_seed, dry_run = body.values.get("seed") is not None, body.flag("dry_run")
    wanted = ForkRequest(
        parent=request.path_params["ref"],
        at=body.text("at"),
        changes=body.table("set") if body.values.get("set") is not None else {},
        config=body.table("config") if body.values.get("config") is not None else None,
        commit=body.optional("commit"),
        seed=body.integer("seed", default=0, least=0, most=2**31 - 1) if has_seed else None,
        replay_samples=body.flag("replay_samples"),
    )
    sender = SubmitRequest(
        {},
        name=body.optional("name"),
        submitter=actor.person,
        creator=actor.owner,
        given=body.secrets("secrets"),
    )
    planned = await core.forks.plan(wanted, sender, dry_run=dry_run)
    answer: dict[str, object] = {
        "fork": {
            "parent": planned.parent.run,
            "parent_name": planned.parent.run_name,
            "step": planned.point.step,
            "total_steps": planned.total_steps,
            "changes": [asdict(change) for change in planned.changes],
            "notes": planned.notes,
            "replayed_up_to": planned.replayed_up_to,
        },
        "warnings": planned.resolved.valid.warnings,
    }
    if dry_run:
        steps = planned.total_steps - planned.point.step
        config = planned.resolved.config.model_dump(mode="json")
        estimates = await _estimate(request, planned.resolved, steps=steps)
        return ApiResponse({**answer, "config": config, "estimates": estimates})
    recorded = await core.forks.submit(planned, key=idempotency_key(request))
    made = await run_json(request, recorded.event.run_id, after=recorded.cursor)
    return ApiResponse({"run": made, **answer}, status_code=201)


async def diff(request: Request) -> Response:
    """The differences of two runs."""
    ref, other = request.path_params["ref"], request.path_params["other"]
    return ApiResponse({"diff": await services(request).run_diffs.diff(ref, other)})


async def forks(request: Request) -> Response:
    """A page of the forks of a run, the oldest first."""
    run, _ = await find_run(request)
    page = page_of(request)
    found, total = await services(request).readmodel.run_pages.forks(run["id"], page)
    return page_response("runs", found, total, page)


async def run_json(
    request: Request, run: str, *, after: Cursor | None = None
) -> Mapping[str, object]:
    """A run with its config. With `after`, wait until the read model has reached this cursor. Raises
    NotFound."""
    readmodel = services(request).readmodel
    if after is not None:
        await readmodel.caught_up(after)
    found = await readmodel.runs.get_run(run)
    if found is not None:
        return {**found[0], "config": json.loads(found[1])}
    requested = await services(request).lookup.run(run)
    return {"id": requested.run, "name": requested.run_name, "status": "pending", "phase": "init"}


async def find_run(request: Request) -> tuple[RunJson, str]:
    """The run that the request's path names, and its config as JSON text. Raises NotFound when there is
    no such run, and TransientError while the read model does not have it yet."""
    ref = request.path_params["ref"]
    found = await services(request).readmodel.runs.get_run(ref)
    if found is None:
        await services(request).lookup.run(ref)
        raise TransientError(f"run {ref} is not in the read model yet; try again")
    return found


async def find_run_with_history(request: Request) -> tuple[RunJson, str]:
    """Like `find_run`, for requests that need the run's history. Also raises Conflict when the history
    is archived."""
    run, config = await find_run(request)
    if run["archived_at"] is not None:
        raise archived_error(run["name"])
    return run, config


async def show(request: Request) -> Response:
    run, config = await find_run(request)
    runs = services(request).readmodel.runs
    waits = await waiting_for(request, run["id"], status=run["status"])
    if run["status"] == "pending" and run["phase"] == "approval":
        waits = [wait_for_approval(run["name"])]
    return ApiResponse(
        {
            "run": {**run, "config": json.loads(config)},
            "waiting_for": waits,
            "checkpoints": await runs.checkpoints(run["id"]),
            "metrics": await runs.metrics(run["id"]),
            "cost": (await costs_of(request, [run])).get(run["id"]),
        }
    )


async def waiting_for(
    request: Request, run: str | None, *, status: str = "running"
) -> list[WaitJson]:
    """The reasons why a run waits. With `run` None, the reasons for all runs of the platform. To
    an actor of one organisation or workspace they name no machine."""
    if status not in ("pending", "running", "unknown"):
        return []
    core = services(request)
    bus = await core.readmodel.platform.bus("kafka") if core.settings.kafka else None
    facts = await core.readmodel.waits.facts(
        run,
        kafka_behind=bus["relay_behind"] if bus else None,
        directories=core.settings.directories,
        most_samples=core.settings.quotas.get(SAMPLES),
    )
    return waits_of(without_machines(facts) if actor_of(request).is_confined else facts)


async def index(request: Request) -> Response:
    status = request.query_params.get("status")
    if status and status not in STATUSES:
        message = f"must be one of {', '.join(STATUSES)}, got {status!r}"
        raise InvalidConfig(f"status {message}", issues=(Issue("status", message),))
    page = page_of(request)
    found = RunFilter(
        status=status or None,
        search=request.query_params.get("search") or None,
        kind=RunKind(tag=request.query_params.get("tag") or None, project=project_of(request)),
        archived=flag(request, "archived"),
    )
    runs, total = await services(request).readmodel.run_pages.at_offset(page, found)
    if not flag(request, "cost"):
        return page_response("runs", runs, total, page)
    costs = await costs_of(request, runs)
    with_costs = [{**run, "cost": costs.get(run["id"])} for run in runs]
    return page_response("runs", with_costs, total, page)


async def costs_of(request: Request, runs: Sequence[RunJson]) -> Mapping[str, Mapping[str, object]]:
    """The costs of these runs, for those that have cost anything yet."""
    core = services(request)
    prices = Prices.of(core.settings.prices)
    return await costs_of_runs(core.readmodel.costs, [run["id"] for run in runs], prices)


async def metrics(request: Request) -> Response:
    run, _ = await find_run_with_history(request)
    return ApiResponse({"metrics": await services(request).readmodel.runs.metrics(run["id"])})


async def checkpoints(request: Request) -> Response:
    run, _ = await find_run(request)
    return ApiResponse(
        {"checkpoints": await services(request).readmodel.runs.checkpoints(run["id"])}
    )


async def logs(request: Request) -> Response:
    run, _ = await find_run_with_history(request)
    return await log_page(request, run["id"])


async def log_page(request: Request, owner: str) -> Response:
    """A page of the log lines of a run or an evaluation."""
    direction = request.query_params.get("direction") or "older"
    if direction not in ("older", "newer"):
        raise InvalidConfig(f"direction must be older or newer, got {direction[:20]!r}")
    try:
        lines, following = await services(request).readmodel.runs.logs(
            owner,
            limit=number(request, "limit", default=50, least=1, most=1000),
            cursor=request.query_params.get("cursor") or None,
            older=direction == "older",
        )
    except ValueError as error:
        raise InvalidConfig(
            "cursor is not one of this API; use one that a former answer gave"
        ) from error
    return ApiResponse({"logs": lines, "next_cursor": following})


async def command(request: Request) -> Response:
    ref = request.path_params["ref"]
    verb = request.url.path.rpartition("/")[2]
    body = await body_of(request, ("raise",) if verb == "resume" else ())
    run, cursor = await services(request).control.run(
        verb, ref, cause=cause_of(request, f"control/{verb}/{ref}"), raised=_raised_budget(body)
    )
    answer: dict[str, object] = {"run": await run_json(request, run, after=cursor)}
    if verb == "stop":
        waits = await waiting_for(request, run)
        answer["waiting_for"] = [wait for wait in waits if wait["what"] in HOLDING]
    return ApiResponse(answer)


def _raised_budget(body: JsonBody) -> Budget | None:
    """The limits of a budget that are raised; None for none. Raises InvalidConfig."""
    if body.values.get("raise") is None:
        return None
    try:
        return Budget.model_validate(body.table("raise"))
    except ValidationError as error:
        issues = tuple(
            Issue(".".join(("raise", *map(str, one["loc"]))), one["msg"]) for one in error.errors()
        )
        known = "max_cost, max_tokens and max_hours are positive numbers"
        raise InvalidConfig(f"raise is not a budget: {known}", issues=issues) from error


async def approve(request: Request) -> Response:
    await body_of(request, ())
    run, cursor = await services(request).approvals.approve(request.path_params["ref"])
    return ApiResponse({"run": await run_json(request, run, after=cursor)})


async def tag(request: Request) -> Response:
    """Add tags to a run, and remove tags from it."""
    body = await body_of(request, ("add", "remove"))
    run = await services(request).notes.tag(
        request.path_params["ref"], add=body.texts("add"), remove=body.texts("remove")
    )
    return ApiResponse({"run": await run_json(request, run)})


async def write_note(request: Request) -> Response:
    """Replace the note on a run. An empty one removes it."""
    body = await body_of(request, ("note",))
    text = body.values.get("note")
    if not isinstance(text, str):
        message = "must be a string; an empty one removes the note"
        raise InvalidConfig(f"note {message}", issues=(Issue("note", message),))
    run = await services(request).notes.write(request.path_params["ref"], text)
    return ApiResponse({"run": await run_json(request, run)})


ROUTES = [
    ScopedRoute("/runs", submit, scope="submit", methods=["POST"]),
    ScopedRoute("/runs", index, scope="read"),
    ScopedRoute("/runs/{ref}", show, scope="read"),
    ScopedRoute("/runs/{ref}/metrics", metrics, scope="read"),
    ScopedRoute("/runs/{ref}/checkpoints", checkpoints, scope="read"),
    ScopedRoute("/runs/{ref}/logs", logs, scope="read"),
    ScopedRoute("/runs/{ref}/fork", fork, scope="submit", methods=["POST"]),
    ScopedRoute("/runs/{ref}/forks", forks, scope="read"),
    ScopedRoute("/runs/{ref}/diff/{other}", diff, scope="read"),
    ScopedRoute("/runs/{ref}/tags", tag, scope="control", methods=["POST"]),
    ScopedRoute("/runs/{ref}/note", write_note, scope="control", methods=["PUT"]),
    ScopedRoute("/runs/{ref}/approve", approve, scope="control", methods=["POST"]),
    *(
        ScopedRoute(f"/runs/{{ref}}/{verb}", command, scope="control", methods=["POST"], name=verb)
        for verb in ("stop", "pause", "resume")
    ),
]
