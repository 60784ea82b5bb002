"""The search over the texts of all training samples of a run."""

import html
import re
from dataclasses import replace
from typing import cast

import httpx
import pytest

from infra.readmodel.runs import GroupRow
from infra.spine.ports.artifacts import Artifacts
from producers.core.history import sample_search
from producers.core.history.sample_search import (
    MOST_HITS,
    NEWEST,
    SearchPage,
    SearchPlace,
    find_text,
    search_samples,
)
from schemas.artifact_refs import ArtifactRef
from schemas.errors import FailureCategory
from schemas.sampling import Grade, Message, SampleBatch, SampleFailure, SampleOutput, SampleRecord
from tests.kit.application import Application
from tests.kit.showcase import FIRST, fill
from tests.kit.tenants import tenant

RECORD = SampleRecord(
    index=0,
    messages=(
        Message(role="system", content="Be brief. " * 40),
        Message(role="user", content=f"{'a' * 300}Straße{'b' * 300}"),
    ),
)


class Samples:
    """A run of one sample a group, as the read model and the store of artifacts have it."""

    def __init__(self, texts: list[str], *, size: int = 1, printed: str = "") -> None:
        self.texts, self.size, self.num_read = texts, size, 0
        self.left = SampleOutput(stdout=printed) if printed else None

    async def groups_before(
        self, owner: str, purpose: str, place: tuple[int, int, int], *, limit: int
    ) -> list[GroupRow]:
        row = GroupRow("", 0, 0, 0, 0, "", "[]", 0)
        rows = [
            replace(row, group=f"{owner}-{purpose}-{n}-0-0", step=n, artifact=self._ref(n))
            for n in range(len(self.texts))
        ]
        return [one for one in reversed(rows) if (one.step, 0, 0) <= place][:limit]

    def _ref(self, number: int) -> str:
        return ArtifactRef(uri=str(number), sha256="0" * 64, size=self.size).model_dump_json()

    async def get_artifact(self, ref: ArtifactRef, *, cached: bool = True) -> bytes:
        self.num_read += 1
        record = SampleRecord(index=0, text=self.texts[int(ref.uri)])
        batch = SampleBatch(group="g", samples=(record,), grader_output=self.left)
        return batch.model_dump_json().encode()


async def searched(
    samples: Samples, words: str, place: SearchPlace, *, limit: int = MOST_HITS
) -> SearchPage:
    store = cast("Artifacts", samples)
    return await search_samples(samples, store, "r", words, place, limit=limit)


async def steps_of(samples: Samples, words: str, *, limit: int = MOST_HITS) -> list[list[int]]:
    """The steps of the hits of each page of a search."""
    place: SearchPlace | None = NEWEST
    found = []
    while place:
        page = await searched(samples, words, place, limit=limit)
        found.append([hit.step for hit in page.hits])
        place = page.following
    return found


def test_a_found_text_says_where_it_is_and_what_is_around_it() -> None:
    found = find_text(RECORD, "BRIEF")
    assert found is not None
    assert (found.where, found.words) == ("system", "brief")
    found = find_text(RECORD, "strasse")
    assert found is not None, "letters that only fold to the words are found, too"
    found = find_text(RECORD, "straße")
    assert found is not None
    assert (found.before, found.words, found.after) == ("a" * 80, "Straße", "b" * 80)
    assert find_text(RECORD, "nothing") is None


def test_output_of_a_grader_is_found() -> None:
    failure = SampleFailure(category=FailureCategory.GRADER, message="main.py:3: bad label")
    grade = Grade(index=0, reward=None, failure=failure)
    left = SampleOutput(stdout="scored 4 of 5", traceback="Traceback: no key 'x'")
    texts = {
        "bad label": "failure",
        "4 of 5": "printed by the grader",
        "no key": "traceback by the grader",
    }
    for words, where in texts.items():
        found = find_text(RECORD, words, grade=grade, grader_output=left)
        assert found is not None
        assert found.where == where
        assert find_text(RECORD, words) is None


async def test_a_search_reads_what_the_grader_of_a_group_printed() -> None:
    assert await steps_of(Samples(["a", "b"], printed="scored 4 of 5"), "4 of 5") == [[1, 0]]


def test_a_place_is_read_as_it_was_written() -> None:
    place = SearchPlace(4, 3, 2, 1)
    assert SearchPlace.parse(str(place)) == place
    for wrong in ("", "1.2.3", "a.b.c.d", "-1.0.0.0", "1.2.3.4.5", "9" * 10 + ".0.0.0"):
        with pytest.raises(ValueError, match="not a place"):
            SearchPlace.parse(wrong)


@pytest.mark.parametrize(("groups", "limit"), [(3, MOST_HITS), (sample_search.MOST_GROUPS, 3)])
async def test_each_search_reads_a_bounded_part_and_the_next_goes_on(
    groups: int, limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sample_search, "MOST_GROUPS", groups)
    samples = Samples(["yes"] * 7)
    assert await steps_of(samples, "yes", limit=limit) == [[6, 5, 4], [3, 2, 1], [0]]


async def test_a_search_reads_a_bounded_number_of_bytes_but_one_group_at_least() -> None:
    large = Samples(["yes", "no", "yes"], size=sample_search.MOST_BYTES)
    assert await steps_of(large, "yes") == [[2], [], [0]]
    assert large.num_read == 3
    small = Samples(["yes", "no", "yes"], size=sample_search.MOST_BYTES // 3)
    assert await steps_of(small, "yes") == [[2, 0]]


async def test_the_hits_of_one_group_go_on_behind_the_last_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    samples = Samples(["x"])
    records = tuple(SampleRecord(index=index, text="yes") for index in range(5))

    async def get(ref: ArtifactRef, *, cached: bool = True) -> bytes:
        return SampleBatch(group="g", samples=records).model_dump_json().encode()

    monkeypatch.setattr(samples, "get_artifact", get)
    place: SearchPlace | None = NEWEST
    found, counts = [], []
    while place:
        page = await searched(samples, "yes", place, limit=2)
        found.append([hit.index for hit in page.hits])
        counts.append(page.num_samples)
        place = page.following
    assert (found, counts) == ([[0, 1], [2, 3], [4]], [2, 2, 1])


@pytest.mark.postgres
async def test_the_samples_of_all_steps_are_searched_without_a_script(
    app: Application, browser: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    await fill(app, steps=3)
    form = (await browser.get(f"/runs/{FIRST}/search")).text
    assert "at most 200 groups" in form
    address = f"/runs/{FIRST}/search?text=AS BRIEFLY"
    page = (await browser.get(address)).text
    assert "<mark>as briefly</mark>" in page
    assert "· system</span>" in page
    assert "These are the earliest ones." in page
    link = re.search(r'<a href="([^"]*/samples\?step=[^"#]*)#sample-', page)
    assert link is not None
    reader = await browser.get(html.unescape(link[1]))
    assert "Answer as briefly as you can." in reader.text
    monkeypatch.setattr(sample_search, "MOST_GROUPS", 1)
    first = (await browser.get(address)).text
    assert "Earlier samples are not searched yet." in first
    more = re.search(r'<a rel="next" href="([^"]*)"', first)
    assert more is not None
    assert (await browser.get(html.unescape(more[1]))).status_code == 200
    nothing = (await browser.get(f"/runs/{FIRST}/search?text=no-such-text")).text
    assert "No of" in nothing
    assert (await browser.get(f"/runs/{FIRST}/search?text=a&place=x")).status_code == 400
    assert (await browser.get(f"/runs/{FIRST}/search?text={'a' * 201}")).status_code == 400


@pytest.mark.postgres
async def test_the_api_searches_the_same_samples(app: Application) -> None:
    await fill(app, steps=2)
    here = f"/api/v1/runs/{FIRST}/search"
    answer = (await app.api.get(here, params={"text": "137"})).json()
    assert answer["samples"][0]["found"]["words"] == "137"
    assert answer["samples"][0]["sample"].startswith(f"{FIRST}-train-2-")
    assert answer["searched"]["newest_step"] == 2
    assert answer["next_place"] is None
    limited = (await app.api.get(here, params={"text": "1", "limit": 1})).json()
    assert len(limited["samples"]) == 1
    assert limited["next_place"]
    for wrong, key in (("", "text"), ("?text=1&limit=21", "limit")):
        refused = await app.api.get(here + wrong)
        assert (refused.status_code, refused.json()["issues"][0]["key"]) == (400, key)


@pytest.mark.postgres
async def test_the_samples_of_another_workspace_are_not_searched(app: Application) -> None:
    ours = await tenant(app, "ours", "/repo")
    await fill(app, steps=2)
    headers = {"Authorization": f"Bearer {ours.api_key}"}
    here = f"/api/v1/runs/{FIRST}/search?text=a"
    assert (await app.api.get(here, headers=headers)).status_code == 404
    own = f"/api/v1/runs/{ours.run}/search?text=a"
    assert (await app.api.get(own, headers=headers)).status_code == 200
