"""Reads the few fields of a payload that make a hint, and skips the others.

docs/decisions/0012-read-six-fields-of-a-webhook.md has the reasons.
"""

from typing import TypeVar
from urllib.parse import parse_qsl

from pydantic import BaseModel, ConfigDict, ValidationError

from producers.webhook.headers import RequestHeaders
from producers.webhook.push_hint import MalformedDelivery

MOST_FORM_FIELDS = 16
FORM = "application/x-www-form-urlencoded"
JSON = "application/json"


class Payload(BaseModel):
    """A payload. Fields have exactly their types; unknown ones are skipped."""

    model_config = ConfigDict(strict=True, frozen=True, extra="ignore")


P = TypeVar("P", bound=Payload)


def document_in(body: bytes | bytearray, headers: RequestHeaders) -> bytes | bytearray:
    """Return the JSON text of a body, which is the body itself or its form field `payload`. Raises
    MalformedDelivery."""
    media = (headers.one(b"content-type") or b"").split(b";")[0].strip().lower().decode("latin-1")
    if media == JSON:
        return body
    if media != FORM:
        raise MalformedDelivery(f"the Content-Type is not {JSON} or {FORM}; choose one of them")
    try:
        fields = parse_qsl(
            body.decode("ascii"),
            keep_blank_values=True,
            errors="strict",
            max_num_fields=MOST_FORM_FIELDS,
        )
    except ValueError as error:
        raise MalformedDelivery("the body is not a form; send a field payload") from error
    found = [value for name, value in fields if name == "payload"]
    if len(found) != 1:
        raise MalformedDelivery(f"the form has {len(found)} fields payload; send one")
    return found[0].encode()


def read_payload(kind: type[P], document: bytes | bytearray) -> P:
    """Parse JSON text. Raises MalformedDelivery, whose message names the first field that is wrong."""
    try:
        return kind.model_validate_json(document)
    except ValidationError as error:
        first = error.errors(include_input=False, include_url=False, include_context=False)[0]
        place = ".".join(map(str, first["loc"]))
        what = f"field {place}: " if place else ""
        text = "not JSON that can be read" if first["type"] == "json_invalid" else first["msg"]
        raise MalformedDelivery(f"the payload is not a push; {what}{text.lower()}") from error
