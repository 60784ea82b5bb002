"""The reader of samples: one group at a time, with ways to walk, find and download."""

from collections.abc import AsyncIterator

import httpx
import pytest

from producers.dashboard.answers import has_text, share_of_text, trained_logprobs, whole_text
from schemas.sampling import Message, SampleRecord, Sequence, ToolCall
from tests.kit.application import TOKEN, Application
from tests.kit.showcase import FIRST, fill
from tests.unit.producers.dashboard.test_sign_in import sign_in

HERE = "http://127.0.0.1"
RECORD = SampleRecord(
    index=0,
    messages=(
        Message(role="user", content="How many?"),
        Message(
            role="assistant",
            content="",
            tool_calls=(ToolCall(id="1", name="add", arguments='{"a": 1}'),),
        ),
    ),
    sequences=(Sequence(tokens=(1, 2, 3), loss_mask=(0, 1, 1), logprobs=(0.0, -1.0, -3.0)),),
)


def test_the_trained_tokens_are_those_that_the_policy_chose() -> None:
    assert trained_logprobs(RECORD) == [-1.0, -3.0]


def test_a_text_is_found_in_messages_and_in_calls_of_tools() -> None:
    assert has_text(RECORD, "HOW many")
    assert has_text(RECORD, '"a": 1')
    assert not has_text(RECORD, "nothing")


def test_the_whole_text_has_everything_that_was_said() -> None:
    expected = '=== user ===\nHow many?\n\n=== assistant ===\nadd {"a": 1}'
    assert whole_text(RECORD) == expected


def test_many_texts_share_what_a_page_shows() -> None:
    long = RECORD.model_copy(update={"messages": RECORD.messages * 100})
    assert share_of_text([RECORD]) > share_of_text([long] * 8) == 100


@pytest.fixture
async def browser(app: Application) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(app.app, raise_app_exceptions=True)
    async with httpx.AsyncClient(
        transport=transport, base_url=HERE, headers={"Origin": HERE}
    ) as client:
        await sign_in(client, TOKEN)
        yield client


@pytest.mark.postgres
async def test_a_group_can_be_read_walked_and_downloaded(
    app: Application, browser: httpx.AsyncClient
) -> None:
    await fill(app, steps=3)
    here = f"/runs/{FIRST}/samples"
    page = (await browser.get(f"{here}?step=2")).text
    assert "Next group (n)" in page
    assert 'id="sample-0"' in page
    found = (await browser.get(f"{here}.json?step=2&order=length")).json()
    lengths = [one["completion_tokens"] for one in found["samples"]]
    assert lengths == sorted(lengths, reverse=True)
    sample = found["samples"][0]
    whole = await browser.get(f"{here}/{sample['id']}/text")
    assert whole.headers["content-type"].startswith("text/plain")
    assert whole.headers["content-disposition"].startswith("attachment")
    assert whole.headers["x-content-type-options"] == "nosniff"
    nothing = (await browser.get(f"{here}?step=2&find=no-such-text")).text
    assert "0 of" in nothing
    assert 'id="sample-' not in nothing


@pytest.mark.postgres
async def test_the_last_page_of_answers_may_be_empty(
    app: Application, browser: httpx.AsyncClient
) -> None:
    await fill(app, steps=3)
    page = await browser.get(f"/runs/{FIRST}/samples?step=2&first=1000")
    assert page.status_code == 200
