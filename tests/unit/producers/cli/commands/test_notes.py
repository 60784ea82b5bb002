"""`headrace train tag`, `note` and `share`, and what lists show of them."""

from tests.unit.producers.cli.conftest import FakeServer, Run

RED = "\x1b[31m"


def test_tags_are_added_removed_and_shown(server: FakeServer, headrace: Run) -> None:
    server.answer("POST", "/runs/r/tags", {"run": {"tags": ["a", f"b{RED}"]}})
    shown = headrace("train", "tag", "r", "a", f"b{RED}", "--remove", "c").out
    assert shown == "r: a b[31m\n"
    assert server.requests[0].document == {"add": ["a", f"b{RED}"], "remove": ["c"]}
    server.answer("GET", "/runs/r", {"run": {"tags": []}})
    assert headrace("train", "tag", "r").out == "r: no tags\n"
    assert headrace("train", "tag", "r", "--json").document["run"] == {"tags": []}


def test_a_note_is_written_shown_and_removed(server: FakeServer, headrace: Run) -> None:
    for note in ("too fast", None):
        server.answer("PUT", "/runs/r/note", {"run": {"note": note}})
    assert headrace("train", "note", "r", "too fast").out == "too fast\n"
    assert server.requests[0].document == {"note": "too fast"}
    assert headrace("train", "note", "r", "--clear").out == "r has no note\n"
    assert server.requests[1].document == {"note": ""}
    server.answer("GET", "/runs/r", {"run": {"note": f"hi{RED}"}})
    assert headrace("train", "note", "r").out == "hi[31m\n"
    assert headrace("train", "note", "r", "text", "--clear").code == 2


def test_a_list_selects_by_tag_and_shows_tags(server: FakeServer, headrace: Run) -> None:
    server.answer("GET", "/runs", {"runs": [{"name": "r", "tags": ["a", "b"]}], "total_count": 1})
    assert "a b" in headrace("train", "list", "--tag", "a").out
    assert "tag=a" in server.requests[0].query


def test_links_are_made_listed_and_revoked(server: FakeServer, headrace: Run) -> None:
    made = {"id": "s1", "url": "http://h/shared?key=k", "expires_at": "2030-01-01T00:00:00Z"}
    server.answer("POST", "/runs/r/shares", made)
    assert headrace("train", "share", "r", "--days", "3").out.startswith("http://h/shared?key=k\n")
    assert server.requests[0].document == {"days": 3}
    listed = [{**made, "created_by": "ada/t1", "created_at": "2029-12-25T00:00:00Z"}]
    server.answer("GET", "/runs/r/shares", {"shares": listed})
    assert "ada/t1" in headrace("train", "share", "r", "--list").out
    server.answer("DELETE", "/runs/r/shares/s1", {"revoked": "s1"})
    assert headrace("train", "share", "r", "--revoke", "s1").out == "revoked s1\n"
    for wrong in (("--days", "91"), ("--list", "--revoke", "s1"), ("--days", "3", "--list")):
        assert headrace("train", "share", "r", *wrong).code == 2


def test_a_search_goes_on_at_a_place_and_looks_in_all_steps(
    server: FakeServer, headrace: Run
) -> None:
    searched = {"samples": 4, "groups": 1, "newest_step": 3, "oldest_step": 3}
    answer: dict[str, object] = {"samples": [], "searched": searched, "next_place": None}
    server.answer("GET", "/runs/r/search", answer)
    headrace("train", "samples", "r", "--search", "a b", "--place", "3.0.0.0", "--limit", "5")
    assert server.requests[0].query.endswith("place=3.0.0.0&limit=5")
    assert headrace("train", "samples", "r", "--place", "3.0.0.0").code == 2
    assert headrace("train", "samples", "r", "--search", "a", "--step", "3").code == 2
