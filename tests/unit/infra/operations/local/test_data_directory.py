"""Where the embedded database of a private home is stored when root runs it."""

import shutil
from pathlib import Path

import pytest

from infra.operations.local import data_directory
from schemas.errors import InvalidConfig


@pytest.fixture(autouse=True)
def system_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    root = tmp_path / "system"
    monkeypatch.setattr(data_directory, "SYSTEM_ROOT", root)
    return root


@pytest.fixture
def home(tmp_path: Path) -> Path:
    directory = tmp_path / "home"
    directory.mkdir()
    return directory


def test_a_home_finds_what_it_had(home: Path) -> None:
    assert data_directory.find_directory(home / "postgres") is None
    made = data_directory.ensure_directory(home / "postgres")
    assert made.is_dir()
    assert (
        data_directory.ensure_directory(home / "postgres")
        == data_directory.find_directory(home / "postgres")
        == made
    )


def test_a_home_made_anew_at_the_same_place_has_nothing_of_the_former(home: Path) -> None:
    former = data_directory.ensure_directory(home / "postgres")
    shutil.rmtree(home)
    assert data_directory.find_directory(home / "postgres") is None
    assert data_directory.ensure_directory(home / "postgres") != former
    assert former.is_dir(), "nothing is removed that nobody asked to remove"


def test_a_home_that_was_moved_keeps_its_database(home: Path) -> None:
    had = data_directory.ensure_directory(home / "postgres")
    moved = home.rename(home.with_name("moved"))
    assert data_directory.ensure_directory(moved / "postgres") == had
    home.mkdir()
    assert data_directory.ensure_directory(home / "postgres") != had


def test_a_copy_of_a_home_is_refused(home: Path) -> None:
    data_directory.ensure_directory(home / "postgres")
    copy = home.with_name("copy")
    shutil.copytree(home, copy, symlinks=True)
    for use in (
        data_directory.find_directory,
        data_directory.ensure_directory,
        data_directory.remove,
    ):
        with pytest.raises(InvalidConfig, match=f"a copy of {home}"):
            use(copy / "postgres")


def test_a_removal_leaves_nothing(home: Path, system_root: Path) -> None:
    data_directory.remove(home / "postgres")
    data_directory.ensure_directory(home / "postgres")
    data_directory.remove(home / "postgres")
    assert list(system_root.iterdir()) == list(home.iterdir()) == []
