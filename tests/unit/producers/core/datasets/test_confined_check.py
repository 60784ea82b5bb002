"""The confined process that reads an uploaded file."""

import subprocess
import sys
from pathlib import Path

import pytest

from producers.core.datasets import registration
from tests.kit.application import check_here, rows
from tests.kit.source import ROOT

PROGRAM = """
import sys
import producers.core.datasets.confined_check
print(*sorted({name.partition(".")[0] for name in sys.modules} & {"infra", "asyncpg", "starlette"}))
"""


def test_it_imports_neither_the_database_nor_the_api() -> None:
    """Each upload waits for its imports."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == []


@pytest.mark.parametrize(
    ("kind", "content", "mapping"),
    [
        ("jsonl", rows(6), {}),
        ("jsonl", '{"question": "a?", "ground_truth": "b"}\n' * 4, {"question": "user_prompt"}),
        ("csv", "user_prompt,ground_truth\n" + "one,1\n" * 5, {}),
        ("jsonl", rows(3) + "{\n" + '{"user_prompt": 1, "ground_truth": null}\n', {}),
        ("jsonl", rows(3), {"absent": "user_prompt"}),
        ("jsonl", "\x00\ud7ff\u202e" * 300, {}),
        ("csv", "", {}),
    ],
)
async def test_the_check_of_the_tests_of_the_api_says_the_same(
    tmp_path: Path, kind: str, content: str, mapping: dict[str, str]
) -> None:
    """Those tests check files in their own process."""
    found = []
    for name, check in (("confined", registration.check), ("here", check_here)):
        path = tmp_path / name
        path.write_text(content)
        checked = await check(path, kind, mapping=mapping)
        found.append((checked.report, checked.normalised.read_bytes()))
    assert found[0] == found[1]
