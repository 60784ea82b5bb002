"""A stream has the bits of a whole answer, its pieces are the beginning of it, and it costs nothing when
nobody listens."""

import asyncio
from typing import Any

import pytest
import torch

from schemas.sampling import SampleRequest, StreamingSampler, ToolSpec, Turn
from tests.unit.trainer.support import request
from trainer.engine import Engine
from trainer.sampler.batcher import Batcher
from trainer.sampler.completion import Completion
from trainer.sampler.partial_text import PIECES, PartialText

TOOLS = (ToolSpec(name="add"),)


async def told(engine: Engine, asked: SampleRequest) -> tuple[Turn, list[str]]:
    assert isinstance(engine.sampler, StreamingSampler)
    pieces: list[str] = []
    return await engine.sampler.stream(asked, pieces.append), pieces


@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize("params", [{}, {"stop": ("e", "xq")}, {"temperature": 0.5}])
async def test_a_stream_has_the_bits_of_a_whole_answer(
    engine: Engine, *, deterministic: bool, params: dict[str, Any]
) -> None:
    """`deterministic` decodes through torch, the others in C."""
    for sample in range(3):
        asked = request(sample=sample, deterministic=deterministic, max_new_tokens=40, **params)
        asked = asked.model_copy(update={"tools": TOOLS if sample else ()})
        whole = await engine.sampler.sample(asked)
        turn, pieces = await told(engine, asked)
        assert turn == whole
        assert turn.message.content.startswith("".join(pieces))
        if turn.finish_reason == "length" and not turn.message.tool_calls:
            assert len(pieces) > (20 if deterministic else 2)


async def test_pieces_come_while_the_answer_is_sampled(engine: Engine) -> None:
    """A long answer that runs beside does not hold them up."""
    long = asyncio.ensure_future(engine.sampler.sample(request(sample=1, max_new_tokens=400)))
    # On a GPU only deterministic samples have the same bits in company and alone.
    asked = request(max_new_tokens=60, deterministic=torch.cuda.is_available())
    first = asyncio.Event()
    streamed = asyncio.ensure_future(engine.sampler.stream(asked, lambda _: first.set()))
    async with asyncio.timeout(60):
        await first.wait()
    assert not streamed.done()
    assert await streamed == await engine.sampler.sample(asked)
    await long


async def test_a_listener_that_leaves_ends_its_row(engine: Engine) -> None:
    first = asyncio.Event()
    task = asyncio.ensure_future(
        engine.sampler.stream(request(max_new_tokens=400), lambda _: first.set())
    )
    async with asyncio.timeout(60):
        await first.wait()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        while engine.sampler._batcher.is_busy:  # type: ignore[union-attr]  # the torch engine
            await asyncio.sleep(0.005)
    assert not engine.sampler._listening  # type: ignore[union-attr]  # the torch engine


async def test_without_a_listener_no_text_is_made(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twin: with one there is a turn of the device thread for each step."""
    turns, advance = [0], Batcher.advance

    def counted(self: Batcher, *given: Any) -> list[Completion]:
        turns[0] += 1
        return advance(self, *given)

    monkeypatch.setattr(Batcher, "advance", counted)
    made: list[int] = []
    settled = Completion.stable_prefix

    def noted(row: Completion) -> str:
        made.append(len(row.completion_ids))
        return settled(row)

    monkeypatch.setattr(Completion, "stable_prefix", noted)
    asked = request(deterministic=True, max_new_tokens=48)
    await engine.sampler.sample(asked)
    assert (turns[0], made) == (3, [])
    await told(engine, asked)
    assert turns[0] > 40
    assert made


class Row:
    """A row whose text is as long as its tokens."""

    def __init__(self) -> None:
        self.completion_ids: list[int] = []
        self.is_over = False
        self.num_made = 0

    def stable_prefix(self) -> str:
        self.num_made += 1
        if self.num_made == self.fails_at:
            raise ValueError("a renderer failed")
        return "x" * len(self.completion_ids)

    fails_at = -1


def test_a_long_answer_is_told_in_larger_pieces() -> None:
    row, pieces = Row(), list[str]()
    text = PartialText(pieces.append)
    for _ in range(8192):
        row.completion_ids.append(1)
        text.update(row)  # type: ignore[arg-type]  # a row for this test
    assert pieces[:PIECES] == ["x"] * PIECES
    assert row.num_made < 8 * PIECES
    assert max(map(len, pieces)) <= 8192 // PIECES


def test_a_renderer_that_fails_leaves_the_rest_to_the_end() -> None:
    row, pieces = Row(), list[str]()
    row.fails_at = 3
    text = PartialText(pieces.append)
    for _ in range(9):
        row.completion_ids.append(1)
        text.update(row)  # type: ignore[arg-type]  # a row for this test
    assert pieces == ["x", "x"]
    assert row.num_made == 3
