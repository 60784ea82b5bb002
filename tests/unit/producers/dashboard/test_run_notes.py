"""Tags and notes on runs."""

import asyncio

import httpx
import pytest

from infra.spine.ports.event_log import Cursor
from producers.core.history.notes import LONGEST_NOTE, MOST_TAGS, check_note, check_tags
from schemas.errors import InvalidConfig
from schemas.events import RunDeleted
from tests.kit.application import Application
from tests.kit.showcase import FIRST, SECOND
from tests.kit.signed_in import form_key_in
from tests.kit.tenants import create_api_key, tenant


def test_tags_are_short_words_each_once() -> None:
    assert check_tags(["b", "a", "b", "lr:3e-6", "größer"]) == ("a", "b", "größer", "lr:3e-6")
    for wrong in ("", "two words", "a,b", 'a"b', "a\n", "a\0", "\u202eb", "x" * 41):
        with pytest.raises(InvalidConfig, match="is not a tag"):
            check_tags([wrong])
    with pytest.raises(InvalidConfig, match="too many"):
        check_tags([str(n) for n in range(MOST_TAGS + 1)])


def test_a_note_is_a_text_of_bounded_length() -> None:
    assert check_note("  a\r\nb ") == "a\nb"
    with pytest.raises(InvalidConfig, match="at most"):
        check_note("x" * (LONGEST_NOTE + 1))
    with pytest.raises(InvalidConfig, match="NUL"):
        check_note("a\0b")
    with pytest.raises(InvalidConfig, match="half a character"):
        check_note("a\ud800b")


@pytest.fixture
def showcase_steps() -> int:
    return 2


@pytest.mark.postgres
async def test_tags_and_notes_are_set_through_the_api_and_select_runs(
    app: Application, browser: httpx.AsyncClient
) -> None:
    here = f"/api/v1/runs/{SECOND}"
    changed = await app.api.post(f"{here}/tags", json={"add": ["b", "a"]})
    assert changed.json()["run"]["tags"] == ["a", "b"]
    changed = await app.api.post(f"{here}/tags", json={"add": ["c"], "remove": ["a", "x"]})
    assert changed.json()["run"]["tags"] == ["b", "c"]
    noted = await app.api.put(f"{here}/note", json={"note": "too fast"})
    assert (noted.json()["run"]["note"], noted.json()["run"]["tags"]) == ("too fast", ["b", "c"])
    for query in ({"search": "tag:c"}, {"tag": "c"}):
        listed = (await browser.get("/runs.json", params=query)).json()["runs"]
        assert [run["id"] for run in listed] == [SECOND]
    assert (await browser.get("/runs.json?tag=C")).json()["runs"] == []
    assert (await app.api.get("/api/v1/runs?tag=c")).json()["total_count"] == 1
    assert "b c" in (await browser.get("/runs.csv?tag=c")).text
    assert (await app.api.put(f"{here}/note", json={"note": ""})).json()["run"]["note"] is None
    for body in ({"add": ["a b"]}, {"add": "a"}, {"add": [1]}):
        assert (await app.api.post(f"{here}/tags", json=body)).status_code == 400
    assert (await app.api.put(f"{here}/note", json={})).status_code == 400
    assert (await app.api.post("/api/v1/runs/none/tags", json={})).status_code == 404


@pytest.mark.postgres
async def test_changes_at_the_same_moment_are_all_kept(
    app: Application, browser: httpx.AsyncClient
) -> None:
    path = f"/api/v1/runs/{SECOND}/tags"
    await asyncio.gather(*(app.api.post(path, json={"add": [f"t{n}"]}) for n in range(8)))
    run = (await app.api.get(f"/api/v1/runs/{SECOND}")).json()["run"]
    assert run["tags"] == [f"t{n}" for n in range(8)]


@pytest.mark.postgres
async def test_the_page_of_a_run_shows_and_changes_them(
    app: Application, browser: httpx.AsyncClient
) -> None:
    page = (await browser.get(f"/runs/{SECOND}")).text
    hostile = "<script>x</script>"
    fields = {"form_key": form_key_in(page), "tags": f"a,b  {hostile}", "note": hostile}
    answer = await browser.post(f"/runs/{SECOND}/notes", data=fields)
    assert (answer.status_code, answer.headers["location"]) == (303, f"/runs/{SECOND}")
    for path in (f"/runs/{SECOND}", "/"):
        text = (await browser.get(path)).text
        assert "&lt;script&gt;x&lt;/script&gt;" in text
        assert hostile not in text
        assert 'href="/?tag=a"' in text
    refused = await browser.post(f"/runs/{SECOND}/notes", data={"tags": "c", "note": ""})
    assert refused.status_code == 403, "a form of another page changes nothing"
    reader = await create_api_key(app, "reader", "read")
    await browser.post("/login", data={"api_key": reader})
    seen = (await browser.get(f"/runs/{SECOND}")).text
    assert 'href="/?tag=a"' in seen
    assert "Tags and note" not in seen, "who may not change them gets no form"


@pytest.mark.postgres
async def test_they_outlive_a_rebuild_and_are_deleted_with_their_run(
    app: Application, browser: httpx.AsyncClient
) -> None:
    notes = app.services.readmodel.run_notes
    await app.services.readmodel.reset()
    assert await notes.get_notes(FIRST) is not None
    await app.append([RunDeleted(run=FIRST)])
    await app.services.readmodel.caught_up(await app.services.log.visible_head())
    assert await notes.get_notes(FIRST) is None
    assert await app.services.readmodel.cursor() > Cursor()


@pytest.mark.postgres
async def test_the_tags_of_another_workspace_cannot_be_changed(
    app: Application, browser: httpx.AsyncClient
) -> None:
    ours = await tenant(app, "ours", "/repo")
    headers = {"Authorization": f"Bearer {ours.api_key}"}
    path = f"/api/v1/runs/{FIRST}/tags"
    answer = await app.api.post(path, json={"add": ["mine"]}, headers=headers)
    assert answer.status_code == 404
    kept = await app.services.readmodel.run_notes.get_notes(FIRST)
    assert kept is not None
    assert "mine" not in kept.note.tags
