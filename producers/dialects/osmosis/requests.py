"""Reads requests of the client: JSON bodies of bounded size as wire models, and pages."""

from collections.abc import Sequence
from typing import TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic_core import to_json
from starlette.requests import Request
from starlette.responses import Response

from infra.readmodel.runs import PageRange
from producers.http.requests import json_object
from producers.http.responses import number
from producers.http.services import Services
from schemas.errors import InvalidConfig, Issue

MOST_IN_PAGE = 50
MOST_LINES = 200


class Wire(BaseModel):
    """A JSON object of the wire. Fields that a newer client adds are ignored."""

    model_config = ConfigDict(frozen=True, extra="ignore", protected_namespaces=())


Body = TypeVar("Body", bound=Wire)


def services(request: Request) -> Services:
    """The services of the application that handles this request."""
    found: Services = request.app.state.services
    return found


async def read_body(request: Request, kind: type[Body]) -> Body:
    """The body of a request. Raises InvalidConfig with an issue for each field that is not valid."""
    values = await json_object(request)
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        issues = tuple(
            Issue(".".join(str(part) for part in one["loc"]), _plain(one["msg"]))
            for one in error.errors(include_url=False, include_input=False)[:20]
        )
        first = issues[0]
        raise InvalidConfig(
            f"the request is not valid: {first.key} {first.message}", issues=issues
        ) from (error)


def page_of(request: Request) -> PageRange:
    """The `limit` and `offset` of a request. Raises InvalidConfig when one is out of range."""
    return PageRange(
        limit=number(request, "limit", default=MOST_IN_PAGE, least=1, most=MOST_IN_PAGE),
        offset=number(request, "offset", default=0, least=0, most=2**31),
    )


def answer(content: Wire, *, status: int = 200) -> Response:
    """A wire model as a response."""
    return _json_response(content, status=status)


def page_answer(
    items: str,
    rows: Sequence[Wire],
    total: int,
    page: PageRange,
    **others: object,
) -> Response:
    """A page of a list, whose items are under the key `items`, and the fields beside it."""
    following = page.offset + len(rows)
    has_more = bool(rows) and following < total
    return _json_response(
        {
            items: rows,
            "total_count": total,
            "has_more": has_more,
            "next_offset": following if has_more else None,
            **others,
        }
    )


def _json_response(content: object, *, status: int = 200) -> Response:
    return Response(to_json(content), status_code=status, media_type="application/json")


def _plain(message: str) -> str:
    return message[:1].lower() + message[1:]
