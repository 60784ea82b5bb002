"""The answers to a row of an evaluation, and the ways that lead to them."""

import httpx
import pytest

from tests.kit.showcase import EVALUATION, FIRST
from tests.kit.showcase_answers import QUESTIONS

pytestmark = pytest.mark.postgres

HERE_PAGE = f"/evals/{EVALUATION}/samples"


@pytest.fixture
def showcase_steps() -> int:
    return 2


async def test_each_row_of_an_evaluation_leads_to_its_answers(browser: httpx.AsyncClient) -> None:
    page = (await browser.get(f"/evals/{EVALUATION}")).text
    assert f'href="{HERE_PAGE}?slot=1">1</a>' in page
    answers = (await browser.get(f"{HERE_PAGE}?slot=1")).text
    assert QUESTIONS[1].split("?")[0] in answers
    assert "How it came about" not in answers, "an evaluation has no training to trace"
    assert "advantage" not in answers
    first = (await browser.get(HERE_PAGE)).text
    assert "Previous group" not in first
    assert "Next group" in first


async def test_a_row_is_found_by_its_number_or_refused(browser: httpx.AsyncClient) -> None:
    shown = (await browser.get(f"{HERE_PAGE}.json?row=1")).json()
    assert shown["group"].startswith(f"{EVALUATION}-evaluate-0-1-")
    assert len(shown["samples"]) == shown["num_samples"] > 0
    assert (await browser.get(f"{HERE_PAGE}?row=77")).status_code == 404
    assert (await browser.get(f"{HERE_PAGE}?row=x")).status_code == 400
    assert (await browser.get(f"{HERE_PAGE}?colour=advantage")).status_code == 400
    assert (await browser.get("/evals/none/samples")).status_code == 404


async def test_an_answer_is_a_download_only_of_its_own_evaluation(
    browser: httpx.AsyncClient,
) -> None:
    shown = (await browser.get(f"{HERE_PAGE}.json?row=0")).json()
    sample = shown["samples"][0]["id"]
    text = await browser.get(f"{HERE_PAGE}/{sample}/text")
    assert text.headers["content-type"].startswith("text/plain")
    assert "=== assistant ===" in text.text
    other = (await browser.get(f"/runs/{FIRST}/samples.json?step=1")).json()["samples"][0]["id"]
    assert (await browser.get(f"{HERE_PAGE}/{other}/text")).status_code == 404


async def test_rows_that_changed_lead_to_both_answers(browser: httpx.AsyncClient) -> None:
    compared = f"/compare/evaluations.csv?a={EVALUATION}&b={EVALUATION}"
    header = (await browser.get(compared)).text.splitlines()[0]
    assert header == "row,change,reward_a,reward_b,difference,passed_a,passed_b"
