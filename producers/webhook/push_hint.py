"""The content of a delivery: a hint that a ref of the repository moved.

A hint is never used to read from git, because sync asks the repository itself. It is shown to users, so
everything in it has a bounded length and no control characters.
"""

import re
from dataclasses import dataclass
from typing import Literal, Protocol

from producers.webhook.headers import RequestHeaders
from producers.webhook.signature import WebhookKeys

LONGEST_REF = 512
LONGEST_PUSHER = 255

FOLLOWED = ("refs/heads/", "refs/tags/")
SHA = re.compile(r"(?:[0-9a-f]{40}|[0-9a-f]{64})")
NOT_IN_REFS = re.compile(
    r"[\x00-\x20\x7f~^:?*\[\\\ud800-\udfff]|\.\.|@\{|//|/\.|\.lock(?:/|$)|[/.]$"
)
"""Characters and sequences that no ref contains (git-check-ref-format)."""

Kind = Literal["push", "delete", "ping", "other"]


class MalformedDelivery(Exception):
    """A signed delivery cannot be read. The message says why, and holds nothing of the delivery."""


@dataclass(frozen=True, slots=True)
class PushHint:
    """The ref that moved. `before` is None for a new ref, `after` for a deleted one."""

    ref: str
    before: str | None
    after: str | None
    forced: bool = False
    pusher: str | None = None

    @property
    def is_followed(self) -> bool:
        """Whether the ref is a branch or a tag that a trigger may name. A part that begins with `-`
        looks like an option of a program, so such a ref is not followed."""
        return self.ref.startswith(FOLLOWED) and "/-" not in self.ref


class WebhookFormat(Protocol):
    """The headers and payloads that a forge sends."""

    def is_authentic(self, headers: RequestHeaders, keys: WebhookKeys) -> bool:
        """Whether the request proves that its sender knows the secret."""
        ...

    def head(self, headers: RequestHeaders) -> tuple[Kind, str]:
        """Return the kind of the delivery, and its id. Raises MalformedDelivery."""
        ...

    def hint(self, kind: Kind, body: bytes | bytearray) -> PushHint:
        """Return the hint in the payload of a `push` or `delete`. Raises MalformedDelivery."""
        ...


def check_ref(ref: str) -> str:
    """Return a full ref name. Raises MalformedDelivery when git could not hold such a ref."""
    if not ref.startswith("refs/") or len(ref) > LONGEST_REF or NOT_IN_REFS.search(ref):
        raise MalformedDelivery(
            f"the ref is not a full name of at most {LONGEST_REF} characters, such as refs/heads/main"
        )
    return ref


def check_sha(sha: str, name: str) -> str | None:
    """Return a commit id; None for the id of zeros that stands for no commit. Raises
    MalformedDelivery."""
    if not SHA.fullmatch(sha):
        raise MalformedDelivery(f"{name} is not a commit id of 40 or 64 hex digits")
    return sha if sha.strip("0") else None


def clean_pusher(value: object) -> str | None:
    """Return a user's name without control characters, cut to LONGEST_PUSHER characters; None when
    there is none."""
    if not isinstance(value, str):
        return None
    text = "".join(character for character in value[:LONGEST_PUSHER] if character.isprintable())
    return text.strip() or None
