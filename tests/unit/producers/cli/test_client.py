"""Which requests the client repeats and for how long, and what it says of a server that is lost."""

from collections.abc import Callable
from types import SimpleNamespace

import httpx
import pytest

from producers.cli import client as client_module
from producers.cli.client import BACKOFF_S, LISTS, LOST_S, Client, ServerAddress
from producers.cli.errors import Failure
from producers.cli.main import COMMANDS

URL = "http://127.0.0.1:8420"
Attempt = httpx.Response | type[httpx.TransportError]


class Wire:
    """A server that is reached by a clock without waiting. It gives `attempts` in turn, and then refuses
    every connection."""

    def __init__(self, *attempts: Attempt) -> None:
        self.attempts = list(attempts)
        self.keys: list[str | None] = []
        self.now = 0.0

    def __call__(self, request: httpx.Request) -> httpx.Response:
        self.keys.append(request.headers.get("Idempotency-Key"))
        answer = self.attempts.pop(0) if self.attempts else httpx.ConnectError
        if isinstance(answer, httpx.Response):
            return answer
        raise answer("gone")

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def connect(monkeypatch: pytest.MonkeyPatch) -> Callable[[Wire], Client]:
    def connected(wire: Wire) -> Client:
        clock = SimpleNamespace(monotonic=lambda: wire.now, sleep=wire.sleep)
        monkeypatch.setattr(client_module, "time", clock)
        return Client(ServerAddress(URL, None), transport=httpx.MockTransport(wire))

    return connected


@pytest.mark.parametrize("number", [float("nan"), float("inf"), -float("inf")])
def test_a_number_that_json_does_not_have_is_refused_by_its_key_and_nothing_is_sent(
    connect: Callable[[Wire], Client], number: float
) -> None:
    """`train regrade --threshold nan` and `train fork --set training.lr=inf` ended in a traceback."""
    wire = Wire(httpx.Response(201, json={}))
    body = {"threshold": 1.0, "set": {"training.lr": number}}
    with pytest.raises(Failure, match=r"set\.training\.lr must be a finite number, got") as found:
        connect(wire).post("/runs/first/fork", body)
    assert found.value.code == "VALIDATION"
    assert not wire.keys


@pytest.mark.parametrize("lost", [httpx.ReadError, httpx.RemoteProtocolError, httpx.WriteError])
def test_a_write_whose_answer_is_lost_is_repeated_under_its_key_until_the_server_is_back(
    connect: Callable[[Wire], Client], lost: type[httpx.TransportError]
) -> None:
    away = [httpx.ConnectError] * 10
    wire = Wire(lost, *away, httpx.Response(503), httpx.Response(201, json={"run": 1}))
    assert connect(wire).post("/runs", {}) == {"run": 1}
    assert sum(BACKOFF_S) < wire.now < LOST_S
    assert len(set(wire.keys)) == 1


def test_an_answer_that_stays_lost_is_told_with_the_list_that_shows_what_was_made(
    connect: Callable[[Wire], Client],
) -> None:
    wire = Wire(httpx.ReadError)
    with pytest.raises(Failure) as caught:
        connect(wire).post("/runs", {})
    assert caught.value.code == "ANSWER_LOST"
    assert "may have been done" in caught.value.message
    assert "`headrace train list`" in caught.value.message
    assert "start one" not in caught.value.message
    assert LOST_S <= wire.now < LOST_S + 2


def test_a_server_that_was_never_reached_is_given_up_soon(
    connect: Callable[[Wire], Client],
) -> None:
    wire = Wire()
    with pytest.raises(Failure, match="no Headrace server answers"):
        connect(wire).post("/runs", {})
    assert wire.now == pytest.approx(sum(BACKOFF_S))
    assert len(wire.keys) == len(BACKOFF_S) + 1


def test_a_read_whose_answer_is_lost_is_given_up_soon(connect: Callable[[Wire], Client]) -> None:
    wire = Wire(httpx.ReadError)
    with pytest.raises(Failure, match="no Headrace server answers"):
        connect(wire).get("/runs")
    assert wire.now == pytest.approx(sum(BACKOFF_S))


def test_each_list_that_is_named_is_a_command() -> None:
    assert {command.partition(" ")[0] for command in LISTS.values()} <= COMMANDS.keys()


@pytest.mark.parametrize(
    "answer",
    [
        httpx.Response(404, html="<h1>Not Found</h1>"),
        httpx.Response(404, json={"detail": "Not Found"}),
        httpx.Response(501, text="Unsupported method"),
    ],
)
def test_an_error_of_another_program_is_named_as_one(
    connect: Callable[[Wire], Client], answer: httpx.Response
) -> None:
    with pytest.raises(Failure) as caught:
        connect(Wire(answer)).get("/status")
    assert caught.value.code == "BAD_ANSWER"
    told = f"what answers at {URL} is not Headrace (HTTP {answer.status_code}); stop it, or set "
    assert told + "HEADRACE_URL" in caught.value.message
