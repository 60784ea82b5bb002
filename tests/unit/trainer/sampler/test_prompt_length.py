"""A prompt that cannot fit is refused before it is tokenised, and a long one holds up nobody."""

import asyncio
import threading
from typing import Any

import pytest

from schemas.errors import FailureCategory, UserCodeError
from tests.unit.trainer.model.family_tokenizers import SPECIAL, family_chat
from tests.unit.trainer.support import request
from trainer.engine import Engine
from trainer.model.chat_template import Chat, num_characters
from trainer.model.family_renderer import LONG_CHARS
from trainer.sampler import prompt_length
from trainer.sampler.prompt_length import prepare_apart, refuse_too_long

HUGE = "a " * 3_250_000


def refuse_to_tokenise(*_: Any, **__: Any) -> Any:
    raise AssertionError("the prompt was tokenised")


@pytest.mark.parametrize("prompt", [None, HUGE])
async def test_a_prompt_that_cannot_fit_is_refused_by_its_characters(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, prompt: str | None
) -> None:
    monkeypatch.setattr(Chat, "prompt_ids", refuse_to_tokenise)
    asked = request(HUGE).model_copy(update={"prompt": prompt})
    with pytest.raises(UserCodeError, match=r"6500\d\d\d characters, so at least") as refused:
        await engine.sampler.sample(asked)
    assert refused.value.category is FailureCategory.PROMPT_TOO_LONG
    assert "training." not in str(refused.value), "the key of an evaluation is in another section"
    with pytest.raises(UserCodeError, match="characters, so at least"):
        await engine.sampler.count_prompt_tokens(asked)
    with pytest.raises(AssertionError):  # the twin: this one may fit
        await engine.sampler.sample(request("hello"))


@pytest.mark.parametrize(
    ("ids", "says"), [([], "writes nothing"), ([5, 10**6], "writes the token 1000000")]
)
async def test_a_prompt_that_the_model_cannot_read_is_refused(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, ids: list[int], says: str
) -> None:
    """A tokenizer or template of another model would fail the rows that are read together."""
    monkeypatch.setattr(Chat, "prompt_ids", lambda *_: ids)
    with pytest.raises(UserCodeError, match=says):
        await engine.sampler.sample(request("hello"))


@pytest.mark.parametrize("name", SPECIAL)
@pytest.mark.parametrize("text", ["<|im_start|>" * 9, " " * 90, "é" * 30, "e\u0301" * 30, "abc"])
def test_a_prompt_that_fits_is_never_refused_by_its_characters(name: str, text: str) -> None:
    chat, asked = family_chat(name), request(text)
    num_tokens = len(chat.prompt_ids(asked))
    assert chat.least_tokens(num_characters(asked)) <= num_tokens
    refuse_too_long(asked, chat, context=num_tokens + 1)


async def test_a_long_prompt_is_tokenised_beside_the_loop() -> None:
    """Twin: a short one is not."""
    inside = threading.Event()
    long = request("a" * LONG_CHARS)
    work = asyncio.ensure_future(prepare_apart(long, lambda: inside.wait(30)))
    assert await prepare_apart(request("a"), threading.current_thread) is threading.main_thread()
    assert not work.done()
    inside.set()
    assert await work
    assert await prepare_apart(long, threading.current_thread) is not threading.main_thread()
    assert prompt_length.APART._max_workers == 1
