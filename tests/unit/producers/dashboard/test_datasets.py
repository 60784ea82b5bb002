"""The pages of datasets: what is in a file, and why an upload was refused."""

import csv
import io
import json
from typing import Any

import httpx
import pytest

from producers.core.datasets import column_statistics
from producers.core.datasets.recent_statistics import RecentStatistics
from producers.dashboard.pages import datasets
from tests.kit.application import Application, rows
from tests.kit.hostile_strings import hostile_strings
from tests.kit.markup import structure

pytestmark = pytest.mark.postgres

HERE = "http://127.0.0.1"
LARGEST_PAGE = 150_000


def lines(*values: object) -> str:
    return "".join(json.dumps(one) + "\n" for one in values)


async def statistics_of(browser: httpx.AsyncClient, name: str) -> Any:
    answer = await browser.get(f"/datasets/{name}/statistics.json")
    assert answer.status_code == 200, answer.text
    return answer.json()


async def test_a_dataset_is_shown_with_its_columns(
    app: Application, browser: httpx.AsyncClient
) -> None:
    content = lines(
        *({"user_prompt": f"q{n % 4}", "label": n, "level": "a" * (n % 2)} for n in range(8))
    )
    assert (await app.upload("sums", content)).status_code == 200
    found = await statistics_of(browser, "sums")
    assert found["statistics"]["duplicates"] == 4
    prompt, label, level = found["statistics"]["columns"]
    assert prompt["lengths"] == {"least": 2, "mean": 2.0, "largest": 2}
    assert label["types"] == [{"value": "number", "rows": 8}]
    assert (level["share"], level["values"]) == (0.5, [{"value": "a", "rows": 4}])
    page = (await browser.get("/datasets/sums")).text
    assert "Counted over all 8 rows." in page
    assert '<th scope="row">level</th>' in page
    assert '<td class="figure">50%</td>' in page
    assert "rejected" not in page


async def test_the_answers_of_pairs_are_shown(app: Application, browser: httpx.AsyncClient) -> None:
    pair = {"chosen": "The <Rhine>.", "rejected": "It is water.", "margin": 0.5}
    await app.upload("pairs", lines(*({"prompt": f"q{n}", **pair} for n in range(4))))
    page = (await browser.get("/datasets/pairs")).text
    for shown in ("chosen</div><pre>The &lt;Rhine&gt;.<", "rejected</div><pre>It is water.<"):
        assert page.count(shown) == 4
    assert page.count("Margin: 0.5") == 4


async def test_a_page_says_how_many_rows_were_counted(
    app: Application, browser: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(column_statistics, "MOST_ROWS", 5)
    await app.upload("sums", rows(9))
    page = (await browser.get("/datasets/sums")).text
    assert "Counted over the first 5 rows, up to the limit of rows." in page


async def test_a_page_does_not_wait_for_a_slow_count(
    app: Application, browser: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    await app.upload("sums", rows(9))
    of = RecentStatistics.of
    with monkeypatch.context() as patch:
        patch.setattr(RecentStatistics, "of", lambda self, one: of(self, one, wait_s=0))
        page = await browser.get("/datasets/sums")
        assert "The rows are still being counted." in page.text
        assert (await statistics_of(browser, "sums"))["dataset"]["num_rows"] == 9
    assert (await statistics_of(browser, "sums"))["statistics"]["rows"] == 9


async def test_a_file_that_is_gone_is_said_on_the_page(
    app: Application, browser: httpx.AsyncClient
) -> None:
    await app.upload("sums", rows(9))
    for path in (app.services.settings.home / "blobs" / "datasets").iterdir():
        path.unlink()
    page = await browser.get("/datasets/sums")
    assert page.status_code == 200
    assert page.text.count("The file cannot be read now") == 2


async def test_refused_uploads_are_listed_with_their_issues(
    app: Application, browser: httpx.AsyncClient
) -> None:
    content = rows(4) + "not json\n" + lines(*[{"user_prompt": "<b>x</b>"}] * 30)
    assert (await app.upload("bad", content)).status_code == 400
    page = (await browser.get("/datasets/bad")).text
    assert "Why it was rejected" in page
    assert '<td class="figure">5</td><td>—</td><td>is not JSON: ' in page
    assert '<td class="figure">6</td><td>ground_truth</td><td>is missing, and the first' in page
    assert "&lt;b&gt;x" in page
    rejected = (await statistics_of(browser, "bad"))["rejected"]
    assert len(rejected["issues"]) == 20
    assert rejected["issues"][0] == {
        "key": "line 5",
        "line": 5,
        "column": None,
        "message": "is not JSON: Expecting value: line 1 column 1 (char 0)",
        "excerpt": "not json",
    }
    assert rejected["uploader"]
    listed = (await browser.get("/datasets.json")).json()
    assert listed["num_rejected"] == 1
    assert listed["rejected"][0] == rejected
    assert "Rejected uploads" in (await browser.get("/datasets")).text
    assert (await app.upload("bad", rows(4))).status_code == 200
    assert (await browser.get("/datasets.json")).json()["rejected"] == []
    assert (await statistics_of(browser, "bad"))["rejected"] is None


async def test_an_upload_that_is_refused_leaves_the_dataset_of_its_name(
    app: Application, browser: httpx.AsyncClient
) -> None:
    await app.upload("sums", rows(4))
    assert (await app.upload("sums", rows(5))).status_code == 409
    assert (await app.get("/datasets/sums"))["dataset"]["status"] == "uploaded"
    page = (await browser.get("/datasets/sums")).text
    assert "The last upload under this name was rejected" in page
    assert "exists with other content" in page
    assert "Counted over all 4 rows." in page


async def test_the_reason_of_a_refusal_is_bounded_and_may_have_any_characters(
    app: Application, browser: httpx.AsyncClient
) -> None:
    content = lines(*[{"user_prompt": "q", "label": "a"}] * 4, {"\0" * 100_000: "\0" * 100_000})
    refused = await app.upload("odd", content)
    assert refused.status_code == 400, refused.text
    rejected = (await statistics_of(browser, "odd"))["rejected"]
    assert len(rejected["error"]) <= 1000
    assert len(json.dumps(rejected["issues"])) < 20_000
    assert (await browser.get("/datasets/odd")).status_code == 200


async def test_hostile_files_are_text_on_small_pages(
    app: Application, browser: httpx.AsyncClient
) -> None:
    texts = [text[:2000] for text in hostile_strings(400, storable=True)]
    shown = [{"user_prompt": f"x{text}", "label": "a", "extra": text} for text in texts]
    answers = [{"user_prompt": "<" * 300_000, "label": "<" * 300_000, "x": "<"}] * 20
    named = [{"user_prompt": "q", "label": "a", **dict.fromkeys(texts[:200], "<" * 40)}] * 4
    talk = [{"role": "user", "content": "<" * 2000}, {"role": "assistant", "content": "&"}] * 200
    files = {
        "shown": lines(*shown),
        "answers": lines(*answers),
        "named": lines(*named),
        "talks": lines(*[{"messages": talk}] * 20),
        "refused": lines(*({text: text} for text in texts)),
    }
    table = io.StringIO()
    csv.writer(table).writerows([("user_prompt", "label"), *[("\0" * 9_999, "<script>")] * 90])
    assert (await app.upload("table", table.getvalue(), "table.csv")).status_code == 200
    for name, content in files.items():
        status = 400 if name == "refused" else 200
        assert (await app.upload(name, content)).status_code == status, name
    for name in ("table", *files):
        page = await browser.get(f"/datasets/{name}")
        assert page.status_code == 200
        structure(page.text)
        assert len(page.content) < LARGEST_PAGE, name
        assert "<script>alert" not in page.text
        await statistics_of(browser, name)
    assert "so it is not shown" in (await browser.get("/datasets/answers")).text


async def test_only_the_beginning_of_a_file_is_read_for_its_first_rows(
    app: Application, browser: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    await app.upload("sums", rows(9))
    assert "Say 8" in (await browser.get("/datasets/sums")).text
    monkeypatch.setattr(datasets, "PREVIEWED_BYTES", 150)
    page = (await browser.get("/datasets/sums")).text
    assert "Say 0" in page
    assert "Say 8" not in page
