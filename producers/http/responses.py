"""Responses: JSON with times in RFC 3339, pages, and RFC 9457 problem documents."""

import json
import math
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from http import HTTPStatus
from uuid import UUID

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from infra.readmodel.runs import PageRange
from schemas.errors import InvalidConfig, Issue, QuotaExceeded, Refused
from schemas.secrets.redact import redact

RETRY_AFTER_S = 1
MAX_LIMIT = 1000
PROJECT = re.compile(r"[a-z0-9][a-z0-9-]{0,62}")
LONGEST_NUMBER = 12


class ApiResponse(JSONResponse):
    """A JSON response whose content may hold times, uuids and tuples. Half of a surrogate pair, which a
    refusal may quote from a request, is written as JSON escapes it."""

    def render(self, content: object) -> bytes:
        return json.dumps(
            content, default=_encode_value, ensure_ascii=False, allow_nan=False
        ).encode(errors="backslashreplace")


def page_response(items: str, rows: Sequence[object], total: int, page: PageRange) -> ApiResponse:
    """One page of a list under the key `items`, with the total count and the offset of the next page."""
    following = page.offset + len(rows)
    more = following < total
    return ApiResponse(
        {
            items: rows,
            "total_count": total,
            "has_more": more,
            "next_offset": following if more else None,
        }
    )


def page_of(request: Request, *, limit: int = 50) -> PageRange:
    """The `limit` and `offset` of a request. Raises InvalidConfig when one is out of range."""
    return PageRange(
        limit=number(request, "limit", default=limit, least=1, most=MAX_LIMIT),
        offset=number(request, "offset", default=0, least=0, most=2**31),
    )


def number(request: Request, name: str, *, default: int, least: int, most: int) -> int:
    """The whole number `name` in the query string, or `default`. Raises InvalidConfig unless it is
    between `least` and `most`."""
    text = request.query_params.get(name)
    if not text:
        return default
    is_short = len(text) <= LONGEST_NUMBER and text.isascii() and text.isdigit()
    if not is_short or not least <= int(text) <= most:
        message = f"must be a whole number from {least} to {most}, got {text[:20]!r}"
        raise InvalidConfig(f"{name} {message}", issues=(Issue(name, message),))
    return int(text)


def flag(request: Request, name: str) -> bool:
    """Whether `name` is "true" in the query string. Raises InvalidConfig for other values than true and
    false."""
    text = request.query_params.get(name) or "false"
    if text not in ("true", "false"):
        message = f"must be true or false, got {text[:20]!r}"
        raise InvalidConfig(f"{name} {message}", issues=(Issue(name, message),))
    return text == "true"


def project_of(request: Request) -> str | None:
    """The project by which a list is narrowed; None for all. Raises InvalidConfig for text that is not
    the key of a project."""
    text = request.query_params.get("project") or None
    if text is not None and not PROJECT.fullmatch(text):
        message = f"must be a key of a-z, 0-9 and '-', at most 63, got {text[:80]!r}"
        raise InvalidConfig(f"project {message}", issues=(Issue("project", message),))
    return text


def problem(
    status: int,
    code: str,
    detail: str,
    *,
    issues: Sequence[Issue] = (),
    headers: Mapping[str, str] | None = None,
    reason: str | None = None,
) -> Response:
    """An RFC 9457 problem document. `reason` tells apart what has the same code."""
    content = {
        "type": "about:blank",
        "title": HTTPStatus(status).phrase,
        "status": status,
        "detail": redact(detail),
        "code": code,
        "issues": [
            {"key": i.key, "message": i.message, "did_you_mean": i.did_you_mean} for i in issues
        ],
    }
    return ApiResponse(
        content if reason is None else {**content, "reason": reason},
        status_code=status,
        headers=dict(headers or {}),
        media_type="application/problem+json",
    )


def refusal_response(error: Refused) -> Response:
    headers = {}
    if isinstance(error, QuotaExceeded):
        headers["Retry-After"] = str(max(1, math.ceil(error.retry_s)))
    return problem(error.status, error.code, error.message, issues=error.issues, headers=headers)


def unavailable_response(detail: str) -> Response:
    """A response with status 503. It means that the same request may succeed soon."""
    headers = {"Retry-After": str(RETRY_AFTER_S)}
    return problem(503, "UNAVAILABLE", detail, headers=headers)


def _encode_value(value: object) -> object:
    if isinstance(value, datetime):
        return value.isoformat().replace("+00:00", "Z")
    if isinstance(value, UUID):
        return str(value)
    raise TypeError(f"{type(value).__name__} has no JSON form")
