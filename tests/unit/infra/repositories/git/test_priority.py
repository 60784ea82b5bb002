"""Git runs at lower priority than this process, and in the background at the lowest."""

from pathlib import Path

import pytest

from infra.repositories.git import process
from infra.repositories.git.mirrors import GitRepositories
from infra.repositories.git.process import GitSource, run_git
from infra.settings.git import LAPTOP
from tests.kit.platform import make_workspace

NICE = "alias.nice=!sleep 0.2; ps -o ni= -p $$"


@pytest.mark.parametrize(
    ("background", "raised_by"), [(True, process.LOW_PRIORITY), (False, process.PRIORITY)]
)
async def test_children_of_a_command_in_the_background_are_nice(
    tmp_path: Path, background: bool, raised_by: int
) -> None:
    (tmp_path / "config").touch()
    source = GitSource(str(tmp_path), tmp_path / "config", background=background)
    ours = int((Path("/proc/self/stat").read_text().rpartition(")")[2]).split()[16])
    said = await run_git("-c", NICE, "nice", source=source)
    assert int(said) == min(19, ours + raised_by)


async def test_a_background_listing_equals_any_other(tmp_path: Path) -> None:
    source = str(make_workspace(tmp_path / "source"))
    repositories = GitRepositories(tmp_path / "mirrors", settings=LAPTOP)
    polled = await repositories.list_refs("w", source, background=True)
    assert polled == await repositories.list_refs("w", source)
