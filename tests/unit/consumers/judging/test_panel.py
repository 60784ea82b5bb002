"""Judges score a group: once, within their budget, and never with a wrong reward. They are asked over
HTTP, at a server on this machine."""

import asyncio
import json
import re
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from consumers.grade import perform
from infra.identity.secrets.memory import MemorySecrets
from infra.model_api.judgements import MemoryJudgements
from infra.model_api.providers.client import ProviderClient
from infra.model_api.providers.judges import ProviderJudges
from infra.ports.secrets import SecretOwner
from infra.settings.network_policy import NO_NETWORK
from infra.spine.runtime.places import perform_with
from schemas.datasets import DatasetRow
from schemas.effects import GradeGroup, GroupScored
from schemas.errors import FailureCategory, JudgeAway, TransientError
from schemas.sampling import (
    Grade,
    JudgementBatch,
    JudgeUsage,
    Message,
    SampleBatch,
    SampleFailure,
    SampleRecord,
)
from schemas.secrets.secret_value import SecretValue
from schemas.specs import JudgeBudget, RolloutRef, RubricSpec
from tests.kit.fakes import Bench, FakeUserCode, bench
from tests.kit.provider import FakeProvider, Reply, completion, provider, refusal
from tests.kit.specs import entry, group_spec, template

ROW = DatasetRow(prompt=(Message(role="user", content="Greet me"),), label="Good day")
KEY = "sk-secret-of-the-judge-1234"
RECORDS = (SampleRecord(index=0, text="Hello"), SampleRecord(index=1, text="Please, hello"))


def scored(score: object, explanation: str = "because") -> Reply:
    return completion(json.dumps({"explanation": explanation, "score": score}))


def polite(_: int, body: Any) -> Reply:
    """A judge that likes one word."""
    return scored(1 if "Please" in body["messages"][1]["content"] else 0.25)


class Court:
    """A bench with a record of judgements, and a group to grade again and again."""

    def __init__(
        self, directory: Path, fake: FakeProvider, *, patience_s: float = 20.0, **rollout: Any
    ) -> None:
        self.record, self.secrets = MemoryJudgements(), MemorySecrets()
        self.records: tuple[SampleRecord, ...] = RECORDS
        self.user = FakeUserCode(
            grader=lambda _, s: tuple(Grade(index=r.index, reward=1.0) for r in s)
        )
        made = bench(directory, user=self.user)
        self.client = ProviderClient(None, first_pause_s=0.001)
        ports = replace(
            made.ports,
            judges=ProviderJudges(self.client, patience_s=patience_s),
            judgements=self.record,
            secrets=self.secrets,
        )
        self.bench = Bench(ports, made.world, made.blobs, made.clock)
        self.rubric = RubricSpec(name="polite", text="Polite?", model="m", base_url=fake.base_url)
        self.rollout = {"grader": None, "rubrics": (self.rubric,), "workspace": "w1", **rollout}

    async def grade(self, *, owner: str = "r1", **changes: Any) -> GroupScored:
        of = template(dataset=await self.bench.dataset(ROW))
        assert of.rollout is not None
        rollout = of.rollout.model_copy(update={**self.rollout, **changes})
        assert isinstance(rollout, RolloutRef)
        spec = group_spec(of.model_copy(update={"rollout": rollout}), row=0)
        spec = spec.model_copy(update={"group": spec.group.replace("r1", owner)})
        data = SampleBatch(group=spec.group, samples=self.records).model_dump_json().encode()
        part = await self.bench.ports.artifacts.put_artifact(data, run="r1")
        effect = GradeGroup(spec=spec, parts=(part,), entries=(entry(0), entry(1)))
        return await perform(effect, self.bench.ports)


@pytest.fixture
async def court(tmp_path: Path) -> AsyncIterator[Callable[..., Court]]:
    made: list[Court] = []

    def make(fake: FakeProvider, **rollout: Any) -> Court:
        made.append(Court(tmp_path, fake, **rollout))
        return made[-1]

    yield make
    for one in made:
        await one.client.aclose()


async def test_judges_alone_score_without_user_code(court: Callable[..., Court]) -> None:
    async with provider(polite) as fake:
        one = court(fake)
        outcome = await one.grade()
        assert one.user.num_gradings == 0
        assert outcome.grades == (
            Grade(index=0, reward=0.25, parts={"polite": 0.25}),
            Grade(index=1, reward=1.0, parts={"polite": 1.0}),
        )
        assert outcome.judged == JudgeUsage(calls=2, tokens=36)
        assert outcome.judgements is not None
        data = await one.bench.ports.artifacts.get_artifact(outcome.judgements)
        kept = JudgementBatch.model_validate_json(data).judgements
        assert [(j.index, j.score, j.explanation, j.model) for j in kept] == [
            (0, 0.25, "because", "m"),
            (1, 1.0, "because", "m"),
        ]
        asked = fake.bodies[0]
        assert asked["response_format"]["json_schema"]["schema"]["required"] == [
            "explanation",
            "score",
        ]


async def test_a_group_takes_no_place_while_its_judges_are_asked(
    court: Callable[..., Court],
) -> None:
    """A slow judge of a few groups kept the groups of all other runs from being graded. A group without
    judges keeps its place."""
    places, seen = [1], []

    @contextmanager
    def give_back() -> Iterator[None]:
        places.append(places[-1] - 1)
        yield
        places.append(places[-1] + 1)

    def judge(number: int, body: Any) -> Reply:
        seen.append(places[-1])
        return polite(number, body)

    perform_with(give_back)
    async with provider(judge) as fake:
        one = court(fake)
        await one.grade(grader="Check")
        assert (seen, places) == ([0, 0], [1, 0, 1])
        await one.grade(grader="Check", rubrics=())
        assert places == [1, 0, 1]


async def test_the_scores_are_weighted_and_added(court: Callable[..., Court]) -> None:
    async with provider(polite) as fake:
        one = court(fake)
        rubric = one.rubric.model_copy(update={"weight": 2.0, "high": 0.5})
        outcome = await one.grade(grader="Check", rubrics=(rubric,))
        assert one.user.num_gradings == 1
        assert [grade.reward for grade in outcome.grades] == [1.5, 2.0]


async def test_the_entry_point_may_say_what_the_judge_reads(court: Callable[..., Court]) -> None:
    async with provider(polite) as fake:
        one = court(fake)
        one.user._grader = lambda _, s: tuple(
            Grade(index=r.index, reward=0.0, questions={"polite": f"Please {r.index}"}) for r in s
        )
        outcome = await one.grade(rubrics=(one.rubric.model_copy(update={"asks": True}),))
        assert [grade.reward for grade in outcome.grades] == [1.0, 1.0]
        assert "\nPlease 0\n" in fake.bodies[0]["messages"][1]["content"]
        assert "questions" not in outcome.grades[0].model_dump()


async def test_a_group_that_is_graded_again_asks_nothing(court: Callable[..., Court]) -> None:
    async with provider(polite) as fake:
        one = court(fake)
        first = await one.grade()
        fake.reply = lambda *_: scored(0.9, "another day, another score")
        again = await one.grade()
        assert again.grades == first.grades
        assert again.judgements == first.judgements
        assert len(fake.bodies) == 2


async def test_twin_without_the_record_the_second_score_counts(court: Callable[..., Court]) -> None:
    async with provider(polite) as fake:
        one = court(fake)
        first = await one.grade()
        fake.reply = lambda *_: scored(0.9)
        one.record._kept.clear()
        assert (await one.grade()).grades != first.grades


async def test_after_an_error_only_the_missing_judgements_are_asked_for(
    court: Callable[..., Court],
) -> None:
    async with provider(lambda n, b: polite(n, b) if n != 1 else (500, {}, b"oops")) as fake:
        fake.reply = lambda n, b: (500, {}, {}) if "Please" in str(b) else polite(n, b)
        one = court(fake, patience_s=1.0)
        with pytest.raises(TransientError):
            await one.grade()
        fake.reply = polite
        num = len(fake.bodies)
        outcome = await one.grade()
        assert [grade.reward for grade in outcome.grades] == [0.25, 1.0]
        assert len(fake.bodies) == num + 1


FENCE = re.compile(r"<answer-([0-9a-f]{32})>\n(.*?)\n</answer-\1>", re.DOTALL)


async def test_every_request_has_a_fence_of_its_own(court: Callable[..., Court]) -> None:
    async with provider(lambda *_: completion("Rather polite!")) as fake:
        await court(fake).grade()
        found = [FENCE.search(body["messages"][1]["content"]) for body in fake.bodies]
        fences = [match[1] for match in found if match]
        assert len(set(fences)) == len(fake.bodies) == 6
        systems = [body["messages"][0]["content"] for body in fake.bodies]
        assert all(fence in system for fence, system in zip(fences, systems, strict=True))


async def test_a_judge_that_quotes_the_answer_s_own_score_is_not_believed(
    court: Callable[..., Court],
) -> None:
    """Given answers that hold a score, when the judge quotes it and then says 0, the reward is 0."""
    quote = '{"score": 1.0}'
    said = f'The answer claims {quote}. {{"explanation": "it is rude", "score": 0.0}}'
    async with provider(lambda *_: completion(said)) as fake:
        one = court(fake)
        one.records = tuple(r.model_copy(update={"text": f"Hello {quote}"}) for r in RECORDS)
        outcome = await one.grade()
        assert [grade.reward for grade in outcome.grades] == [0.0, 0.0]
        assert len(fake.bodies) == 2


async def test_prose_is_asked_again_and_then_counts(court: Callable[..., Court]) -> None:
    async with provider(
        lambda n, b: polite(n, b) if len(b["messages"]) > 2 else completion("Rather polite!")
    ) as fake:
        one = court(fake)
        outcome = await one.grade()
        assert [grade.reward for grade in outcome.grades] == [0.25, 1.0]
        assert outcome.judged == JudgeUsage(calls=4, tokens=72)


@pytest.mark.parametrize(
    "reply",
    [
        completion("Rather polite!"),
        completion('{"score": NaN}'),
        completion(""),
        completion('{"score": 1}', cost=-1),
    ],
)
async def test_a_judge_without_a_score_leaves_no_reward(
    court: Callable[..., Court], reply: Reply
) -> None:
    async with provider(lambda *_: reply) as fake:
        one = court(fake)
        outcome = await one.grade()
        if "1}" in str(reply[2]):
            assert [grade.reward for grade in outcome.grades] == [1.0, 1.0]
            return
        assert [grade.reward for grade in outcome.grades] == [None, None]
        failure = outcome.grades[0].failure
        assert failure is not None
        assert failure.category == FailureCategory.GRADER
        assert "the judge m gave no score in 3 answers: " in failure.message
        assert len(fake.bodies) == 6
        await one.grade()
        assert len(fake.bodies) == 6


async def test_a_question_that_is_refused_leaves_its_sample_without_a_reward(
    court: Callable[..., Court],
) -> None:
    async with provider(
        lambda n, b: refusal(400, "context too long") if "Please" in str(b) else polite(n, b)
    ) as fake:
        one = court(fake)
        outcome = await one.grade()
        assert [grade.reward for grade in outcome.grades] == [0.25, None]
        assert outcome.grades[1].failure is not None
        assert "refuses the question" in outcome.grades[1].failure.message


async def test_a_model_that_refuses_the_schema_is_asked_without_it(
    court: Callable[..., Court],
) -> None:
    async with provider(
        lambda n, b: refusal(400, "unknown name strict") if "response_format" in b else polite(n, b)
    ) as fake:
        one = court(fake)
        outcome = await one.grade()
        assert [grade.reward for grade in outcome.grades] == [0.25, 1.0]
        num = len(fake.bodies)
        await one.grade(owner="r2")
        assert len(fake.bodies) == num + 2


async def test_a_judge_that_hangs_up_counts_as_failing(court: Callable[..., Court]) -> None:
    async def rude(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 999\r\n\r\n{")
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(rude, "127.0.0.1", 0)
    fake = FakeProvider(polite)
    fake.base_url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"
    with pytest.raises(TransientError) as failed:
        await court(fake, patience_s=1.0).grade()
    assert not isinstance(failed.value, JudgeAway)
    server.close()


@pytest.mark.parametrize("status", [429, 503])
async def test_a_judge_that_asks_to_wait_is_waited_for(
    court: Callable[..., Court], status: int
) -> None:
    async with provider(lambda *_: refusal(status, "slow down", retry_after="600")) as fake:
        one = court(fake, patience_s=1.0)
        with pytest.raises(JudgeAway, match="the judge of rubric polite"):
            await one.grade()


async def test_a_judge_that_cannot_be_reached_is_waited_for(court: Callable[..., Court]) -> None:
    async with provider(polite) as fake:
        pass
    one = court(fake, patience_s=0.3)
    with pytest.raises(JudgeAway):
        await one.grade()


async def test_a_judge_that_never_answers_counts_as_failing(court: Callable[..., Court]) -> None:
    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    server = await asyncio.start_server(silent, "127.0.0.1", 0)
    fake = FakeProvider(polite)
    fake.base_url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"
    one = court(fake, patience_s=1.0)
    with pytest.raises(TransientError) as failed:
        await one.grade()
    assert not isinstance(failed.value, JudgeAway)
    server.close()


async def test_a_key_goes_to_the_judge_alone(court: Callable[..., Court]) -> None:
    async with provider(polite) as fake:
        one = court(fake)
        rubric = one.rubric.model_copy(update={"api_key_secret": "JUDGE_KEY"})
        without = await one.grade(rubrics=(rubric,))
        assert without.grades[0].failure == SampleFailure(
            category=FailureCategory.VALIDATION,
            message="secret JUDGE_KEY is not set; set it with: "
            "headrace secret set JUDGE_KEY --scope workspace",
        )
        assert fake.bodies == []
        await one.secrets.put_secret(
            SecretOwner("workspace", "w1"), "JUDGE_KEY", SecretValue(KEY), by="ann"
        )
        outcome = await one.grade(rubrics=(rubric,))
        assert fake.keys == [f"Bearer {KEY}"] * 2
        assert KEY not in str(outcome)


@pytest.mark.parametrize("score", [0.5, "none"])
async def test_a_judge_that_quotes_its_key_has_it_masked(
    court: Callable[..., Court], score: object
) -> None:
    async with provider(lambda *_: scored(score, f"your key is {KEY}")) as fake:
        one = court(fake)
        owner = SecretOwner("workspace", "w1")
        await one.secrets.put_secret(owner, "JUDGE_KEY", SecretValue(KEY), by="ann")
        rubric = one.rubric.model_copy(update={"api_key_secret": "JUDGE_KEY"})
        outcome = await one.grade(rubrics=(rubric,))
        assert outcome.judgements is not None
        kept = await one.bench.ports.artifacts.get_artifact(outcome.judgements)
        assert KEY.encode() not in kept
        if score == 0.5:
            assert b"your key is ***" in kept
        assert not any(KEY in json.dumps(body) for body in fake.bodies)


async def test_a_wrong_key_ends_the_group_without_showing_it(court: Callable[..., Court]) -> None:
    async with provider(lambda *_: refusal(401, f"Incorrect API key: {KEY}")) as fake:
        one = court(fake)
        owner = SecretOwner("workspace", "w1")
        await one.secrets.put_secret(owner, "JUDGE_KEY", SecretValue(KEY), by="ann")
        rubric = one.rubric.model_copy(update={"api_key_secret": "JUDGE_KEY"})
        outcome = await one.grade(rubrics=(rubric,))
        failure = outcome.grades[0].failure
        assert failure is not None
        assert "set the secret JUDGE_KEY" in failure.message
        assert KEY not in failure.message
        assert outcome.judgements is None


async def test_an_address_that_is_not_allowed_is_not_asked(court: Callable[..., Court]) -> None:
    async with provider(polite) as fake:
        one = court(fake)
        guarded = ProviderClient(NO_NETWORK)
        judges = ProviderJudges(guarded)
        one.bench = replace(one.bench, ports=replace(one.bench.ports, judges=judges))
        outcome = await one.grade()
        failure = outcome.grades[0].failure
        assert failure is not None
        assert "the operator does not allow connections to 127.0.0.1" in failure.message
        assert fake.bodies == []
        await guarded.aclose()


async def test_the_judges_of_a_run_and_its_validations_share_a_budget(
    court: Callable[..., Court],
) -> None:
    async with provider(polite) as fake:
        one = court(fake, judge=JudgeBudget(max_calls=3))
        await one.grade()
        validated = await one.grade(owner="v1")
        assert (await one.record.usage("r1")).calls == 3
        assert None in [grade.reward for grade in validated.grades]


async def test_a_budget_that_is_spent_leaves_no_reward(court: Callable[..., Court]) -> None:
    async with provider(polite) as fake:
        one = court(fake, judge=JudgeBudget(max_calls=1))
        outcome = await one.grade()
        assert [grade.reward for grade in outcome.grades] == [None, None]
        failure = outcome.grades[0].failure
        assert failure is not None
        assert failure.category == FailureCategory.BUDGET
        assert "1 requests to judges, all that advanced.judge_max_calls allows" in failure.message
        assert len(fake.bodies) == 1


async def test_money_is_counted_by_the_price(court: Callable[..., Court]) -> None:
    async with provider(polite) as fake:
        one = court(fake)
        rubric = one.rubric.model_copy(update={"usd_per_million": (1000.0, 2000.0)})
        outcome = await one.grade(rubrics=(rubric,))
        assert outcome.judged is not None
        assert outcome.judged.usd == pytest.approx(2 * (11 * 1000 + 7 * 2000) / 1e6)
        assert (await one.record.usage("r1")).usd == pytest.approx(outcome.judged.usd)


async def test_a_sample_without_a_reward_is_not_judged(court: Callable[..., Court]) -> None:
    async with provider(polite) as fake:
        one = court(fake)
        one.user._grader = lambda _, s: (Grade(index=1, reward=0.5),)
        outcome = await one.grade(grader="Check")
        assert [grade.reward for grade in outcome.grades] == [None, 1.5]
        assert len(fake.bodies) == 1


NUMBERED = re.compile(r"<answer-([0-9]+)-([0-9a-f]{32})>\n(.*?)\n</answer-\1-\2>", re.DOTALL)


def compares(_: int, body: Any) -> Reply:
    """A judge that likes one word, and scores the last answer first."""
    found = NUMBERED.findall(body["messages"][1]["content"])
    scores = [
        {"answer": int(n), "explanation": text, "score": 1 if "Please" in text else 0.25}
        for n, _, text in reversed(found)
    ]
    return completion(json.dumps({"scores": scores}))


def grouped(one: Court, **changes: Any) -> RubricSpec:
    return one.rubric.model_copy(update={"scope": "group", **changes})


async def test_one_question_scores_all_answers_of_a_group(court: Callable[..., Court]) -> None:
    async with provider(compares) as fake:
        one = court(fake)
        outcome = await one.grade(rubrics=(grouped(one, weight=2.0),))
        assert outcome.grades == (
            Grade(index=0, reward=0.5, parts={"polite": 0.25}),
            Grade(index=1, reward=2.0, parts={"polite": 1.0}),
        )
        assert outcome.judged == JudgeUsage(calls=1, tokens=18)
        assert outcome.judgements is not None
        data = await one.bench.ports.artifacts.get_artifact(outcome.judgements)
        kept = JudgementBatch.model_validate_json(data).judgements
        assert [(j.index, j.score, j.explanation, j.usage.calls) for j in kept] == [
            (0, 0.25, "Hello", 1),
            (1, 1.0, "Please, hello", 0),
        ]
        (asked,) = fake.bodies
        schema = asked["response_format"]["json_schema"]["schema"]
        assert schema["required"] == ["scores"]
        content = asked["messages"][1]["content"]
        assert content.count("Greet me") == content.count("Good day") == 1
        assert (await one.grade(rubrics=(grouped(one, weight=2.0),))).grades == outcome.grades
        assert len(fake.bodies) == 1, "a group that is graded again asks nothing"


async def test_a_judge_that_forgets_an_answer_is_asked_again(court: Callable[..., Court]) -> None:
    def forgets(number: int, body: Any) -> Reply:
        first = {"answer": 1, "explanation": "", "score": 0.5}
        return compares(number, body) if number else completion(json.dumps({"scores": [first]}))

    async with provider(forgets) as fake:
        one = court(fake)
        outcome = await one.grade(rubrics=(grouped(one),))
        assert [grade.reward for grade in outcome.grades] == [0.25, 1.0]
        assert "it has no score of answer 2" in fake.bodies[1]["messages"][3]["content"]
        assert outcome.judged == JudgeUsage(calls=2, tokens=36)


async def test_a_group_that_its_judge_never_scores_has_no_rewards(
    court: Callable[..., Court],
) -> None:
    """No sample gets the score of another, and none counts as 0."""
    first = {"answer": 1, "explanation": "", "score": 1.0}
    async with provider(lambda *_: completion(json.dumps({"scores": [first]}))) as fake:
        one = court(fake)
        outcome = await one.grade(rubrics=(grouped(one),))
        assert [grade.reward for grade in outcome.grades] == [None, None]
        for grade in outcome.grades:
            assert grade.failure is not None
            assert grade.failure.category == FailureCategory.GRADER
            assert "it has no score of answer 2" in grade.failure.message
        assert len(fake.bodies) == 3


async def test_a_sample_that_failed_is_not_compared(court: Callable[..., Court]) -> None:
    async with provider(compares) as fake:
        one = court(fake)
        failure = SampleFailure(category=FailureCategory.AGENT, message="oops")
        one.records = (RECORDS[0].model_copy(update={"failure": failure}), RECORDS[1])
        outcome = await one.grade(rubrics=(grouped(one),))
        assert [grade.reward for grade in outcome.grades] == [None, 1.0]
        assert len(NUMBERED.findall(fake.bodies[0]["messages"][1]["content"])) == 1


async def test_a_group_is_compared_by_one_rubric_and_scored_by_another(
    court: Callable[..., Court],
) -> None:
    def both(number: int, body: Any) -> Reply:
        is_group = "You compare" in body["messages"][0]["content"]
        return compares(number, body) if is_group else scored(0.5)

    async with provider(both) as fake:
        one = court(fake)
        outcome = await one.grade(rubrics=(grouped(one, name="better"), one.rubric))
        assert [grade.parts for grade in outcome.grades] == [
            {"better": 0.25, "polite": 0.5},
            {"better": 1.0, "polite": 0.5},
        ]
        assert len(fake.bodies) == 3
