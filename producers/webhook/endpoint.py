"""The endpoint of webhooks: from a request of a sender that nobody knows to a durable event.

The order matters. A bounded body is read, its signature is checked, and only then is anything parsed. A
sender without a valid signature always gets the same answer, whether its workspace exists or not. A push
is answered when its event is durable.
"""

import asyncio
import hashlib
from collections import Counter
from dataclasses import dataclass
from typing import Literal

from starlette.types import Receive

from infra import telemetry
from infra.spine.ports.appender import APPENDER
from infra.spine.ports.event_log import EdgeAppend
from producers.webhook.body import BodyReader, BodyRefused, SenderGone
from producers.webhook.github import GitHubFormat
from producers.webhook.gitlab import GitLabFormat
from producers.webhook.headers import RequestHeaders
from producers.webhook.hooks import Hook, HookSource
from producers.webhook.journal import DeliveryJournal
from producers.webhook.payload import document_in
from producers.webhook.push_hint import MalformedDelivery, PushHint, WebhookFormat
from producers.webhook.signature import WebhookKeys
from schemas.errors import Refused
from schemas.events import Event, ForgeKind, HookPinged, PushReceived
from schemas.ids import HEADRACE, derive_id

GITHUB = GitHubFormat()
FORMATS: dict[ForgeKind, WebhookFormat] = {
    "github": GITHUB,
    "gitea": GITHUB,
    "gitlab": GitLabFormat(),
    "none": GITHUB,
}

LARGE = 1 << 20
"""The size of a body that is hashed and parsed in a thread, so that others do not wait for it."""

Result = Literal[
    "accepted", "doubled", "pinged", "ignored", "bad_signature", "too_large", "malformed", "slow"
]
"""The fate of a delivery, as the metrics count it."""


@dataclass(frozen=True, slots=True)
class WebhookAnswer:
    """The answer to a delivery. `code` is None when it was taken. With `is_unread` a part of the body
    was not read, so the connection cannot be used any more."""

    status: int
    text: str
    code: str | None = None
    is_unread: bool = False


ACCEPTED = WebhookAnswer(202, "accepted")
PINGED = WebhookAnswer(200, "pong")
IGNORED = WebhookAnswer(202, "ignored: this event starts nothing")
UNSIGNED = WebhookAnswer(401, "the signature is missing or wrong", "BAD_SIGNATURE")


class WebhookEndpoint:
    """Takes deliveries. `counts` has how many there were, by forge and result."""

    def __init__(
        self, hooks: HookSource, journal: DeliveryJournal, reader: BodyReader | None = None
    ) -> None:
        self._hooks = hooks
        self._journal = journal
        self._reader = reader or BodyReader()
        self._parsing = asyncio.Semaphore(1)
        self.counts: Counter[tuple[str, Result]] = Counter()

    async def take(self, ref: str, headers: RequestHeaders, receive: Receive) -> WebhookAnswer:
        """Take one delivery for a workspace (name or id). Raises DatabaseUnavailable."""
        try:
            async with self._reader.read(headers, receive) as body:
                # Only now, because a slow body may last longer than its secret is valid.
                hook = await self._hooks.find_hook(ref)
                result, answer = await self._take_body(hook, headers, body)
        except BodyRefused as error:
            result = "too_large" if error.status == 413 else "slow"
            answer = WebhookAnswer(error.status, str(error), "BODY", is_unread=True)
        except SenderGone:
            result = "slow"
            answer = WebhookAnswer(400, "the body ended before it was complete", "BODY")
        except MalformedDelivery as error:
            result, answer = "malformed", WebhookAnswer(400, str(error), "MALFORMED")
        hook = await self._hooks.find_hook(ref)
        forge = hook.forge if hook is not None else "unknown"
        self.counts[forge, result] += 1
        return answer

    async def _take_body(
        self, hook: Hook | None, headers: RequestHeaders, body: bytearray
    ) -> tuple[Result, WebhookAnswer]:
        """Check the signature, and record what the delivery says. Raises MalformedDelivery."""
        form = FORMATS[hook.forge] if hook is not None else GITHUB
        keys = WebhookKeys.of(hook.secrets if hook is not None else (), body)
        if len(body) > LARGE:
            await asyncio.to_thread(lambda: keys.digests)
        is_authentic = form.is_authentic(headers, keys)
        if hook is None or not is_authentic:
            return "bad_signature", UNSIGNED
        kind, delivery = form.head(headers)
        if kind == "other":
            return "ignored", IGNORED
        if kind == "ping":
            ping = HookPinged(workspace=hook.workspace, forge=hook.forge, delivery=delivery)
            await self._record(ping, delivery, body)
            return "pinged", PINGED
        if len(body) > LARGE:
            async with self._parsing:  # a parsed payload takes up to 40 times as much memory
                hint = await asyncio.to_thread(lambda: form.hint(kind, document_in(body, headers)))
        else:
            hint = form.hint(kind, document_in(body, headers))
        if not hint.is_followed:
            return "ignored", IGNORED
        is_new = await self._record(_push(hook, delivery, hint), delivery, body)
        return "accepted" if is_new else "doubled", ACCEPTED

    async def _record(self, event: Event, delivery: str, body: bytearray) -> bool:
        """Make an event durable. Returns whether it is new. The id of the delivery is not signed, so
        the body is part of what makes two deliveries the same. Raises MalformedDelivery when the log
        cannot hold the event."""
        digest = hashlib.sha256(body).hexdigest()
        cause = derive_id(HEADRACE, f"delivery/{event.run_id}/{delivery}/{digest}")
        entry = EdgeAppend(event, cause, telemetry.traceparent(), APPENDER.get())
        try:
            return (await self._journal.record(entry)).is_new
        except Refused as error:
            raise MalformedDelivery(f"the delivery cannot be recorded; {error.message}") from error


def _push(hook: Hook, delivery: str, hint: PushHint) -> PushReceived:
    return PushReceived(
        workspace=hook.workspace,
        forge=hook.forge,
        delivery=delivery,
        ref=hint.ref,
        before=hint.before,
        after=hint.after,
        forced=hint.forced,
        pusher=hint.pusher,
    )
