"""`headrace dataset preview` shows what a run learns from."""

import pytest

from tests.unit.producers.cli.conftest import FakeServer, Run

ASKED: dict[str, object] = {
    "prompt": [{"role": "user", "content": "2?"}],
    "label": None,
    "metadata": {},
}


@pytest.mark.parametrize(
    ("rows", "columns"),
    [
        ([ASKED | {"label": "two"}], ["ground truth", "two"]),
        (
            [ASKED | {"chosen": "two", "rejected": "three", "margin": 0.5}],
            ["chosen", "rejected", "margin", "two", "three", "0.5"],
        ),
        ([ASKED | {"chosen": "two"}, ASKED | {"rejected": "three"}], ["chosen", "rejected", "-"]),
    ],
)
def test_a_preview_shows_the_answers(
    server: FakeServer, headrace: Run, rows: list[object], columns: list[str]
) -> None:
    server.answer("GET", "/datasets/d/preview", {"rows": rows})
    said = headrace("dataset", "preview", "d").out
    assert all(column in said for column in columns)
    assert ("ground truth" in said) == (columns[0] == "ground truth")
