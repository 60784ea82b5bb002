"""Generation 3 of the protocol: a rollout is admitted under a lease, and its result is polled.

Every poll renews the lease, so the server cancels rollouts that nobody waits for.
"""

import asyncio
import contextlib
import uuid
from dataclasses import dataclass

from headrace.servers.attempts import (
    AttemptFailed,
    Json,
    ServedAttempt,
    ServerGrade,
    failure_of,
    grade_of,
    parse_object,
)
from headrace.servers.loopback import Loopback, Reply, ServerAway

LEASE_HEADER = "X-Osmosis-Rollout-Lease"
ADMISSION_S = 30.0
CANCEL_S = 5.0
WAIT_S = 30.0
LEASE_S = 120.0
"""How long a server waits before it answers a poll, and how long its lease lasts, if it does not say."""

MARGIN_S = 15.0
PAUSE_S = 1.0
FULL_PAUSE_S = 5.0
AWAY_S = 60.0
"""How long a server may answer 502 to 504 before it counts as gone."""

TRIES = 3
QUICK_S = 0.25
"""The shortest time from one poll of a rollout to the next."""

GOING_ON = frozenset({"queued", "running", "grading"})
OVERLOADED = frozenset({502, 503, 504})


@dataclass(frozen=True)
class Lease:
    """An admitted rollout."""

    rollout: str
    token: str
    wait_s: float
    lasts_s: float


class LeasedRollouts:
    """Makes attempts with a server of generation 3."""

    def __init__(self, server: Loopback) -> None:
        self._server = server

    async def make(self, attempt: ServedAttempt) -> ServerGrade:
        """Make one attempt and return its grade. A cancelled attempt is cancelled at the server too.
        Raises AttemptFailed, and ServerAway when the server is gone."""
        lease = await self._admit(attempt)
        try:
            return await self._result(lease)
        except BaseException:  # a cancellation, too
            await self._cancel(lease.rollout)
            raise

    async def _admit(self, attempt: ServedAttempt) -> Lease:
        """Wait until the server takes the rollout. A server whose queue is full says when to ask again.
        Each request has an id of its own, because an id that was used stays reserved."""
        errors, away_since = 0, None
        while True:
            rollout = new_rollout_id(attempt.name)
            try:
                reply = await self._server.request(
                    "POST", "/rollout", body=_request(attempt, rollout), timeout_s=ADMISSION_S
                )
            except (ServerAway, asyncio.CancelledError) as error:
                # Nobody knows whether the rollout has begun, and its calls would count as this sample's.
                await self._cancel(rollout)
                if isinstance(error, ServerAway):
                    raise AttemptFailed("again", f"the rollout server: {error}") from error
                raise
            now = asyncio.get_running_loop().time()
            match reply.status:
                case 200 | 201 | 202:
                    return _lease(reply, rollout)
                case 429:
                    away_since = None
                    await asyncio.sleep(reply.retry_after_s(FULL_PAUSE_S))
                case 502 | 503 | 504:
                    away_since = away_since or now
                    if now - away_since > AWAY_S:
                        raise ServerAway(f"it takes no rollouts: {reply.status} {reply.excerpt()}")
                    await asyncio.sleep(reply.retry_after_s(PAUSE_S))
                case 409 | 500 if (errors := errors + 1) < TRIES:
                    await asyncio.sleep(PAUSE_S * (reply.status == 500))
                case _:
                    raise _refusal(reply)

    async def _result(self, lease: Lease) -> ServerGrade:
        """Poll until the rollout has ended."""
        loop = asyncio.get_running_loop()
        renewed = loop.time()
        while True:
            began = loop.time()
            problem: str | None = None
            try:
                reply = await self._server.request(
                    "GET",
                    f"/rollout/{lease.rollout}/result",
                    headers={LEASE_HEADER: lease.token},
                    timeout_s=lease.wait_s + MARGIN_S,
                )
            except ServerAway as error:
                problem = str(error)
            else:
                if reply.status == 200:
                    renewed = loop.time()
                    if (grade := _parse_result(reply, lease.rollout)) is not None:
                        return grade
                elif reply.status in (403, 404, 410):
                    text = f"it forgot the rollout: {reply.status} {reply.excerpt()}"
                    raise AttemptFailed("again", f"the rollout server: {text}")
                elif reply.status == 500 or reply.status in OVERLOADED:
                    problem = f"it answers {reply.status}: {reply.excerpt()}"
                else:
                    raise _refusal(reply)
            if problem is not None and loop.time() - renewed > lease.lasts_s:
                raise AttemptFailed("process", f"the rollout server gives no result: {problem}")
            pause_s = QUICK_S if problem is None else PAUSE_S
            await asyncio.sleep(max(0.0, began + pause_s - loop.time()))

    async def _cancel(self, rollout: str) -> None:
        """Ask the server to cancel a rollout. It may have ended."""
        with contextlib.suppress(ServerAway):
            body = {"ids": [rollout]}
            await asyncio.shield(
                self._server.request("POST", "/rollout/cancel", body=body, timeout_s=CANCEL_S)
            )


def new_rollout_id(name: str) -> str:
    """Return an id for one attempt at a sample: one segment of a path, which never comes back."""
    return f"{plain_name(name)}-{uuid.uuid4().hex[:12]}"


def plain_name(name: str) -> str:
    """Return a name as a part of a path."""
    return "".join(c if c.isascii() and (c.isalnum() or c in "-_") else "-" for c in name)[:200]


def _request(attempt: ServedAttempt, rollout: str) -> Json:
    return {
        "rollout_id": rollout,
        "initial_messages": attempt.messages,
        "chat_completions_url": attempt.chat_url,
        "llm_api_key": attempt.api_key,
        "label": attempt.label,
        "metadata": attempt.metadata or None,
        "grade": True,
        "agent_timeout_sec": attempt.agent_timeout_s,
        "grader_timeout_sec": attempt.grader_timeout_s,
    }


def _lease(reply: Reply, rollout: str) -> Lease:
    answer = parse_object(reply.body, of="POST /rollout")
    token, named = answer.get("polling_lease_token"), answer.get("rollout_id", rollout)
    if named != rollout:
        raise AttemptFailed(
            "process", f"the rollout server admitted {str(named)[:200]!r} instead of {rollout!r}"
        )
    if not isinstance(token, str) or not token or not token.isprintable():
        raise AttemptFailed("process", "the rollout server admitted a rollout without a lease")
    return Lease(
        rollout,
        token,
        wait_s=_seconds(answer.get("result_wait_timeout_sec"), WAIT_S),
        lasts_s=_seconds(answer.get("polling_lease_timeout_sec"), LEASE_S),
    )


def _parse_result(reply: Reply, rollout: str) -> ServerGrade | None:
    """Return the grade in a result, or None if the rollout has not ended. Raises AttemptFailed."""
    answer = parse_object(reply.body, of="a poll")
    if answer.get("rollout_id") != rollout:
        named = str(answer.get("rollout_id"))[:200]
        raise AttemptFailed(
            "process", f"the rollout server answered for {named!r} instead of {rollout!r}"
        )
    status = answer.get("status")
    if status == "success":
        return grade_of(answer.get("sample"))
    if status in GOING_ON:
        return None
    raise failure_of(answer, status=str(status)[:80])


def _refusal(reply: Reply) -> AttemptFailed:
    hints = {
        401: "; create the server without api_key",
        404: "; it does not serve the rollout protocol",
        409: "; it does not release ids",
    }
    text = f"the rollout server answers {reply.status}: {reply.excerpt()}"
    return AttemptFailed(
        "process" if reply.status >= 500 else "invalid", text + hints.get(reply.status, "")
    )


def _seconds(value: object, default: float) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 3600:
        return default
    return float(value)
