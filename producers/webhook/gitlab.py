"""GitLab's format of webhooks. GitLab does not sign the body: it sends the secret itself in a header."""

from typing import Any

from producers.webhook.headers import RequestHeaders
from producers.webhook.identity import delivery_id, event_name
from producers.webhook.payload import Payload, read_payload
from producers.webhook.push_hint import Kind, PushHint, check_ref, check_sha, clean_pusher
from producers.webhook.signature import WebhookKeys

KINDS: dict[bytes, Kind] = {b"Push Hook": "push", b"Tag Push Hook": "push"}


class GitLabPush(Payload):
    """The payload of a `push` or a `tag_push`."""

    ref: str
    before: str
    after: str
    user_username: Any = None


class GitLabFormat:
    """`WebhookFormat` of GitLab."""

    def is_authentic(self, headers: RequestHeaders, keys: WebhookKeys) -> bool:
        token = headers.one(b"x-gitlab-token")
        keys.digests  # noqa: B018 - a workspace on GitLab costs as much time as any other
        return keys.include(token if token is not None else b"")

    def head(self, headers: RequestHeaders) -> tuple[Kind, str]:
        event = event_name(headers, b"x-gitlab-event")
        return KINDS.get(event, "other"), delivery_id(headers, b"x-gitlab-event-uuid")

    def hint(self, kind: Kind, body: bytes | bytearray) -> PushHint:
        push = read_payload(GitLabPush, body)
        return PushHint(
            ref=check_ref(push.ref),
            before=check_sha(push.before, "before"),
            after=check_sha(push.after, "after"),
            pusher=clean_pusher(push.user_username),
        )
