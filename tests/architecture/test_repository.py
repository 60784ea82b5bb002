"""The repository as a whole: nothing refers outside of it."""

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

OUTSIDE = (
    "/" + "work/",
    ".." + "/shared",
    "--index" + "-url",
    "--extra-index" + "-url",
    "find" + "-links",
)
"""Written in two parts, so that this list does not find itself."""


def tracked() -> list[Path]:
    done = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    names = [name for name in done.stdout.split("\0") if name]
    return [path for name in names if (path := ROOT / name).is_file()]


def test_nothing_refers_outside_of_the_repository() -> None:
    files = tracked()
    assert files, "this test runs in a git checkout"
    found = []
    for path in files:
        text = path.read_bytes().decode(errors="replace")
        found += [(str(path.relative_to(ROOT)), word) for word in OUTSIDE if word in text]
    assert not found


def test_no_link_leads_out_of_the_repository() -> None:
    for path in tracked():
        if path.is_symlink():
            assert path.resolve().is_relative_to(ROOT), path


REASONED = (
    re.compile(r"# noqa: [A-Z0-9, ]+ - \w"),
    re.compile(r"# type: ignore\[[a-z-]+(, [a-z-]+)*\]  # \w"),
)
SILENT = re.compile("# *(noqa" + "|type: *ignore" + "|pragma: *no cover)")


@pytest.mark.parametrize(
    ("line", "well"),
    [
        ("x = 1  # noqa" + ": S311 - jitter", True),
        ("x = 1  # type" + ": ignore[assignment]  # has its shape", True),
        ("x = 1  # noqa" + ": S311", False),
        ("x = 1  # noqa", False),
        ("x = 1  # type" + ": ignore[assignment]", False),
        ("x = 1  # pragma" + ": no cover", False),
    ],
)
def test_only_words_after_the_code_of_a_check_are_a_reason(line: str, well: bool) -> None:
    assert SILENT.search(line)
    assert any(form.search(line) for form in REASONED) == well


def test_a_comment_that_silences_a_check_says_why() -> None:
    silent = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in tracked()
        if path.suffix == ".py" and path != Path(__file__)
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if SILENT.search(line) and not any(form.search(line) for form in REASONED)
    ]
    assert not silent


@pytest.mark.parametrize(
    "name", ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "LICENSE", "Makefile"]
)
def test_the_pages_of_a_newcomer_are_there(name: str) -> None:
    assert (ROOT / name).read_text().strip()


def test_ci_calls_the_test_command_of_the_readme() -> None:
    assert "make test" in (ROOT / "README.md").read_text()
    assert "make test" in (ROOT / ".ci" / "run").read_text()


@pytest.mark.parametrize("ends", [0, 3])
def test_a_file_that_ci_cannot_remove_does_not_change_how_it_ends(ends: int) -> None:
    text = (ROOT / ".ci" / "run").read_text()
    leave = text[text.index("leave() {") : text.index("trap leave EXIT")]
    script = f"""
        set -euo pipefail
        logs=a scratch=b databases=c lanes=""
        rm() {{ return 1; }}
        {leave}
        trap leave EXIT
        exit {ends}
    """
    assert subprocess.run(["bash", "-c", script], check=False).returncode == ends
