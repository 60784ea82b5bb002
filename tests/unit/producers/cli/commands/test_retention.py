"""The requests of `train delete|rename|archive|restore`, `dataset delete` and `gc`, and when they
ask a person to confirm."""

import pytest

from tests.unit.producers.cli.conftest import FakeServer, Run


@pytest.mark.parametrize(
    ("said", "path"),
    [
        (("train", "delete", "my-run"), "/runs/my-run"),
        (("dataset", "delete", "d"), "/datasets/d"),
        (("eval", "delete", "e"), "/evals/e"),
    ],
)
def test_deleting_wants_a_yes_where_nobody_can_be_asked(
    server: FakeServer, headrace: Run, said: tuple[str, ...], path: str
) -> None:
    server.answer("DELETE", path, {"deleted": "1"})
    for arguments in (said, (*said, "--json")):
        ran = headrace(*arguments)
        assert ran.code == 1
        assert "--yes" in ran.err
    assert server.requests == []
    ran = headrace(*said, "--yes", "--json")
    assert (ran.code, ran.document["deleted"]) == (0, "1")
    assert [request.method for request in server.requests] == ["DELETE"]


def test_rename_sends_the_new_name(server: FakeServer, headrace: Run) -> None:
    server.answer("POST", "/runs/a/rename", {"run": {"id": "1", "name": "b"}})
    ran = headrace("train", "rename", "a", "b")
    assert ran.out == "renamed a to b\n"
    assert server.requests[0].document == {"name": "b"}


def test_archive_and_restore_name_each_other(server: FakeServer, headrace: Run) -> None:
    for verb in ("archive", "restore"):
        server.answer("POST", f"/runs/a/{verb}", {"run": {"id": "1"}})
    assert "headrace train restore a" in headrace("train", "archive", "a").out
    assert headrace("train", "restore", "a").out == "restored a\n"


def test_archived_runs_are_asked_for(server: FakeServer, headrace: Run) -> None:
    server.answer("GET", "/runs", {"runs": [], "total_count": 0})
    headrace("train", "list", "--archived", "--json")
    headrace("train", "list", "--json")
    assert "archived=true" in server.requests[0].query
    assert "archived" not in server.requests[1].query


def test_gc_archives_what_is_due_and_tells_what_it_could_not(
    server: FakeServer, headrace: Run
) -> None:
    due = [{"id": n, "name": f"run-{n}", "status": "finished"} for n in ("1", "2")]
    server.answer("GET", "/gc", {"runs": due})
    server.answer("POST", "/runs/1/archive", {"run": {"id": "1"}})
    problem = {"detail": "an artifact is gone", "code": "CORRUPT"}
    server.answer("POST", "/runs/2/archive", problem, status=500)
    server.answer("POST", "/gc", {"collected": 7, "records": {"deliveries": 2}})
    ran = headrace("gc", "--older-than", "30d", "--json")
    assert "older_than_s=2592000" in server.requests[0].query
    assert ran.code == 1
    assert ran.document["archived"] == [{"id": "1", "name": "run-1"}]
    assert ran.document["collected"] == 7
    assert ran.document["records"] == {"deliveries": 2}
    assert server.requests[-1].document == {"older_than_s": 2592000, "evaluations": False}
    assert "run-2: an artifact is gone" in ran.error["message"]


def test_a_dry_run_archives_nothing(server: FakeServer, headrace: Run) -> None:
    due = [{"id": "1", "name": "run-1", "status": "failed"}]
    server.answer("GET", "/gc", {"runs": due, "records": {"hub_uploads": 3, "statuses": 0}})
    ran = headrace("gc", "--older-than", "2w", "--dry-run")
    assert (ran.code, len(server.requests)) == (0, 1)
    assert "run-1" in ran.out
    assert "hub uploads" in ran.out
    assert "statuses" not in ran.out


def test_a_dry_run_lists_evaluations_only_when_they_would_be_deleted(
    server: FakeServer, headrace: Run
) -> None:
    server.answer("GET", "/gc", {"runs": [], "records": {"evaluations": 2, "uploads": 1}})
    asked = ("gc", "--older-than", "2m", "--dry-run")
    assert headrace(*asked, "--json").document["records"] == {"uploads": 1}
    kept = "kept evaluations that are older than 2m: 2; --evaluations deletes them"
    assert kept in headrace(*asked).out
    listed = headrace(*asked, "--evaluations")
    assert "kept" not in listed.out
    assert "evaluations" in listed.out
    document = headrace(*asked, "--evaluations", "--json").document
    assert document["records"] == {"evaluations": 2, "uploads": 1}


def test_each_kind_of_records_is_shown_with_its_unit(server: FakeServer, headrace: Run) -> None:
    counts = {"pushes": 3, "syncs": 5, "usage": 7}
    server.answer("GET", "/gc", {"runs": [], "records": counts})
    out = headrace("gc", "--older-than", "2m", "--dry-run").out
    shown = {line.split()[1]: line.split() for line in out.splitlines() if "│" in line}
    units = {kind: words[5] for kind, words in shown.items() if kind in counts}
    assert units == {"pushes": "records", "syncs": "events", "usage": "rows"}


def test_old_records_are_deleted_without_a_question(server: FakeServer, headrace: Run) -> None:
    """A job that runs at night cannot answer, and the server deletes old records by itself too."""
    server.answer("GET", "/gc", {"runs": [], "records": {"deliveries": 2}})
    server.answer("POST", "/gc", {"collected": 0, "records": {"deliveries": 2}})
    ran = headrace("gc", "--older-than", "30d", "--json")
    assert (ran.code, ran.document["records"]) == (0, {"deliveries": 2})


def test_old_evaluations_are_deleted_only_when_confirmed(server: FakeServer, headrace: Run) -> None:
    server.answer("GET", "/gc", {"runs": [], "records": {}})
    server.answer("POST", "/gc", {"collected": 0, "records": {"evaluations": 1}})
    asked = ("gc", "--older-than", "2w", "--evaluations", "--json")
    refused = headrace(*asked)
    assert refused.error["code"] == "NOT_CONFIRMED"
    assert server.requests == []
    ran = headrace(*asked, "--yes")
    assert ran.document["records"] == {"evaluations": 1}
    assert server.requests[-1].document["evaluations"] is True


@pytest.mark.parametrize("age", ["30", "d", "-1d", "1.5d", "30 d", "30d\n"])
def test_an_age_has_a_unit(server: FakeServer, headrace: Run, age: str) -> None:
    ran = headrace("gc", "--older-than", age, "--json")
    assert ran.code == 1
    assert ran.error["code"] == "INVALID_OPTION"
    assert server.requests == []
