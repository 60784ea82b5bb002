"""Reads request bodies. A body is a JSON object of bounded size. It is read field by field, and unknown
fields are refused."""

import difflib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn
from uuid import UUID, uuid4

from starlette.requests import Request

from infra.ports.actor import acting
from schemas.errors import InvalidConfig, Issue
from schemas.ids import HEADRACE, derive_id
from schemas.secrets.secret_value import SecretValue

MAX_JSON_BYTES = 1 << 20
NOT_TEXT = re.compile("[\0\ud800-\udfff]")
"""Characters that JSON can escape, and that Postgres or UTF-8 cannot hold."""

KEY = re.compile(r"^[\x21-\x7e]{1,200}$")


@dataclass(frozen=True, slots=True)
class JsonBody:
    """The JSON object of a request. Each method returns the value of one field, and raises InvalidConfig
    with the field's name when the value is not valid."""

    values: Mapping[str, object]

    def text(self, name: str) -> str:
        value = self.optional(name)
        if value is None:
            raise _invalid_field(name, "is missing; it must be a string")
        return value

    def optional(self, name: str) -> str | None:
        value = self.values.get(name)
        if value is not None and (
            not isinstance(value, str) or not value or NOT_TEXT.search(value)
        ):
            raise _invalid_field(name, f"must be a string that is not empty, got {value!r:.40}")
        return value

    def table(self, name: str) -> Mapping[str, object]:
        value = self.values.get(name)
        if not isinstance(value, dict):
            raise _invalid_field(name, "is missing; it must be an object")
        return value

    def texts(self, name: str) -> tuple[str, ...]:
        """A list of strings; empty when it is missing."""
        value = self.values.get(name, [])
        if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
            raise _invalid_field(name, f"must be a list of strings, got {value!r:.40}")
        return tuple(value)

    def secrets(self, name: str) -> Mapping[str, SecretValue]:
        """Secrets by name; empty when the field is missing. No error shows a value."""
        value = self.values.get(name, {})
        if not isinstance(value, dict) or not all(isinstance(one, str) for one in value.values()):
            message = "must be an object with a string for each name of a secret"
            raise InvalidConfig(f"{name} {message}", issues=(Issue(name, message),))
        return {key: SecretValue(text) for key, text in value.items()}

    def flag(self, name: str) -> bool:
        value = self.values.get(name, False)
        if not isinstance(value, bool):
            raise _invalid_field(name, f"must be true or false, got {value!r:.40}")
        return value

    def number(self, name: str, *, default: float, least: float, most: float) -> float:
        value = self.values.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise _invalid_field(name, f"must be a number, got {value!r:.40}")
        if not least <= value <= most:
            raise _invalid_field(name, f"must be from {least:g} to {most:g}, got {value!r:.40}")
        return value

    def integer(self, name: str, *, default: int, least: int, most: int) -> int:
        """A whole number. Raises InvalidConfig."""
        value = self.number(name, default=default, least=least, most=most)
        if value != int(value):
            raise _invalid_field(name, f"must be a whole number, got {value!r:.40}")
        return int(value)

    def optional_number(self, name: str, *, least: float, most: float) -> float | None:
        """A number; None when it is missing or null. Raises InvalidConfig."""
        if self.values.get(name) is None:
            return None
        return self.number(name, default=least, least=least, most=most)

    def optional_integer(self, name: str, *, least: int, most: int) -> int | None:
        """A whole number; None when it is missing or null. Raises InvalidConfig."""
        if self.values.get(name) is None:
            return None
        return self.integer(name, default=least, least=least, most=most)


async def json_object(request: Request, *, most: int = MAX_JSON_BYTES) -> dict[str, object]:
    """The JSON object of a request, of at most so many bytes. Raises InvalidConfig when it is not
    one."""
    data = bytearray()
    async for chunk in request.stream():
        data += chunk
        if len(data) > most:
            raise InvalidConfig(f"the body must have at most {most} bytes; send less")
    try:
        values = json.loads(data or b"{}", parse_constant=_reject_constant)
    except (ValueError, RecursionError) as error:
        raise InvalidConfig(f"the body is not JSON: {error}; send a JSON object") from error
    if not isinstance(values, dict):
        raise InvalidConfig(f"the body must be a JSON object, got a {type(values).__name__}")
    return values


async def body_of(request: Request, fields: Sequence[str]) -> JsonBody:
    """The JSON object of a request. Raises InvalidConfig when it is not one, or has other fields than
    these."""
    values = await json_object(request)
    for name in values:
        if name not in fields:
            close = difflib.get_close_matches(name, fields, n=1)
            issue = Issue(
                name,
                f"unrecognized field; this request has: {', '.join(fields) or 'none'}",
                close[0] if close else None,
            )
            raise InvalidConfig(
                f"unrecognized field {name}; this request has: {', '.join(fields) or 'none'}",
                issues=(issue,),
            )
    return JsonBody(values)


def limits_in(body: JsonBody) -> Mapping[str, str]:
    """The limits of quotas that a request sets, each as the text of a number or of a word."""
    return {name: str(value) for name, value in body.table("limits").items()}


def own_address(request: Request) -> str:
    """The address of this server in URLs for the sender of a request: HEADRACE_PUBLIC_URL where it is
    set, which may have a path, or else the address that the sender used."""
    settings = request.app.state.services.settings
    if settings.public_url != settings.url:
        return str(settings.public_url)
    return f"{request.url.scheme}://{request.url.netloc}"


def idempotency_key(request: Request) -> str:
    """The idempotency key that the client sent, or a new one, so that a request without a key never
    repeats another. The keys of an API key that is bound to a workspace or an organisation are its own.
    Raises InvalidConfig when the key is malformed."""
    key = request.headers.get("idempotency-key")
    if key is None:
        return uuid4().hex
    if not KEY.fullmatch(key):
        raise InvalidConfig(
            f"Idempotency-Key must be 1 to 200 visible ASCII characters, got {key[:40]!r}"
        )
    actor = acting()
    if actor is None or not actor.is_confined:
        return key
    if actor.workspace is not None:
        return f"{actor.workspace}/{key}"
    return f"organisation/{actor.home}/{key}"


def cause_of(request: Request, what: str) -> UUID:
    """The id of the cause of the events that a command appends. The same idempotency key gives the same
    cause."""
    return derive_id(HEADRACE, f"{what}/{idempotency_key(request)}")


def _invalid_field(name: str, message: str) -> InvalidConfig:
    return InvalidConfig(f"{name} {message}", issues=(Issue(name, message),))


def _reject_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")
