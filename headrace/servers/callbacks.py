"""Generations 1 and 2 of the protocol: the server reports the end of a rollout, and its grades, to a
controller. The controller is here, on 127.0.0.1.

A server repeats a report that was not answered, so a report may come twice.
"""

import asyncio
import contextlib
import hmac
from dataclasses import dataclass, field

from headrace.servers.attempts import (
    AttemptFailed,
    Json,
    ServedAttempt,
    ServerGrade,
    failure_of,
    grade_of,
    mean_grade,
    parse_object,
)
from headrace.servers.leases import (
    ADMISSION_S,
    AWAY_S,
    CANCEL_S,
    FULL_PAUSE_S,
    OVERLOADED,
    PAUSE_S,
    new_rollout_id,
)
from headrace.servers.loopback import LARGEST_ANSWER, MOST_HEADERS, Loopback, ServerAway, read_head

PREFIX = "/v1/rollouts/"
REPORTS = ("completion", "grader")
REPORT_S = 30.0
"""How long a report may take to arrive."""

GRACE_S = 10.0
"""How long after its own deadline a server may take to report it."""


@dataclass
class _Expected:
    """A rollout whose reports are awaited. `key` is the one that the server must show."""

    key: str
    reports: dict[str, "asyncio.Future[Json]"] = field(default_factory=dict)


class ReportingRollouts:
    """Makes attempts with a server of generation 1, or of generation 2 if `is_single`."""

    def __init__(self, server: Loopback, *, is_single: bool) -> None:
        self._server = server
        self._is_single = is_single
        self._expected: dict[str, _Expected] = {}
        self._controller: asyncio.Server | None = None
        self._starting = asyncio.Lock()

    async def make(self, attempt: ServedAttempt) -> ServerGrade:
        """Make one attempt and return its grade. Raises AttemptFailed, and ServerAway when the server is
        gone."""
        reports = await self._reports_url()
        loop = asyncio.get_running_loop()
        rollout = new_rollout_id(attempt.name)
        expected = _Expected(attempt.api_key, {name: loop.create_future() for name in REPORTS})
        self._expected[rollout] = expected
        try:
            await self._admit(attempt, rollout, f"{reports}{rollout}")
            return await self._grade(attempt, expected)
        except BaseException:  # a cancellation, too
            await self._cancel(rollout)
            raise
        finally:
            del self._expected[rollout]
            for report in expected.reports.values():
                report.cancel()

    async def _reports_url(self) -> str:
        """Return the URL of the controller, behind which an id of a rollout follows. It is started at
        its first use."""
        async with self._starting:
            if self._controller is None:
                self._controller = await asyncio.start_server(
                    self._serve, "127.0.0.1", 0, limit=MOST_HEADERS
                )
        port: int = self._controller.sockets[0].getsockname()[1]
        return f"http://127.0.0.1:{port}{PREFIX}"

    async def _grade(self, attempt: ServedAttempt, expected: _Expected) -> ServerGrade:
        """Wait for both reports. A server of these generations may not obey its deadlines."""
        done = await _within(attempt.agent_timeout_s, expected.reports["completion"], "workflow")
        _check(done)
        if attempt.label is None and not attempt.metadata:
            return grade_of(
                {"reward": None}
            )  # such a server grades only what has a label or metadata
        graded = await _within(attempt.grader_timeout_s, expected.reports["grader"], "grader")
        _check(graded)
        return (
            grade_of(graded.get("sample")) if self._is_single else mean_grade(graded.get("samples"))
        )

    async def _admit(self, attempt: ServedAttempt, rollout: str, reports: str) -> None:
        away_since: float | None = None
        body = self._request(attempt, rollout, reports)
        while True:
            try:
                reply = await self._server.request(
                    "POST", "/rollout", body=body, timeout_s=ADMISSION_S
                )
            except ServerAway as error:
                raise AttemptFailed("again", f"the rollout server: {error}") from error
            if reply.status in (200, 201, 202):
                return
            now = asyncio.get_running_loop().time()
            if reply.status in OVERLOADED:
                away_since = away_since or now
                if now - away_since > AWAY_S:
                    raise ServerAway(f"it takes no rollouts: {reply.status} {reply.excerpt()}")
            elif reply.status != 429:
                text = f"the rollout server answers {reply.status}: {reply.excerpt()}"
                raise AttemptFailed("process" if reply.status >= 500 else "invalid", text)
            await asyncio.sleep(
                reply.retry_after_s(FULL_PAUSE_S if reply.status == 429 else PAUSE_S)
            )

    def _request(self, attempt: ServedAttempt, rollout: str, reports: str) -> Json:
        request: Json = {
            "rollout_id": rollout,
            "initial_messages": attempt.messages,
            "chat_completions_url": attempt.chat_url,
            "controller_api_key": attempt.api_key,
            "completion_callback_url": f"{reports}/completion",
            "grader_callback_url": f"{reports}/grader",
            "label": attempt.label,
            "metadata": attempt.metadata or None,
            "agent_timeout_sec": attempt.agent_timeout_s,
            "grader_timeout_sec": attempt.grader_timeout_s,
        }
        return {**request, "llm_api_key": attempt.api_key} if self._is_single else request

    async def _cancel(self, rollout: str) -> None:
        """Ask the server to cancel a rollout, if its generation can."""
        if self._is_single:
            with contextlib.suppress(ServerAway):
                body = {"ids": [rollout]}
                await self._server.request("POST", "/rollout/cancel", body=body, timeout_s=CANCEL_S)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Receive one report."""
        try:
            async with asyncio.timeout(REPORT_S):
                status = await self._receive(reader)
                body = b"{}"
                head = f"HTTP/1.1 {status} Received\r\ncontent-type: application/json\r\n"
                head += f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
                writer.write(head.encode() + body)
                await writer.drain()
        except (OSError, EOFError, ValueError, TimeoutError, asyncio.LimitOverrunError):
            pass
        finally:
            writer.close()

    async def _receive(self, reader: asyncio.StreamReader) -> int:
        """Read a report and give it to the attempt that waits for it. Returns the status to answer."""
        first, headers = await read_head(reader)
        method, path, *_ = first.split(" ")
        size = int(headers.get("content-length", "0"))
        if not 0 <= size <= LARGEST_ANSWER:
            return 413
        body = await reader.readexactly(size)
        rollout, _, name = path.removeprefix(PREFIX).rpartition("/")
        expected = self._expected.get(rollout)
        if method != "POST" or expected is None or name not in REPORTS:
            return 404
        shown = headers.get("authorization", "").removeprefix("Bearer ")
        if not hmac.compare_digest(shown.encode(), expected.key.encode()):
            return 401
        report = expected.reports[name]
        if not report.done():
            report.set_result(_parse_report(body, rollout))
        return 200


def _parse_report(body: bytes, rollout: str) -> Json:
    """Return a report. One that is not about this rollout becomes a failure."""
    try:
        report = parse_object(body, of="a report")
    except AttemptFailed as error:
        return {"status": "failure", "err_message": error.message}
    if report.get("rollout_id") != rollout:
        named = str(report.get("rollout_id"))[:200]
        return {"status": "failure", "err_message": f"it reported {named!r} for {rollout!r}"}
    return report


def _check(report: Json) -> None:
    if report.get("status") != "success":
        raise failure_of(report, status=str(report.get("status"))[:80])


async def _within(seconds: float, report: "asyncio.Future[Json]", what: str) -> Json:
    try:
        async with asyncio.timeout(seconds + GRACE_S):
            return await asyncio.shield(report)
    except TimeoutError as error:
        text = f"the {what} of the rollout server was not finished after {seconds:g} s"
        raise AttemptFailed("timeout", text) from error
