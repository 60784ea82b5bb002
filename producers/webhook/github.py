"""GitHub's format of webhooks, which Gitea, Forgejo and our own post-receive hook send too.

A signature with SHA-1 only is refused. A `create` event is skipped, because a `push` arrives with it.
"""

from typing import Any

from producers.webhook.headers import RequestHeaders
from producers.webhook.identity import delivery_id, event_name
from producers.webhook.payload import Payload, read_payload
from producers.webhook.push_hint import (
    Kind,
    MalformedDelivery,
    PushHint,
    check_ref,
    check_sha,
    clean_pusher,
)
from producers.webhook.signature import WebhookKeys

KINDS: dict[bytes, Kind] = {b"push": "push", b"delete": "delete", b"ping": "ping"}
FOLDERS = {"branch": "refs/heads/", "tag": "refs/tags/"}


class GitHubPush(Payload):
    """The payload of a `push`."""

    ref: str
    before: str
    after: str
    forced: bool = False
    deleted: bool = False
    pusher: Any = None


class GitHubDeletion(Payload):
    """The payload of a `delete`. `ref` is a short name here."""

    ref: str
    ref_type: str
    sender: Any = None


class GitHubFormat:
    """`WebhookFormat` of GitHub, Gitea and Forgejo."""

    def is_authentic(self, headers: RequestHeaders, keys: WebhookKeys) -> bool:
        signature = headers.one(b"x-hub-signature-256")
        return keys.accept(signature if signature is not None else b"")

    def head(self, headers: RequestHeaders) -> tuple[Kind, str]:
        event = event_name(headers, b"x-github-event")
        return KINDS.get(event, "other"), delivery_id(headers, b"x-github-delivery")

    def hint(self, kind: Kind, body: bytes | bytearray) -> PushHint:
        if kind == "delete":
            return self._deletion(read_payload(GitHubDeletion, body))
        push = read_payload(GitHubPush, body)
        after = check_sha(push.after, "after")
        return PushHint(
            ref=check_ref(push.ref),
            before=check_sha(push.before, "before"),
            after=None if push.deleted else after,
            forced=push.forced,
            pusher=_pusher(push.pusher),
        )

    def _deletion(self, gone: GitHubDeletion) -> PushHint:
        folder = FOLDERS.get(gone.ref_type)
        if folder is None:
            raise MalformedDelivery("ref_type is not branch or tag; send the forge's own payload")
        name = gone.ref if gone.ref.startswith(folder) else folder + gone.ref
        return PushHint(ref=check_ref(name), before=None, after=None, pusher=_pusher(gone.sender))


def _pusher(value: Any) -> str | None:
    """The name of a user: GitHub's `name`, Gitea's `login`."""
    if not isinstance(value, dict):
        return None
    names = (clean_pusher(value.get(key)) for key in ("login", "username", "name"))
    return next(filter(None, names), None)
