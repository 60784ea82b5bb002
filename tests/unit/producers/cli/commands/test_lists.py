"""Lists of things of several workspaces, which may have one name."""

import pytest

from tests.unit.producers.cli.conftest import FakeServer, Run


@pytest.mark.parametrize(
    ("command", "path", "key"),
    [
        ("train", "/runs", "runs"),
        ("eval", "/evals", "evals"),
        ("workspace", "/workspaces", "workspaces"),
    ],
)
def test_a_list_shows_the_ids_of_things_that_have_one_name(
    server: FakeServer, headrace: Run, command: str, path: str, key: str
) -> None:
    """A command about such a name asks for an id."""
    things = [
        {"id": "aa11", "name": "one"},
        {"id": "bb22", "name": "one"},
        {"id": "cc33", "name": "x"},
    ]
    server.answer("GET", path, {key: things, "total_count": 3, "has_more": False})
    ran = headrace(command, "list")
    shown = "".join(ran.out.split())
    assert "aa11" in shown, ran
    assert "bb22" in shown
    assert "cc33" not in shown
