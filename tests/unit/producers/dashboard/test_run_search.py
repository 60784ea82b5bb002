"""The search box of the list of runs."""

import httpx
import pytest

from producers.dashboard.run_search import parse_search


@pytest.mark.parametrize(
    ("text", "words", "values"),
    [
        ("", "", {}),
        ("gsm8k grpo", "gsm8k grpo", {}),
        ("status:failed gsm8k", "gsm8k", {"status": "failed"}),
        (
            "STATUS:failed model:Qwen/Qwen3-0.6B",
            "",
            {"status": "failed", "model": "Qwen/Qwen3-0.6B"},
        ),
        ('dataset:"my data" "two words"', "two words", {"dataset": "my data"}),
        ("status:failed status:running", "", {"status": "running"}),
        ("scratch:tiny-v1", "scratch:tiny-v1", {}),
        ("status: model:", "status: model:", {}),
        ("model:hub:x archived:true", "", {"model": "hub:x", "archived": "true"}),
        ('model:"open', "", {"model": '"open'}),
        ("a" * 500, "a" * 500, {}),
    ],
)
def test_a_search_has_words_and_keys(text: str, words: str, values: dict[str, str]) -> None:
    assert parse_search(text) == (words, values)


@pytest.fixture
def showcase_steps() -> int:
    return 3


@pytest.mark.postgres
async def test_the_search_and_the_old_parameters_select_runs(browser: httpx.AsyncClient) -> None:
    async def names(**query: str) -> set[str]:
        answer = await browser.get("/runs.json", params=query)
        assert answer.status_code == 200, answer.text
        return {run["name"] for run in answer.json()["runs"]}

    assert await names(search="status:failed") == await names(status="failed") == {"tools-broken"}
    assert await names(search="status:failed gsm8k-grpo") == set()
    assert await names(search="status:paused tools") == {"tools-long"}
    assert await names(search="status:finished", status="failed") == {"tools-broken"}
    assert await names(search='model:"Qwen/Qwen3-0.6B" broken') == {"tools-broken"}
    assert await names(search="creator:nobody") == set()
    for wrong in ("status:odd", "archived:maybe"):
        answer = await browser.get("/", params={"search": wrong})
        assert answer.status_code == 400


@pytest.mark.postgres
async def test_the_list_says_why_runs_failed_and_how_long_they_took(
    browser: httpx.AsyncClient,
) -> None:
    page = (await browser.get("/", params={"search": "status:failed"})).text
    assert "the grader raised ZeroDivisionError in 8 of 8 samples" in page
    assert '<th scope="col">Duration</th>' in page
    assert "<details><summary>Filters" in page, "they are folded"
    fine = (await browser.get("/", params={"status": "finished"})).text
    assert '<th scope="col">Reason</th>' not in fine
    assert "<details open><summary>Filters" in fine, "one of them is set"
