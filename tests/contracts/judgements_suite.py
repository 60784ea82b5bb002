"""What every record of judgements does."""

import asyncio
from abc import ABC, abstractmethod

import pytest

from infra.ports.judges import JudgementRecord
from schemas.sampling import Judgement, JudgeUsage
from schemas.specs import JudgeBudget

GOOD = Judgement(
    index=0, rubric="polite", model="m", score=0.5, usage=JudgeUsage(calls=1, tokens=9)
)
NOTHING = JudgeBudget()


class JudgementsSuite(ABC):
    """The contract of `infra.ports.judges.JudgementRecord`."""

    @pytest.fixture
    @abstractmethod
    def record(self) -> JudgementRecord: ...

    async def test_a_judgement_is_found_by_its_key(self, record: JudgementRecord) -> None:
        assert await record.find_judgements("r1", ["k1"]) == {}
        assert await record.record("r1", {"k1": GOOD}) == {"k1": GOOD}
        assert await record.find_judgements("r1", ["k1", "k2"]) == {"k1": GOOD}
        assert await record.find_judgements("r2", ["k1"]) == {}
        assert await record.find_judgements("r1", []) == {}

    async def test_the_first_judgement_stays(self, record: JudgementRecord) -> None:
        await record.record("r1", {"k1": GOOD})
        other = GOOD.model_copy(update={"score": 0.9})
        assert await record.record("r1", {"k1": other}) == {"k1": GOOD}
        assert (await record.find_judgements("r1", ["k1"]))["k1"].score == 0.5

    async def test_judgements_of_a_group_are_recorded_together(
        self, record: JudgementRecord
    ) -> None:
        """Of two processes that grade one group, all scores are those of one."""

        def of(score: float) -> dict[str, Judgement]:
            return {
                f"k{n}": GOOD.model_copy(update={"index": n, "score": score}) for n in (3, 1, 2)
            }

        answers = await asyncio.gather(*(record.record("r1", of(n / 8)) for n in range(8)))
        kept = await record.find_judgements("r1", ["k1", "k2", "k3"])
        assert all(answer == kept for answer in answers)
        assert len({judgement.score for judgement in kept.values()}) == 1
        assert [kept[f"k{n}"].index for n in (1, 2, 3)] == [1, 2, 3]

    async def test_usage_adds_up_by_owner(self, record: JudgementRecord) -> None:
        assert await record.usage("r1") == JudgeUsage()
        for _ in range(2):
            assert await record.reserve("r1", NOTHING) is None
            await record.spend("r1", JudgeUsage(calls=1, tokens=10, usd=0.25))
        assert await record.usage("r1") == JudgeUsage(calls=2, tokens=20, usd=0.5)
        assert await record.usage("r2") == JudgeUsage()

    async def test_calls_never_exceed_the_budget(self, record: JudgementRecord) -> None:
        budget = JudgeBudget(max_calls=5)
        answers = await asyncio.gather(*(record.reserve("r1", budget) for _ in range(20)))
        assert sum(answer is None for answer in answers) == 5
        said = next(answer for answer in answers if answer is not None)
        assert said == "5 requests to judges, all that advanced.judge_max_calls allows"
        assert (await record.usage("r1")).calls == 5
        assert await record.reserve("r1", JudgeBudget(max_calls=6)) is None

    @pytest.mark.parametrize(
        ("budget", "says"),
        [
            (JudgeBudget(max_tokens=10), "10 tokens of judges"),
            (JudgeBudget(max_usd=0.25), "0.25 US dollars"),
        ],
    )
    async def test_tokens_and_dollars_end_the_calls(
        self, record: JudgementRecord, budget: JudgeBudget, says: str
    ) -> None:
        assert await record.reserve("r1", budget) is None
        await record.spend("r1", JudgeUsage(calls=1, tokens=10, usd=0.25))
        assert says in str(await record.reserve("r1", budget))
        assert await record.reserve("r2", budget) is None
