"""A form that writes a training TOML, checks it, shows its plan, and submits it."""

import asyncio
import json
import re
import tomllib
from collections.abc import Mapping, Sequence
from uuid import uuid4

import tomli_w
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from infra.ports.actor import Actor
from infra.readmodel.runs import PageRange
from producers.core.estimates import estimate, has_gpu
from producers.core.submit import SubmitRequest
from producers.dashboard.config_form import (
    NUM_RUBRICS,
    REWARDS,
    RUBRIC_KEYS,
    field_names,
    form_sections,
    lost_keys,
    read_toml,
    rubric_field,
    write_toml,
)
from producers.dashboard.forms import read_session_form
from producers.dashboard.rendering import html
from producers.dashboard.routing import PageRoute
from producers.dashboard.run_config import fork_toml
from producers.http.auth import actor_of
from producers.http.routes.runs import services
from schemas.errors import Issue, Refused
from schemas.limits import total_steps
from schemas.models.scratch import SHAPES
from schemas.toml.untrusted import read_untrusted_toml

FIRST_MODEL = "Qwen/Qwen3-0.6B"
FIRST_TOML = f"""\
[experiment]
rollout = "my-rollout"
entrypoint = "main.py"
model_path = "{FIRST_MODEL}"
dataset = "my-dataset"

[training]
n_samples_per_prompt = 8
rollout_batch_size = 16

[advanced]
algorithm = "grpo"
"""
MOST_SUGGESTED = 100
NEWEST_RUNS = 20
MOST_LOST = 50
COMMENT = re.compile(r"(^|\s)#")
"""The beginning of a comment, or of a text that looks like one."""


async def show(request: Request) -> Response:
    """The form. `from` in the query names a checkpoint, whose run's config it begins with."""
    checkpoint = request.query_params.get("from")
    if not checkpoint:
        text, workspace = await _first_toml(request)
        return await _page(
            request, text, {**read_toml(tomllib.loads(text)), "workspace": workspace}
        )
    core = services(request)
    found = await core.lookup.checkpoint(checkpoint)
    row = await core.readmodel.runs.get_run(found.run.run)
    workspace = (row[0]["workspace"] if row else None) or ""
    text = fork_toml(found.run.config.model_dump_json(), found.ref)
    filled = read_toml(tomllib.loads(text))
    return await _page(request, text, {**filled, "workspace": workspace})


async def _first_toml(request: Request) -> tuple[str, str]:
    """The config that the form begins with, and its workspace: the newest dataset, the first rollout of
    the newest workspace that has one, and the model of the newest run, as far as there are any."""
    known = await _known_names(request)
    config = tomllib.loads(FIRST_TOML)
    experiment = config["experiment"]
    for key in ("dataset", "model_path"):
        experiment[key] = next(iter(known[f"experiment.{key}"]), experiment[key])
    workspaces, _ = await services(request).readmodel.registry.workspaces(
        PageRange(limit=MOST_SUGGESTED)
    )
    for one in workspaces:
        for rollout in json.loads(one["rollouts"] or "[]"):
            entrypoint = rollout["entrypoint"]
            experiment["rollout"] = entrypoint["rollout"]
            experiment["entrypoint"] = entrypoint["path"]
            return tomli_w.dumps(config), one["name"]
    return tomli_w.dumps(config), ""


async def answer(request: Request) -> Response:
    """Write the TOML of the fields, check the TOML, or submit it, as the pressed button says."""
    fields = await read_session_form(request)
    text = fields.get("toml", "")
    try:
        if fields.get("action") == "write":
            return await _write(request, fields, text)
        if fields.get("action") == "read":
            read = read_toml(submit_request(fields, text, actor_of(request)).config)
            kept = {key: value for key, value in fields.items() if "." not in key}
            return await _page(request, text, {**kept, **read})
        wanted = submit_request(fields, text, actor_of(request))
        if fields.get("action") == "submit":
            return await _submit(request, wanted, fields)
        plan = await _plan(request, wanted)
    except Refused as error:
        issues = error.issues or (Issue("", error.message),)
        return await _page(request, text, fields, issues=issues, status=error.status)
    return await _page(request, text, fields, plan=plan)


async def _write(request: Request, fields: Mapping[str, str], text: str) -> Response:
    """The form with the TOML of its fields, and what of the text before is not in it."""
    former = submit_request(fields, text, actor_of(request)).config
    written = write_toml(fields, former)
    lost = lost_keys(former, tomllib.loads(written))
    if any(COMMENT.search(line) for line in text.splitlines()):
        lost.append("comments")
    return await _page(request, written, {**fields, **read_toml(tomllib.loads(written))}, lost=lost)


def submit_request(fields: Mapping[str, str], text: str, actor: Actor) -> SubmitRequest:
    """The request in a form. Raises InvalidConfig when its TOML cannot be read."""
    return SubmitRequest(
        config=read_untrusted_toml(text.replace("\r\n", "\n").encode(), "the config"),
        workspace=fields.get("workspace") or None,
        name=fields.get("name") or None,
        submitter=actor.person,
        creator=actor.owner,
    )


async def _submit(request: Request, wanted: SubmitRequest, fields: Mapping[str, str]) -> Response:
    core = services(request)
    # A second press of the button has the same key, so it makes no second run.
    key = f"page/{actor_of(request).api_key}/{fields.get('once', '')[:64]}"
    recorded = await core.submitter.submit_run(wanted, key=key)
    await core.readmodel.caught_up(recorded.cursor)
    return RedirectResponse(f"/runs/{recorded.event.run_id}", status_code=303)


async def _plan(request: Request, wanted: SubmitRequest) -> Mapping[str, object]:
    """The steps of a run, its needs, and its warnings."""
    resolved = await services(request).submitter.try_run(wanted)
    steps = total_steps(resolved.config, resolved.valid.dataset.dataset.num_rows)
    figures = estimate(
        resolved.config,
        resolved.valid.facts.parameters,
        steps=steps,
        gpu=await asyncio.to_thread(has_gpu),
    )
    return {"steps": steps, "figures": figures, "warnings": resolved.valid.warnings}


async def _page(
    request: Request,
    text: str,
    fields: Mapping[str, str],
    *,
    issues: tuple[Issue, ...] = (),
    plan: Mapping[str, object] | None = None,
    lost: Sequence[str] = (),
    status: int = 200,
) -> Response:
    values = {
        "toml": text,
        "fields": fields,
        "sections": form_sections(),
        "issues": issues,
        "wrong": {issue.key: issue for issue in issues},
        "field_names": field_names(),
        "rewards": REWARDS,
        "rubrics": [[rubric_field(n, key) for key in RUBRIC_KEYS] for n in range(NUM_RUBRICS)],
        "known": await _known_names(request),
        "plan": plan,
        "lost": lost[:MOST_LOST],
        "once": fields.get("once") or uuid4().hex,
    }
    return html(request, "new_run.html", values, status=status)


async def _known_names(request: Request) -> Mapping[str, Sequence[str]]:
    """The names that fields suggest: datasets, base models, and the rollouts of workspaces."""
    registry = services(request).readmodel.registry
    everything = PageRange(limit=MOST_SUGGESTED)
    datasets, _ = await registry.datasets(everything)
    workspaces, _ = await registry.workspaces(everything)
    rollouts = {
        str(rollout["entrypoint"]["rollout"])
        for one in workspaces
        for rollout in json.loads(one["rollouts"] or "[]")
    }
    runs, _ = await services(request).readmodel.run_pages.at_offset(PageRange(limit=NEWEST_RUNS))
    models = [*(run["model"] for run in runs), FIRST_MODEL, *(one.model_path for one in SHAPES)]
    return {
        "experiment.dataset": [one["name"] for one in datasets if one["num_rows"] is not None],
        "experiment.model_path": list(dict.fromkeys(models)),
        "experiment.rollout": sorted(rollouts),
        "workspace": [one["name"] for one in workspaces],
    }


ROUTES = [
    PageRoute("/new", show, scope="submit"),
    PageRoute("/new", answer, scope="submit", methods=["POST"]),
]
