"""The scores of a reward model: those of training, of PEFT, and the same bits in any company."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForSequenceClassification

from schemas.errors import FailureCategory, Refused, UserCodeError
from schemas.models.reward_model import RewardModelSpec
from schemas.sampling import Message
from tests.unit.trainer.preferences.test_reward_model import score_of, trained
from tests.unit.trainer.preferences.test_step import PAIRS
from tests.unit.trainer.support import TINY, Shelf, job, request, weights_of
from tests.unit.trainer.test_policy import write
from trainer.engine import Engine

Talk = tuple[Message, ...]


def talk(*turns: tuple[str, str]) -> Talk:
    return tuple(Message.model_validate({"role": role, "content": text}) for role, text in turns)


def answers() -> list[Talk]:
    """Both answers of each pair, the better one first."""
    found = []
    for row in PAIRS:
        for text in (row.chosen, row.rejected):
            prompt: Any = row.prompt
            found.append(talk(*prompt, ("assistant", text or "")))
    return found


def spec_of(files: dict[str, bytes], shelf: Shelf) -> RewardModelSpec:
    return RewardModelSpec(
        name="judge",
        checkpoint="r1@3",
        base=TINY,
        weights=shelf.put(files["adapter_model.safetensors"]),
        lora_alpha=8.0,
    )


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # peft's own
async def test_a_score_is_that_of_plain_transformers(
    engine: Engine, shelf: Shelf, tmp_path: Path
) -> None:
    from peft import PeftModel

    _, files = await trained(engine)
    spec = spec_of(files, shelf)
    scores = [await engine.scorer.score(spec, one) for one in answers()]
    folder = write(files, tmp_path)
    base = AutoModelForSequenceClassification.from_pretrained(folder / "base", num_labels=1)
    plain: Any = PeftModel.from_pretrained(base, folder).eval()
    theirs = [
        score_of(plain, row.prompt, text) for row in PAIRS for text in (row.chosen, row.rejected)
    ]
    assert scores == pytest.approx(theirs, abs=1e-5)


async def test_a_score_is_that_of_training(engine: Engine, shelf: Shelf) -> None:
    _, files = await trained(engine)
    spec = spec_of(files, shelf)
    scores = [await engine.scorer.score(spec, one) for one in answers()]
    found = await engine.learner.evaluate(job(algorithm="reward_model"), 3, PAIRS)
    margins = [a - b for a, b in zip(scores[0::2], scores[1::2], strict=True)]
    assert found["eval/validation/margin"] == pytest.approx(sum(margins) / 3, abs=1e-5)


async def test_a_score_has_the_same_bits_in_any_company_and_process(
    engine: Engine, shelf: Shelf
) -> None:
    _, files = await trained(engine)
    spec = spec_of(files, shelf)
    alone = [await engine.scorer.score(spec, one) for one in answers()]
    together = await asyncio.gather(
        *(engine.scorer.score(spec, one) for one in reversed(answers())),
        *(engine.sampler.sample(request(sample=n)) for n in range(3)),
    )
    assert list(together[: len(alone)]) == alone[::-1]
    fresh = Engine(fetch=shelf.fetch, threads=1)
    try:
        assert [await fresh.scorer.score(spec, one) for one in answers()] == alone
    finally:
        await fresh.aclose()


async def test_a_scorer_reads_nothing_after_the_last_answer(engine: Engine, shelf: Shelf) -> None:
    _, files = await trained(engine)
    spec, one = spec_of(files, shelf), answers()[0]
    score = await engine.scorer.score(spec, one)
    assert await engine.scorer.score(spec, (*one, *talk(("user", "more?")))) == score


@pytest.mark.parametrize(
    ("messages", "says"),
    [
        (talk(("user", "1?")), "the sample has no answer of the assistant"),
        (talk(("user", "1?"), ("assistant", "a" * 5000)), "longer than the 1024 tokens"),
    ],
    ids=["no answer", "too long"],
)
async def test_a_conversation_that_it_cannot_read_gets_no_score(
    engine: Engine, shelf: Shelf, messages: Talk, says: str
) -> None:
    _, files = await trained(engine)
    with pytest.raises(UserCodeError, match=says) as raised:
        await engine.scorer.score(spec_of(files, shelf), messages)
    assert raised.value.category == FailureCategory.GRADER


async def test_a_policy_is_refused_as_a_reward_model(engine: Engine, shelf: Shelf) -> None:
    policy = await engine.learner.initialize(job(algorithm="sft"))
    files = {"adapter_model.safetensors": weights_of(policy.state)}
    with pytest.raises(Refused, match="r1@3 has no head that scores"):
        await engine.scorer.score(spec_of(files, shelf), answers()[0])
