"""The two headers that say which delivery a request is: the name of its event, and its id.

The signature does not cover them, so they decide nothing but how the body is read and which deliveries
are the same.
"""

import re

from producers.webhook.headers import RequestHeaders
from producers.webhook.push_hint import MalformedDelivery

DELIVERY = re.compile(rb"[\x21-\x7e]{1,128}")
EVENT = re.compile(rb"[\x20-\x7e]{1,64}")


def event_name(headers: RequestHeaders, name: bytes) -> bytes:
    """Return the name of the event. Raises MalformedDelivery."""
    return _check_value(headers, name, EVENT)


def delivery_id(headers: RequestHeaders, name: bytes) -> str:
    """Return the forge's id of the delivery. Raises MalformedDelivery."""
    return _check_value(headers, name, DELIVERY).decode("ascii")


def _check_value(headers: RequestHeaders, name: bytes, form: re.Pattern[bytes]) -> bytes:
    value = headers.one(name)
    shown = name.decode("ascii")
    if value is None:
        state = "comes more than once" if headers.is_doubled(name) else "is missing"
        raise MalformedDelivery(f"the header {shown} {state}; send it once")
    if not form.fullmatch(value):
        raise MalformedDelivery(f"the header {shown} is not short plain text; send the forge's own")
    return value
