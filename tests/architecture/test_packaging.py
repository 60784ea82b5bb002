"""The wheel carries every root, SQL, C sources, and the example that `workspace init` scaffolds."""

import re
import subprocess
import sys
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.architecture.test_dependencies import EXACT

ROOT = Path(__file__).resolve().parents[2]
DASHBOARD = ROOT / "producers" / "dashboard"
PAGE_FILES = (".html", ".css", ".js", ".svg", ".txt")
VENDORED = re.compile(r"([a-z]+)-(\d+\.\d+\.\d+)\.min\.(?:js|css)")
"""The name and the version of a library of others, in the name of its file."""

pytestmark = [pytest.mark.slow, pytest.mark.processes]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("dist")
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "build",
            "--wheel",
            "--no-isolation",
            "--outdir",
            str(out),
            str(ROOT),
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return next(out.glob("headrace-*.whl"))


def test_the_wheel_lists_all_roots(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    for root in ("schemas", "trainer", "infra", "consumers", "producers", "headrace"):
        for path in (ROOT / root).rglob("*.py"):
            assert str(path.relative_to(ROOT)) in names
    others = [*(ROOT / "infra").rglob("*.sql"), *(ROOT / "trainer").rglob("*.[ch]")]
    others += [path for path in DASHBOARD.rglob("*") if path.suffix in PAGE_FILES]
    assert {path.suffix for path in others} == {".sql", ".c", ".h", *PAGE_FILES}
    for path in others:
        assert str(path.relative_to(ROOT)) in names
    assert [name for name in names if name.endswith("/licenses/LICENSE")]
    example = ("rollouts/arithmetic/main.py", "configs/training/grpo.toml", "data/make.py")
    for name in (*example, ".gitignore"):
        assert f"producers/scaffold/arithmetic/{name}" in names
    assert not [name for name in names if name.startswith("tests/")]


def test_each_library_of_the_pages_has_a_version_and_a_licence(wheel: Path) -> None:
    place = "producers/dashboard/static/vendor/"
    with zipfile.ZipFile(wheel) as archive:
        names = {n.removeprefix(place) for n in archive.namelist() if n.startswith(place)}
        libraries = {name for name in names if not name.endswith("-LICENSE.txt")}
        versions: dict[str, set[str]] = {}
        for name in libraries:
            found = VENDORED.fullmatch(name)
            assert found, f"{name} does not tell its library and version"
            versions.setdefault(found[1], set()).add(found[2])
        assert versions
        assert all(len(one) == 1 for one in versions.values()), versions
        for library in versions:
            licence = archive.read(f"{place}{library}-LICENSE.txt").decode()
            assert "Permission" in licence or "Redistribution" in licence or "license" in licence
    assert names - libraries == {f"{library}-LICENSE.txt" for library in versions}


def test_the_wheel_asks_for_ranges_so_that_others_install_beside_it(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        metadata = Parser().parsestr(archive.read(name).decode())
    assert metadata["Requires-Python"] == ">=3.11"
    asked = [Requirement(line) for line in metadata.get_all("Requires-Dist") or ()]
    assert len(asked) > 20
    others = [one for one in asked if one.name != "headrace"]
    exact = {one.name for one in others if {s.operator for s in one.specifier} == {"=="}}
    assert exact == set(EXACT), "others cannot install beside an exact version without a reason"
    ranges = [one for one in others if one.name not in exact]
    assert all({s.operator for s in one.specifier} in ({">="}, {">=", "<"}) for one in ranges)
    telemetry = next(one for one in asked if one.name == "opentelemetry-sdk")
    assert telemetry.specifier.contains("1.45.1")  # what strands-agents asks for
    assert telemetry.specifier.contains("1.45.2")


def test_the_wheel_works_from_another_directory(wheel: Path, tmp_path: Path) -> None:
    place = tmp_path / "site"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(place)
    program = (
        f"import sys; sys.path.insert(0, {str(place)!r});"
        "from producers.cli.main import main; sys.exit(main(['workspace', 'init', 'w', '--json']))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "w" / "rollouts" / "arithmetic" / "main.py").is_file()
