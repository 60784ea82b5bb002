"""Teachers on servers: wrong answers are refused with the row and the token, and a server that is away
is waited for."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, cast

import pytest

from infra.model_api.providers.client import ProviderClient
from infra.model_api.providers.teachers import AT_ONCE, VllmTeachers
from infra.settings.network_policy import NO_NETWORK
from schemas.errors import Refused, TeacherAway, TransientError
from schemas.sampling import ProviderRef, Sequence
from schemas.secrets.secret_value import SecretValue
from tests.kit.provider import FakeProvider, provider, refusal
from tests.kit.teacher import MODEL, FakeTeacher, Fault, distribution, row_of

ROW = row_of((9, 12, 15, 18, 21), prompt=2)
WHAT = "row 0 of sample 3"
KEY = SecretValue("sk-of-the-teacher-1234")


def ref_of(fake: FakeProvider) -> ProviderRef:
    return ProviderRef(name=MODEL, model=MODEL, base_url=fake.base_url, secret="TEACHER_KEY")


@asynccontextmanager
async def asking(
    reply: Any, *, patience_s: float = 60
) -> AsyncIterator[tuple[VllmTeachers, FakeProvider]]:
    async with provider(reply) as fake:
        client = ProviderClient(None, first_pause_s=0.001)
        try:
            yield VllmTeachers(client, patience_s=patience_s), fake
        finally:
            await client.aclose()


async def test_a_row_is_read_in_one_request_with_its_own_tokens() -> None:
    teacher = FakeTeacher()
    async with asking(teacher) as (teachers, fake):
        found = await teachers.read(ref_of(fake), ROW, key=KEY, what=WHAT)
    assert found.logprobs == (
        0.0,
        0.0,
        *(distribution(before, teacher.texts)[token] for before, token in ((12, 15), (15, 18))),
        distribution(18, teacher.texts)[21],
    )
    (body,) = fake.bodies
    assert body["prompt"] == list(ROW.tokens)
    assert (body["temperature"], body["prompt_logprobs"], body["max_tokens"]) == (1.0, 0, 1)
    assert fake.keys == [f"Bearer {KEY.reveal()}"]
    assert fake.paths == ["/v1/completions"]


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ("nan", "gives token 18 in place 3 the log-probability nan; check the teacher's weights"),
        ("infinite", "gives token 18 in place 3 the log-probability -inf"),
        ("null", "gives token 18 in place 3 the log-probability None"),
        ("least", "gives token 18 in place 3 the log-probability -9999.0"),
        ("short", "has 4 log-probabilities for 5 tokens"),
        ("shifted", "has no log-probability of token 12 in place 1"),
        ("unnamed", "has no prompt_logprobs; check that the base URL is that of a vLLM server"),
        ("textless", "has no text of token 18, by which the vocabularies are compared; start"),
    ],
)
async def test_an_answer_that_cannot_be_learned_from_names_the_row_and_the_token(
    fault: Fault, says: str
) -> None:
    async with asking(FakeTeacher(fault=fault, fault_from=3)) as (teachers, fake):
        with pytest.raises(TransientError) as raised:
            await teachers.read(ref_of(fake), ROW, key=None, what=WHAT)
    assert not isinstance(raised.value, TeacherAway), "each attempt counts"
    assert says in str(raised.value)
    assert f"the teacher {MODEL} at {fake.base_url} gave no usable answer about {WHAT}" in str(
        raised.value
    )


@pytest.mark.parametrize("fault", ["nan", "infinite", "least"])
async def test_a_token_that_the_policy_did_not_choose_may_be_impossible(fault: Fault) -> None:
    """A teacher may find a part of the prompt impossible. Nothing is learned there."""
    async with asking(FakeTeacher(fault=fault, fault_from=1)) as (teachers, fake):
        found = await teachers.read(ref_of(fake), ROW, key=None, what=WHAT)
    assert found.logprobs[:2] == (0.0, 0.0)


@pytest.mark.parametrize(
    ("logprob", "found"), [(0, 0.0), (5e-4, 0.0), (-0.0, 0.0), (-700.5, -700.5)]
)
async def test_a_logprob_that_rounding_brought_above_zero_counts_as_zero(
    logprob: float, found: float
) -> None:
    said = [None, {"12": {"logprob": logprob, "decoded_token": "a"}}]
    body = {"choices": [{"prompt_logprobs": said}]}
    async with asking(lambda *_: (200, {}, body)) as (teachers, fake):
        row = row_of((9, 12), prompt=1)
        read = await teachers.read(ref_of(fake), row, key=None, what=WHAT)
    assert read.logprobs == (0.0, found)


@pytest.mark.parametrize(
    "answer", [b"", b"[]", b"{", b"[[" * 9999, {"choices": []}, {"choices": [{}]}, {"choices": 3}]
)
async def test_an_answer_of_another_form_is_not_used(answer: Any) -> None:
    async with asking(lambda *_: (200, {}, answer)) as (teachers, fake):
        with pytest.raises(TransientError, match="no usable answer about row 0 of sample 3"):
            await teachers.read(ref_of(fake), ROW, key=None, what=WHAT)


@pytest.mark.parametrize("logprob", [0.5, True, "-1", 10**400, [], {"a": 1}])
async def test_a_value_that_is_not_a_logprob_is_not_used(logprob: Any) -> None:
    said = [None, {"12": {"logprob": logprob, "decoded_token": "a"}}]
    body = {"choices": [{"prompt_logprobs": said}]}
    row = row_of((9, 12), prompt=1)
    async with asking(lambda *_: (200, {}, body)) as (teachers, fake):
        with pytest.raises(TransientError, match="gives token 12 in place 1 the log-prob"):
            await teachers.read(ref_of(fake), row, key=None, what=WHAT)


async def test_a_server_that_is_away_is_waited_for() -> None:
    teacher = FakeTeacher(fault="down")
    async with asking(teacher, patience_s=0.5) as (teachers, fake):
        with pytest.raises(TeacherAway, match=f"asked about {WHAT}: .*did not answer.* 503"):
            await teachers.read(ref_of(fake), ROW, key=None, what=WHAT)
        assert len(teacher.asked) > 1
        closed = ref_of(fake).model_copy(update={"base_url": "http://127.0.0.1:9/v1"})
        with pytest.raises(TeacherAway, match="did not answer within"):
            await teachers.read(closed, ROW, key=None, what=WHAT)


async def test_a_server_that_fails_otherwise_is_asked_a_few_times_only() -> None:
    async with asking(lambda *_: refusal(500, "out of memory"), patience_s=0.5) as (teachers, fake):
        with pytest.raises(TransientError, match="500") as raised:
            await teachers.read(ref_of(fake), ROW, key=None, what=WHAT)
    assert not isinstance(raised.value, TeacherAway)


async def test_a_wrong_key_is_refused_and_not_shown() -> None:
    quoting = refusal(401, f"wrong key {KEY.reveal()}")
    async with asking(lambda *_: quoting) as (teachers, fake):
        with pytest.raises(Refused, match="TEACHER_KEY") as raised:
            await teachers.read(ref_of(fake), ROW, key=KEY, what=WHAT)
    assert KEY.reveal() not in str(raised.value)


async def test_a_key_that_a_server_quotes_as_a_token_is_masked() -> None:
    said = [None, {"12": {"logprob": -1.0, "decoded_token": f"<{KEY.reveal()}>"}}]
    body = {"choices": [{"prompt_logprobs": said}]}
    async with asking(lambda *_: (200, {}, body)) as (teachers, fake):
        row = row_of((9, 12), prompt=1)
        found = await teachers.read(ref_of(fake), row, key=KEY, what=WHAT)
    assert found.texts == {12: "<***TEACHER_KEY***>"}


@pytest.mark.parametrize("said", [KEY.reveal(), [KEY.reveal()], {KEY.reveal(): 0}, True])
async def test_a_logprob_that_is_no_number_is_not_shown(said: object) -> None:
    """A server that was given the key may quote it anywhere."""
    entry = {"12": {"logprob": said, "decoded_token": "a"}}
    body = {"choices": [{"prompt_logprobs": [None, entry]}]}
    async with asking(lambda *_: (200, {}, body)) as (teachers, fake):
        with pytest.raises(TransientError, match="the log-probability of type") as raised:
            await teachers.read(ref_of(fake), row_of((9, 12), prompt=1), key=KEY, what=WHAT)
    assert KEY.reveal() not in str(raised.value)


async def test_an_address_that_the_operator_does_not_allow_is_not_asked() -> None:
    async with provider(FakeTeacher()) as fake:
        client = ProviderClient(NO_NETWORK)
        with pytest.raises(Refused, match="the operator does not allow connections to"):
            await VllmTeachers(client).read(ref_of(fake), ROW, key=None, what=WHAT)
        await client.aclose()
    assert not fake.bodies


class SlowClient:
    """A client whose requests take a turn of the event loop."""

    def __init__(self) -> None:
        self.now, self.most, self.asked = 0, 0, 0

    async def ask(self, *_: object, **__: object) -> bytes:
        self.asked += 1
        self.now += 1
        self.most = max(self.most, self.now)
        await asyncio.sleep(0)
        self.now -= 1
        return json.dumps(FakeTeacher()(0, body_of(ROW))[2]).encode()


def body_of(row: Sequence) -> dict[str, Any]:
    return {"model": MODEL, "prompt": row.tokens, "max_tokens": 1}


async def test_a_server_reads_few_rows_at_once_whoever_asks() -> None:
    """The others wait before their request, where no deadline runs. Each server has its places."""
    client = SlowClient()
    teachers = VllmTeachers(cast("ProviderClient", client))
    refs = [ProviderRef(name=MODEL, model=MODEL, base_url=f"http://{h}/v1") for h in "ab"]
    for asked in (refs[:1], refs):
        client.most = 0
        await asyncio.gather(
            *(teachers.read(ref, ROW, key=None, what=WHAT) for ref in asked for _ in range(40))
        )
        assert client.most == AT_ONCE * len(asked)
    assert client.asked == 120
    assert not teachers._rooms, "nothing is kept for a server that nobody asks"
