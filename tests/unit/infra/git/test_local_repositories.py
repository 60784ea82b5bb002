"""A directory of the server that git cannot use as a repository is refused with the reason."""

from pathlib import Path

import pytest

from infra.git.mirrors import GitRepositories
from infra.settings.git import LAPTOP
from schemas.errors import NotFound

GIT_FILES = {
    "leads to itself": b"gitdir: .git",
    "leads to another that leads back": b"gitdir: ../other/.git",
    "leads to nothing": b"gitdir: /nonexistent",
    "leads to a directory that is not a repository": b"gitdir: /etc",
    "leads nowhere": b"gitdir: \n",
    "is not one": b"junk\n",
    "is empty": b"",
    "is too large": bytes(2 << 20),
}
"""What a file `.git` does -> its content."""


@pytest.mark.parametrize("kind", GIT_FILES)
async def test_a_git_file_that_does_not_lead_to_a_repository_is_refused(
    kind: str, tmp_path: Path
) -> None:
    repositories = GitRepositories(tmp_path / "mirrors", settings=LAPTOP)
    for name, content in (("source", GIT_FILES[kind]), ("other", b"gitdir: ../source/.git")):
        (tmp_path / name).mkdir()
        (tmp_path / name / ".git").write_bytes(content)
    with pytest.raises(NotFound, match=r"has a file \.git that does not lead to a repository"):
        await repositories.check(str(tmp_path / "source"))
