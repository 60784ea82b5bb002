"""Generation 3: what a server may answer, and what becomes of the sample."""

import asyncio
import re
from typing import Any

import pytest

from headrace.servers import leases
from headrace.servers.attempts import AttemptFailed, ServerGrade
from headrace.servers.leases import LeasedRollouts
from headrace.servers.loopback import ServerAway
from tests.unit.headrace.servers.scripted import ATTEMPT, Answer, scripted

SAMPLE = {"messages": [], "reward": 1.0}


@pytest.fixture(autouse=True)
def _quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PAUSE_S", "FULL_PAUSE_S", "QUICK_S", "MARGIN_S"):
        monkeypatch.setattr(leases, name, 0.01)
    monkeypatch.setattr(leases, "AWAY_S", 0.1)


class Scripted:
    """A server that admits each rollout, unless `admissions` says otherwise, and answers polls with
    `results`. It is asked to cancel the rollouts in `cancelled`."""

    def __init__(
        self, *results: Answer | dict[str, object], admissions: tuple[Answer, ...] = ()
    ) -> None:
        self._results = list(results)
        self._admissions = list(admissions)
        self.requests: list[dict[str, Any]] = []
        self.cancelled: list[str] = []

    async def __call__(self, asked: str, body: Any) -> Answer:
        if asked == "POST /rollout/cancel":
            self.cancelled += body["ids"]
            return 200, {"dispositions": {}}
        if asked == "POST /rollout":
            self.requests.append(body)
            if self._admissions:
                return self._admissions.pop(0)
            more = {"result_wait_timeout_sec": 0.2, "polling_lease_timeout_sec": 0.2}
            return 202, {"rollout_id": body["rollout_id"], "polling_lease_token": "t", **more}
        rollout = asked.split("/")[2]
        result = self._results.pop(0) if len(self._results) > 1 else self._results[0]
        return (200, {"rollout_id": rollout, **result}) if isinstance(result, dict) else result

    async def make(self) -> ServerGrade:
        async with scripted(self) as server:
            return await LeasedRollouts(server).make(ATTEMPT)

    async def failure(self) -> tuple[str, str]:
        with pytest.raises(AttemptFailed) as raised:
            await self.make()
        return raised.value.category, raised.value.message


SUCCESS: dict[str, object] = {"status": "success", "sample": SAMPLE}


async def test_a_rollout_is_polled_until_it_has_ended() -> None:
    server = Scripted({"status": "queued"}, {"status": "running"}, {"status": "grading"}, SUCCESS)
    assert await server.make() == ServerGrade(1.0)
    (request,) = server.requests
    assert re.fullmatch(r"run-1---0-[0-9a-f]{12}", request["rollout_id"]), "one segment of a path"
    assert request["label"] == "4"
    assert request["grade"] is True
    assert request["metadata"] is None
    assert request["llm_api_key"] == "key"


@pytest.mark.parametrize(
    "busy",
    [
        (429, {}, {"retry-after": "0.01"}),
        (503, {"detail": "rollout server is shutting down"}),
        (500, {"detail": "oh"}),
        (409, {"detail": "rollout_id is already registered"}),
    ],
)
async def test_a_server_that_is_full_or_busy_is_asked_again_with_another_id(busy: Answer) -> None:
    server = Scripted(SUCCESS, admissions=(busy, busy))
    assert await server.make() == ServerGrade(1.0)
    assert len({request["rollout_id"] for request in server.requests}) == 3


async def test_a_server_that_takes_nothing_any_more_is_gone() -> None:
    with pytest.raises(ServerAway, match="shutting down"):
        await Scripted(SUCCESS, admissions=((503, {"detail": "shutting down"}),) * 99).make()


@pytest.mark.parametrize(
    ("admission", "category", "why"),
    [
        ((500, {"detail": "oh"}), "process", "answers 500"),
        ((422, {"detail": "no such field"}), "invalid", "no such field"),
        ((401, {}), "invalid", "without api_key"),
        ((202, {"rollout_id": "another", "polling_lease_token": "t"}), "process", "'another'"),
        ((202, {}), "process", "without a lease"),
        ((202, {"polling_lease_token": "a\r\nb: c"}), "process", "without a lease"),
        ((202, ["x"]), "process", "not a JSON object"),
        (b"garbage\r\n\r\n", "again", "is not HTTP"),
        (b"HTTP/1.1 202 Said\r\ncontent-length: 99999999\r\n\r\n", "again", "99999999 bytes"),
        (b"", "again", "POST /rollout failed"),
    ],
)
async def test_a_refused_admission_fails_the_sample(
    admission: Answer, category: str, why: str
) -> None:
    server = Scripted(SUCCESS, admissions=(admission,) * 3)
    found = await server.failure()
    assert found[0] == category
    assert why in found[1]
    if category == "again":
        assert server.cancelled == [server.requests[0]["rollout_id"]], "it may have begun"


@pytest.mark.parametrize(
    ("result", "category", "why"),
    [
        ({"status": "failure", "err_category": "agent_error", "err_message": "x"}, "raised", ": x"),
        ({"status": "failure", "err_category": "timeout"}, "timeout", "gave no reason"),
        ({"status": "failure", "err_category": "validation_error"}, "invalid", "failure"),
        ({"status": "failure", "err_category": "lease_expired"}, "again", "lease_expired"),
        ({"status": "cancelled"}, "raised", "reports cancelled"),
        ({"status": "unknown"}, "raised", "reports unknown"),
        ({"status": "success"}, "invalid", "without a sample"),
        ((200, {"rollout_id": "another", **SUCCESS}), "process", "'another'"),
        ((200, "text"), "process", "not a JSON object"),
        (b"HTTP/1.1 200 Said\r\ncontent-length: 3\r\n\r\n{{{", "process", "not a JSON object"),
        ((404, {"detail": "unknown rollout_id"}), "again", "forgot"),
        ((403, {"detail": "invalid polling lease"}), "again", "forgot"),
        ((422, {}), "invalid", "422"),
        ((500, {"detail": "oh"}), "process", "gives no result: it answers 500"),
        (b"", "process", "gives no result"),
    ],
)
async def test_a_result_that_is_none_fails_the_sample(
    result: Answer | dict[str, object], category: str, why: str
) -> None:
    found = await Scripted(result).failure()
    assert found[0] == category
    assert why in found[1]


@pytest.mark.parametrize("once", [(500, {}), (502, {}), b""])
async def test_a_poll_that_fails_is_repeated_while_the_lease_lasts(once: Answer) -> None:
    assert await Scripted(once, SUCCESS).make() == ServerGrade(1.0)


@pytest.mark.parametrize(
    ("sample", "why"),
    [
        ({"reward": None}, "no reward"),
        ({"reward": 1, "remove_sample": True}, "removed"),
        ({"reward": "1"}, "returned str"),
        ({"reward": True}, "returned bool"),
        ({"reward": float("nan")}, "nan"),
        ({"reward": 10**400}, "finite"),
    ],
)
async def test_a_reward_that_is_none_has_a_reason(sample: dict[str, object], why: str) -> None:
    grade = await Scripted({"status": "success", "sample": sample}).make()
    assert grade.reward is None
    assert why in (grade.problem or "")


async def test_a_cancelled_attempt_is_cancelled_at_the_server() -> None:
    server = Scripted({"status": "running"})
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.2):
            await server.make()
    assert server.cancelled == [server.requests[0]["rollout_id"]]


async def test_a_chunked_answer_is_read() -> None:
    async def script(asked: str, body: Any) -> Answer:
        head = b"HTTP/1.1 200 Said\r\ntransfer-encoding: chunked\r\n\r\n"
        return head + b"3\r\n{}\n\r\n2;x\r\n12\r\n0\r\n\r\n"

    async with scripted(script) as server:
        assert (await server.request("GET", "/", timeout_s=5)).body == b"{}\n12"
