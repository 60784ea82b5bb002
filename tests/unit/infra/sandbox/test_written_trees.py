"""Trees that hold anything are measured, sealed, read and removed without following or blocking."""

import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from infra.sandbox import written_trees
from infra.sandbox.written_trees import (
    has_directory,
    has_file,
    measure_tree,
    move_tree,
    open_tree,
    read_file,
    remove_tree,
    seal_tree,
)
from schemas.errors import Refused


@pytest.fixture
def tree(tmp_path: Path) -> Iterator[Path]:
    (tmp_path / "outside").mkdir(mode=0o700)
    (tmp_path / "outside" / "secret").write_text("secret")
    (tmp_path / "outside" / "secret").chmod(0o600)
    (tmp_path / "tree").mkdir()
    yield tmp_path / "tree"
    told = (tmp_path / "outside" / "secret").lstat()
    assert stat.S_IMODE(told.st_mode) == 0o600
    assert (tmp_path / "outside" / "secret").read_text() == "secret"


def seal(tree: Path) -> None:
    with open_tree(tree) as top:
        seal_tree(top)


def deepen(tree: Path, *, levels: int) -> None:
    """Make directories inside each other, beyond the longest path."""
    handle = os.open(tree, os.O_RDONLY)
    for _ in range(levels):
        os.mkdir("d" * 50, dir_fd=handle)
        inner = os.open("d" * 50, os.O_RDONLY, dir_fd=handle)
        os.close(handle)
        handle = inner
    os.close(handle)


def test_links_are_neither_followed_nor_measured(tree: Path) -> None:
    (tree / "away").symlink_to(tree.parent / "outside")
    (tree / "file").write_text("1234")
    size, files = measure_tree(tree)
    assert (size - 4, files) == ((tree / "away").lstat().st_size, 2)
    seal(tree)
    assert stat.S_IMODE((tree / "file").lstat().st_mode) == 0o444
    assert stat.S_IMODE((tree.parent / "outside").lstat().st_mode) == 0o700
    remove_tree(tree)
    assert not tree.exists()


def test_a_top_that_is_a_link_is_refused(tree: Path) -> None:
    link = tree / "link"
    link.symlink_to(tree.parent / "outside")
    assert measure_tree(link) == (0, 0)
    with pytest.raises(OSError, match=r"directory|link"):
        seal(link)
    assert not has_directory(link)
    assert not has_file(link)
    remove_tree(link)
    assert not link.is_symlink()


@pytest.mark.parametrize("kind", ["pipe", "second name"])
def test_what_is_not_one_file_is_not_sealed(tree: Path, kind: str) -> None:
    if kind == "pipe":
        os.mkfifo(tree / "x")
    else:
        (tree / "x").hardlink_to(tree.parent / "outside" / "secret")
    with pytest.raises(Refused, match=r"not a file|more than one name"):
        seal(tree)
    with pytest.raises(Refused, match="not a file") if kind == "pipe" else pytest.raises(Refused):
        read_file(tree, "x", most=3)


def test_rights_of_their_own_are_taken_from_files(tree: Path) -> None:
    (tree / "su").write_text("")
    (tree / "su").chmod(0o6755)
    (tree / "none").mkdir(mode=0o000)
    seal(tree)
    assert stat.S_IMODE((tree / "su").lstat().st_mode) == 0o555
    assert stat.S_IMODE((tree / "none").lstat().st_mode) == 0o755


def test_reading_does_not_wait_for_a_pipe_and_follows_no_link(tree: Path) -> None:
    os.mkfifo(tree / "pipe")
    (tree / "link").symlink_to(tree.parent / "outside" / "secret")
    (tree / "file").write_bytes(b"123")
    for name in ("pipe", "link"):
        with pytest.raises(Refused, match="not a file"):
            read_file(tree, name, most=100)
    assert read_file(tree, "file", most=3) == b"123"
    assert read_file(tree, "absent", most=3) is None
    with pytest.raises(Refused, match="more than 2 bytes"):
        read_file(tree, "file", most=2)


def test_a_deep_tree_is_refused_and_removed(tree: Path) -> None:
    deepen(tree, levels=3000)
    with pytest.raises(Refused, match="deeper than"):
        measure_tree(tree)
    with pytest.raises(Refused, match="deeper than"):
        seal(tree)
    remove_tree(tree)
    assert not tree.exists()


def test_a_sparse_file_counts_with_its_length(tree: Path) -> None:
    with (tree / "sparse").open("wb") as file:
        file.truncate(1 << 40)
    assert measure_tree(tree) == (1 << 40, 1)


def test_an_exchanged_tree_is_not_moved(tree: Path) -> None:
    target = tree.parent / "target"
    with open_tree(tree) as top:
        tree.rename(tree.parent / "former")
        tree.symlink_to(tree.parent / "outside")
        with pytest.raises(Refused, match="exchanged"):
            move_tree(tree, target, top=top)
    assert not os.path.lexists(target)
    (tree.parent / "former").rmdir()


def test_a_directory_exchanged_for_a_link_during_the_walk_is_not_entered(
    tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tree / "a").mkdir()
    open_inner = written_trees._open_inner

    def exchange(handle: int, name: str, place: str) -> int | None:
        if place == "a":
            (tree / "a").rmdir()
            (tree / "a").symlink_to(tree.parent / "outside")
        return open_inner(handle, name, place)

    monkeypatch.setattr(written_trees, "_open_inner", exchange)
    assert measure_tree(tree) == (0, 0)


ORDINARY = """
import os, sys
from pathlib import Path
from infra.sandbox.written_trees import measure_tree, open_tree, remove_tree, seal_tree
from schemas.errors import Refused
tree = Path(sys.argv[1]) / "own"
(tree / "none" / "inner").mkdir(parents=True)
(tree / "none" / "inner" / "x").write_text("x" * 1000)
(tree / "none").chmod(0)
try:
    measure_tree(tree)
except Refused as refused:
    print(refused)
with open_tree(tree) as top:
    seal_tree(top)
print(measure_tree(tree))
(tree / "none" / "inner").chmod(0)
remove_tree(tree)
print(tree.exists())
"""


def test_directories_without_permissions_hide_nothing_from_their_owner(tmp_path: Path) -> None:
    user = 61_900 if os.geteuid() == 0 else None
    python = sys.executable if user is None else shutil.which("python3", path="/usr/bin")
    if python is None:
        pytest.skip("no Python that another user can run")
    place = Path("/tmp") / f"headrace-trees-{os.getpid()}"
    place.mkdir(mode=0o755)
    try:
        if user is not None:
            os.chown(place, user, user)
        said = subprocess.run(
            [python, "-c", ORDINARY, str(place)],
            env={"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
            cwd=Path(__file__).resolve().parents[4],
            user=user,
            group=user,
            extra_groups=None if user is None else (),
            capture_output=True,
            text=True,
            check=True,
        ).stdout.splitlines()
    finally:
        shutil.rmtree(place)
    assert "'none' cannot be read" in said[0]
    assert said[1:] == ["(1000, 1)", "False"]
