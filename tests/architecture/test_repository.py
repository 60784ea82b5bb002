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


LANES = """
    set -euo pipefail
    logs={logs}
    {run_tests}
    {stages}
    {lanes}
    for lane in $lanes; do wait "$lane" || echo failed >>{logs}/begun; done
"""


def begun_stages(folder: Path, *, failing: str = "") -> list[str]:
    """The stages that the lanes of .ci/run begin, and `failed` for each lane that fails. The one that is
    `failing` waits until another has begun, and all others wait for it."""
    text = (ROOT / ".ci" / "run").read_text()
    names = re.findall(r"^stage_(\w+)\(\) \{", text, re.M)
    others = f"until [ -e {folder}/failed ]; do sleep 0.01; done" if failing else ":"
    fails = f"until [ $(wc -l <{folder}/begun) = 2 ]; do sleep 0.01; done; run_tests a false"
    stages = "\n".join(
        f"stage_{name}() {{ echo {name} >>{folder}/begun; {fails if name == failing else others}; }}"
        for name in names
    )
    script = LANES.format(
        logs=folder,
        run_tests=text[text.index("run_tests() {") : text.index('echo "== install (3.11)')],
        stages=stages,
        lanes=text[text.index("lane() {") : text.index("failed=0")],
    )
    subprocess.run(["bash", "-c", script], capture_output=True, check=True)
    assert len(names) == 9
    return (folder / "begun").read_text().split()


def test_the_lanes_of_ci_begin_each_stage_once(tmp_path: Path) -> None:
    begun = begun_stages(tmp_path)
    assert len(begun) == len(set(begun)) == 9


def test_no_lane_of_ci_begins_a_stage_after_a_failed_test(tmp_path: Path) -> None:
    assert sorted(begun_stages(tmp_path, failing="kills")) == ["agents", "failed", "kills"]
