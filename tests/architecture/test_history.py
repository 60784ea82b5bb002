"""The history can be searched: subjects are short and name an area."""

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LONGEST = 72
SUBJECT = re.compile(r"[a-z][a-z0-9_/, -]*: [a-z`A-Z0-9].*[^.]")
"""Area, colon, what the commit does. It does not end with a period."""


def git(*arguments: str) -> list[str]:
    done = subprocess.run(
        ["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return done.stdout.splitlines()


def since_this_test() -> list[str]:
    """The subject of each commit since this test was added last. Older ones do not keep the rule."""
    added = git(
        "log", "--diff-filter=A", "--format=%H", "--", str(Path(__file__).relative_to(ROOT))
    )
    return git("log", "--no-merges", "--format=%s", f"{added[0]}..HEAD") if added else []


def has_right_form(subject: str) -> bool:
    return len(subject) <= LONGEST and SUBJECT.fullmatch(subject) is not None


def test_subjects_are_short_and_name_their_area() -> None:
    assert [subject for subject in since_this_test() if not has_right_form(subject)] == []


@pytest.mark.parametrize(
    ("subject", "good"),
    [
        ("infra: skip the gate lock for running runs", True),
        ("tests, docs: name files by their new paths", True),
        ("Merge branch 'a1'", False),
        ("A missing compiler fails CI here too; why keys have the lanes that products take", False),
        ("infra: " + "x" * 72, False),
    ],
)
def test_twin_the_form_is_recognised(subject: str, good: bool) -> None:
    assert has_right_form(subject) is good
