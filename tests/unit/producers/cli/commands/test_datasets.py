"""`headrace dataset list`: the datasets, and why a file was refused."""

from tests.unit.producers.cli.conftest import FakeServer, Run


def test_a_list_says_why_a_file_was_refused(server: FakeServer, headrace: Run) -> None:
    listed = [
        {"name": "sums", "status": "uploaded", "num_rows": 4, "error": None},
        {"name": "broken", "status": "error", "error": "line 2 is not JSON\x1b[31m; correct it"},
    ]
    server.answer("GET", "/datasets", {"datasets": listed, "total_count": 2})
    shown = headrace("dataset", "list").out
    assert shown.splitlines()[-1] == "broken: line 2 is not JSON[31m; correct it"
    assert "sums:" not in shown
