"""The playground: one question to two deployed models, their answers side by side.

A script streams the answers. Without it the form is sent as a whole, and the page has the answers.
"""

import asyncio
import json
from collections.abc import Mapping, Sequence

from starlette.requests import Request
from starlette.responses import Response

from producers.dashboard.forms import read_session_form
from producers.dashboard.playground_form import (
    SIDES,
    TURNS,
    PlaygroundQuestion,
    PlaygroundTurn,
    parse_question,
    parse_turns,
)
from producers.dashboard.rendering import html
from producers.dashboard.routing import PageRoute
from producers.http.routes.inference import infer
from producers.http.routes.runs import services
from schemas.errors import InvalidConfig, Issue, Refused

SHOWN_ERROR = 2000


async def show(request: Request) -> Response:
    """The form. `left` and `right` in the query choose models."""
    return await _page(request, dict(request.query_params), ())


async def answer(request: Request) -> Response:
    """Ask both models, and show their answers."""
    fields = await read_session_form(request)
    try:
        if fields.get("action") == "clear":
            return await _page(request, {**fields, "question": ""}, ())
        asked = parse_question(fields)
    except Refused as error:
        turns = () if error.issues and error.issues[0].key == "turns" else _turns_of(fields)
        return await _page(request, fields, turns, issues=error.issues, status=error.status)
    texts = await asyncio.gather(*(_ask(request, asked, side) for side in SIDES))
    turn = PlaygroundTurn(question=asked.question, left=texts[0], right=texts[1])
    return await _page(request, {**fields, "question": ""}, (*asked.turns, turn))


async def stream(request: Request) -> Response:
    """The answer of one side as OpenAI's server-sent events."""
    fields = await read_session_form(request)
    side = fields.get("side", "")
    if side not in SIDES:
        raise InvalidConfig(f"side must be one of {', '.join(SIDES)}, got {side[:20]!r}")
    return await infer(request, "chat", parse_question(fields).body(side, stream=True))


async def _ask(request: Request, asked: PlaygroundQuestion, side: str) -> str:
    """The text of an answer, or why there is none."""
    found = await infer(request, "chat", asked.body(side, stream=False))
    data = await _read(found)
    try:
        document = json.loads(data)
        if found.status_code == 200:
            return str(document["choices"][0]["message"]["content"] or "")
        return f"No answer: {document['error']['message']}"[:SHOWN_ERROR]
    except (ValueError, LookupError, TypeError):
        return "No answer: the process that serves broke off; send the question again"


async def _read(found: Response) -> bytes:
    """The whole body of an answer."""
    if not hasattr(found, "body_iterator"):
        return bytes(found.body)
    return b"".join([bytes(chunk) async for chunk in found.body_iterator])


def _turns_of(fields: Mapping[str, str]) -> tuple[PlaygroundTurn, ...]:
    return parse_turns(fields.get("turns", ""))


async def _page(
    request: Request,
    fields: Mapping[str, str],
    turns: Sequence[PlaygroundTurn],
    *,
    issues: tuple[Issue, ...] = (),
    status: int = 200,
) -> Response:
    models = [entry.name for entry in await services(request).model_directory.all_models()]
    values = {
        "models": models,
        "chosen": {
            "left": fields.get("left") or next(iter(models), ""),
            "right": fields.get("right") or next(iter(models[1:]), ""),
        },
        "fields": fields,
        "turns": turns,
        "turns_json": TURNS.dump_json(tuple(turns)).decode(),
        "issues": issues,
    }
    return html(request, "playground.html", values, status=status)


ROUTES = [
    PageRoute("/playground", show, scope="inference"),
    PageRoute("/playground", answer, scope="inference", methods=["POST"]),
    PageRoute("/playground/stream", stream, scope="inference", methods=["POST"]),
]
