"""A template that asks for the date gets the recorded one, so prompt, answer, step and held-out
loss are the same on every day of this machine."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any

import pytest
from transformers.utils import chat_template_utils

from schemas.learner import Conversation, LearnerJob, StepBatch
from schemas.sampling import UNDATED, Message, SampleRequest
from tests.unit.trainer.support import TINY, Shelf, job, request
from trainer.engine import Engine
from trainer.model.chat_template import Chat

DATED = (
    "<|system|>{{ strftime_now('%d %b %Y') }}<|end|>"
    "{% for m in messages %}{{ '<|' + m.role + '|>' + m.content + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
TALK = tuple(
    Conversation(i, (("user", f"{i}+1?"), ("assistant", f"it is {i + 1}"))) for i in range(3)
)
DAY = "2025-05-17"
SFT = replace(job(algorithm="sft", deterministic=True), date=DAY)
ASKED = request("hello", date=DAY, deterministic=True)
Said = tuple[object, ...]


@pytest.fixture
def on(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Set the clock that Transformers' templates read to the first of January of a year."""

    def travel(year: int) -> None:
        now = SimpleNamespace(now=lambda: datetime(year, 1, 1, tzinfo=UTC))
        monkeypatch.setattr(chat_template_utils, "datetime", now)

    return travel


async def said(
    travel: Callable[[int], None], year: int, asked: SampleRequest = ASKED, sft: LearnerJob = SFT
) -> Said:
    """The samples, measurements and steps of an engine that starts in this year."""
    travel(year)
    engine = Engine(fetch=Shelf().fetch, threads=1)
    try:
        loaded = await engine.learner._cache.load_model(TINY)
        loaded.base.tokenizer.chat_template = DATED
        turn = await engine.sampler.sample(asked)
        await engine.learner.initialize(sft)
        loss = await engine.learner.evaluate(sft, 0, TALK)
        batch = StepBatch(1, conversations=TALK)
        step = await engine.learner.step(sft, batch, export_state=False)
        prompt = str(loaded.base.tokenizer.decode(list(turn.prompt_ids)))
        return prompt, turn, loss, step.state.weights_sha256, step.state.state_sha256
    finally:
        await engine.aclose()


async def test_another_day_changes_no_bit(on: Callable[[int], None]) -> None:
    first, second = await said(on, 2026), await said(on, 2031)
    assert "17 May 2025" in str(first[0])
    assert first == second


async def test_the_recorded_day_is_the_one_that_is_read(on: Callable[[int], None]) -> None:
    other: dict[str, Any] = {"date": "2027-03-04"}
    asked = ASKED.model_copy(update={"params": ASKED.params.model_copy(update=other)})
    first, second = await said(on, 2026), await said(on, 2026, asked, replace(SFT, **other))
    assert "04 Mar 2027" in str(second[0])
    assert all(a != b for a, b in zip(first, second, strict=True))


async def test_a_record_without_a_day_has_a_fixed_one(on: Callable[[int], None]) -> None:
    undated = request("hello", deterministic=True)
    first, second = [await said(on, y, undated, replace(SFT, date=None)) for y in (2026, 2031)]
    assert first == second
    assert "26 Jul 2024" in str(first[0])
    assert UNDATED == "2024-07-26"


async def test_twin_with_the_machines_clock_another_day_is_another_run(
    on: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    def careless(
        chat: Chat, messages: Sequence[Message], *, tools: object = (), reply_next: bool
    ) -> str:
        plain = [{"role": m.role, "content": m.content} for m in messages]
        return str(
            chat._tokenizer.apply_chat_template(
                plain, tokenize=False, add_generation_prompt=reply_next
            )
        )

    monkeypatch.setattr(Chat, "text", careless)
    first, second = await said(on, 2026), await said(on, 2031)
    assert all(a != b for a, b in zip(first, second, strict=True))
