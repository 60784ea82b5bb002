"""`headrace eval files`: the files of an evaluation are listed, and saved below one directory."""

from pathlib import Path

import pytest

from tests.unit.producers.cli.conftest import FakeServer, Run

LISTED = [{"path": "metrics.json", "size": 2}, {"path": "artifacts/row-000001/a b", "size": 3}]


@pytest.fixture
def listing(server: FakeServer) -> FakeServer:
    server.answer("GET", "/evals/e/files", {"files": LISTED, "total_bytes": 5})
    return server


def test_files_are_listed_with_their_sizes(listing: FakeServer, headrace: Run) -> None:
    shown = headrace("eval", "files", "e").out
    assert "metrics.json" in shown
    assert "artifacts/row-000001/a b" in shown


def test_files_are_saved_and_not_overwritten(
    listing: FakeServer, headrace: Run, tmp_path: Path
) -> None:
    listing.answer("GET", "/evals/e/files/metrics.json", {})
    listing.answer("GET", "/evals/e/files/artifacts/row-000001/a%20b", {"a": 1})
    headrace("eval", "files", "e", "-o", str(tmp_path))
    assert (tmp_path / "metrics.json").read_text() == "{}"
    assert (tmp_path / "artifacts" / "row-000001" / "a b").exists()
    refused = headrace("eval", "files", "e", "-o", str(tmp_path))
    assert refused.code == 1
    assert "--force" in refused.err


@pytest.mark.parametrize("path", ["../x", "/etc/x", "a//b", "a/./b"])
def test_a_path_that_leads_elsewhere_is_refused(
    server: FakeServer, headrace: Run, tmp_path: Path, path: str
) -> None:
    server.answer("GET", "/evals/e/files", {"files": [{"path": path, "size": 1}]})
    refused = headrace("eval", "files", "e", "-o", str(tmp_path / "out"))
    assert refused.code == 1
    assert "which is not below" in refused.err.replace("\n", " ")
    assert list(tmp_path.rglob("*")) == []
