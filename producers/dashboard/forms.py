"""Reads the forms of pages. Each holds the key of its session."""

from collections.abc import Mapping
from urllib.parse import parse_qsl

from starlette.requests import Request

from infra.identity.sessions import is_form_key
from producers.http.browsers import bearer_of
from schemas.errors import InvalidConfig, Refused

MAX_FORM_BYTES = 1 << 20
MAX_FIELDS = 500
KEY = "form_key"


class ForeignForm(Refused):
    """A form that does not come from a page of this session."""

    code = "FORBIDDEN"
    status = 403


async def read_form(request: Request) -> Mapping[str, str]:
    """The fields of a form; the last of each name. Raises InvalidConfig when the body is not a
    form, or too large."""
    data = bytearray()
    async for chunk in request.stream():
        data += chunk
        if len(data) > MAX_FORM_BYTES:
            raise InvalidConfig(f"the form has more than {MAX_FORM_BYTES} bytes; send less")
    try:
        pairs = parse_qsl(data.decode(), keep_blank_values=True, max_num_fields=MAX_FIELDS)
    except ValueError as error:
        raise InvalidConfig(f"the form cannot be read: {error}; send it from its page") from error
    if any("\0" in value for _, value in pairs):
        raise InvalidConfig("a field of the form holds a NUL character; leave it out")
    return dict(pairs)


async def read_session_form(request: Request) -> Mapping[str, str]:
    """Like `read_form`, for a form that changes something. Raises ForeignForm without its session's
    key."""
    fields = dict(await read_form(request))
    bearer = bearer_of(request.scope.get("state") or {})
    if bearer is None or not is_form_key(fields.pop(KEY, ""), bearer):
        raise ForeignForm("the form does not belong to your session; open its page again")
    return fields
