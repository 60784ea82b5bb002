"""Checkpoints: their manifest, their files, comparisons, uploads to a hub, and a chat with one.

The API holds no model. A device worker samples a chat, and the API reaches it through the internal
endpoint of the worker's gateway.
"""

import json
from collections.abc import Mapping
from typing import cast

import httpx
from pydantic import TypeAdapter, ValidationError
from starlette.requests import Request
from starlette.responses import Response

from infra.readmodel.checkpoints import HubUploadJson, ListedCheckpointJson
from infra.readmodel.worker_chats import WorkerAddress, WorkerChats
from infra.spine.ports.event_log import Cursor
from producers.core.lookup import Checkpoint
from producers.core.models.comparison import compare_checkpoints
from producers.core.models.hub_upload import SEED, TOKEN, WantedUpload
from producers.http.auth import actor_of
from producers.http.downloads import download
from producers.http.requests import JsonBody, body_of, cause_of
from producers.http.responses import ApiResponse, page_of, page_response
from producers.http.routes.runs import services
from producers.http.routing import ScopedRoute
from schemas.deployments import HubUpload, checkpoint_name, shown_base_name
from schemas.errors import InvalidConfig, Issue, NotFound, TransientError
from schemas.sampling import (
    DrawKey,
    Message,
    PolicyRef,
    SampleRequest,
    SamplingParams,
    Turn,
)

MESSAGES = TypeAdapter(tuple[Message, ...])
CHAT_S = 300.0
MAX_TOKENS = 8192

OLD_SEGMENT = "pushes"
"""The end of the path before uploads were called so. It is answered for one release, with old names."""


async def index(request: Request) -> Response:
    """A page of the checkpoints of all runs, or of those that trained adapters (`tuning=lora`) or all
    weights (`tuning=full`)."""
    page = page_of(request)
    tuning = request.query_params.get("tuning") or None
    if tuning not in (None, "lora", "full"):
        raise InvalidConfig(f"tuning must be lora or full, got {tuning[:20]!r}")
    pages = services(request).readmodel.checkpoint_pages
    rows, total = await pages.page(page, tuning=tuning)
    return page_response("checkpoints", [checkpoint_json(row) for row in rows], total, page)


def checkpoint_json(row: ListedCheckpointJson) -> Mapping[str, object]:
    """A checkpoint of a list. `name` names it as a model, and `model` is its base model."""
    name = checkpoint_name(row["run_name"], row["step"])
    return {**row, "name": name, "model": shown_base_name(row["model"])}


async def show(request: Request) -> Response:
    checkpoint = await _find_checkpoint(request)
    files = checkpoint.files()
    return ApiResponse(
        {
            "checkpoint": {
                "run": checkpoint.run.run,
                "step": checkpoint.spec.step,
                "ref": checkpoint.ref,
                "reward": checkpoint.saved.reward,
                "uri": checkpoint.saved.manifest.uri,
                "manifest_sha256": checkpoint.saved.manifest.sha256,
                "adapter_sha256": checkpoint.saved.adapter_sha256,
                "created_at": checkpoint.at,
                "files": [
                    {"name": name, "size": files[name].size, "sha256": files[name].sha256}
                    for name in sorted(files)
                ],
                "manifest": await _manifest(request, checkpoint),
            }
        }
    )


async def _manifest(request: Request, checkpoint: Checkpoint) -> Mapping[str, object]:
    data = await services(request).artifacts.get_artifact(checkpoint.saved.manifest)
    return cast(Mapping[str, object], json.loads(data))


async def file(request: Request) -> Response:
    checkpoint, name = await _find_checkpoint(request), request.path_params["name"]
    files = checkpoint.files()
    if name not in files:
        known = ", ".join(sorted(files))
        raise NotFound(f"{checkpoint.ref} has no file {name!r}; it has: {known}")
    return await download(request, files[name], name)


async def compare(request: Request) -> Response:
    """Two checkpoints: held-out rewards, rows that changed, settings that differ."""
    core = services(request)
    first = await _find_checkpoint(request)
    second = await core.lookup.checkpoint(request.path_params["other"])
    return ApiResponse(
        await compare_checkpoints(first, second, evaluations=core.readmodel.evaluations)
    )


async def uploads(request: Request) -> Response:
    """The uploads of a checkpoint to model hubs, the newest first."""
    found = await _find_checkpoint(request)
    rows = await services(request).readmodel.hub_uploads.of(found.run.run, step=found.spec.step)
    field = "pushes" if _is_of_old_path(request) else "uploads"
    return ApiResponse({field: [_to_json(request, row) for row in rows]})


async def upload(request: Request) -> Response:
    """Upload a checkpoint to a model hub. It is private unless `private` is false."""
    body = await body_of(request, ("repository", "merged", "private", "secret"))
    core = services(request)
    asked = WantedUpload(
        ref=request.path_params["ref"],
        repository=body.text("repository"),
        merged=body.flag("merged"),
        private="private" not in body.values or body.flag("private"),
        secret=body.optional("secret") or TOKEN,
        submitter=actor_of(request).person,
    )
    made, cursor = await core.hub_uploads.request(asked, cause=cause_of(request, SEED))
    return await _upload_at(request, made, cursor)


async def cancel_upload(request: Request) -> Response:
    """Give up an upload that has not ended."""
    path, uploads = request.path_params, services(request).hub_uploads
    cause = cause_of(request, f"{SEED}-cancel")
    asked, cursor = await uploads.cancel(path["ref"], upload=path["upload"], cause=cause)
    return await _upload_at(request, asked, cursor)


async def _upload_at(request: Request, made: HubUpload, cursor: Cursor) -> Response:
    """An upload once the read model has the request at `cursor`."""
    readmodel = services(request).readmodel
    await readmodel.caught_up(cursor)
    rows = await readmodel.hub_uploads.of(made.run, step=made.step)
    row = next((row for row in rows if row["id"] == made.upload), None)
    shown = {"id": made.upload, "ref": made.ref} if row is None else _to_json(request, row)
    field = "push" if _is_of_old_path(request) else "upload"
    return ApiResponse({field: shown}, status_code=202)


def _is_of_old_path(request: Request) -> bool:
    return OLD_SEGMENT in request.url.path.split("/")


def _to_json(request: Request, row: HubUploadJson) -> Mapping[str, object]:
    is_old = _is_of_old_path(request) and row["status"] == "uploaded"
    return {**row, "status": "pushed"} if is_old else row


async def chat(request: Request) -> Response:
    """One answer of the checkpoint's policy."""
    body = await body_of(request, ("messages", "temperature", "max_tokens"))
    checkpoint = await _find_checkpoint(request)
    sample_request = SampleRequest(
        model=checkpoint.model(),
        policy=PolicyRef(version=0),
        params=_sampling_params(body).model_copy(update={"date": checkpoint.run.today}),
        key=DrawKey(purpose="chat", step=0, slot=0, replacement=0, sample=0),
        messages=_chat_messages(body),
    )
    chats = services(request).readmodel.chats
    workers = await chats.find_addresses()
    if not workers:
        raise TransientError(
            "no device worker is running; start one, `headrace status` shows what runs"
        )
    turn = await _sample_turn(chats, workers[0], sample_request)
    prompt, completion = len(turn.prompt_ids), len(turn.completion_ids)
    return ApiResponse(
        {
            "message": {"role": "assistant", "content": turn.text},
            "usage": {
                "prompt_tokens": prompt,
                "completion_tokens": completion,
                "total_tokens": prompt + completion,
            },
            "finish_reason": turn.finish_reason,
        }
    )


async def _sample_turn(
    chats: WorkerChats, worker: WorkerAddress, sample_request: SampleRequest
) -> Turn:
    """Send the request to a worker and return its turn. Raises TransientError when the worker does not
    answer, and InvalidConfig when it refuses the request."""
    key = await chats.grant(worker.worker)
    try:
        async with httpx.AsyncClient(timeout=CHAT_S, trust_env=False) as client:
            answer = await client.post(
                worker.url,
                content=sample_request.model_dump_json(),
                headers={
                    "Authorization": f"Bearer {key}",
                    "Content-Type": "application/json",
                },
            )
    except httpx.TransportError as error:
        raise TransientError(f"worker {worker.worker} does not answer; try again") from error
    if answer.is_success:
        return Turn.model_validate_json(answer.content)
    detail = answer.text[:500]
    if answer.status_code == 400:
        raise InvalidConfig(f"the worker refused the chat: {detail}")
    raise TransientError(
        f"worker {worker.worker} could not sample ({answer.status_code}): {detail}"
    )


def _sampling_params(body: JsonBody) -> SamplingParams:
    most = body.number("max_tokens", default=256, least=1, most=MAX_TOKENS)
    return SamplingParams(
        temperature=body.number("temperature", default=0.0, least=0, most=2),
        max_new_tokens=int(most),
    )


def _chat_messages(body: JsonBody) -> tuple[Message, ...]:
    try:
        messages = MESSAGES.validate_python(body.values.get("messages"))
    except ValidationError as error:
        message = "must be a list of {role: system | user | assistant | tool, content: text}"
        issue = Issue("messages", message)
        raise InvalidConfig(f"messages {message}", issues=(issue,)) from error
    if not messages:
        raise InvalidConfig(
            "messages must not be empty", issues=(Issue("messages", "must not be empty"),)
        )
    return messages


async def _find_checkpoint(request: Request) -> Checkpoint:
    return await services(request).lookup.checkpoint(request.path_params["ref"])


ROUTES = [
    ScopedRoute("/checkpoints", index, scope="read"),
    ScopedRoute("/checkpoints/{ref}", show, scope="read"),
    ScopedRoute("/checkpoints/{ref}/compare/{other}", compare, scope="read"),
    *(
        route
        for segment in ("uploads", OLD_SEGMENT)
        for route in (
            ScopedRoute(f"/checkpoints/{{ref}}/{segment}", uploads, scope="read"),
            ScopedRoute(
                f"/checkpoints/{{ref}}/{segment}", upload, scope="control", methods=["POST"]
            ),
            ScopedRoute(
                f"/checkpoints/{{ref}}/{segment}/{{upload}}",
                cancel_upload,
                scope="control",
                methods=["DELETE"],
            ),
        )
    ),
    ScopedRoute("/checkpoints/{ref}/files/{name:path}", file, scope="read"),
    ScopedRoute("/checkpoints/{ref}/chat", chat, scope="inference", methods=["POST"]),
]
