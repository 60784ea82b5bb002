"""Trees that hold anything are measured, sealed, read and removed without following or blocking."""

import os
import shutil
import socket
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from infra.sandbox import written_trees
from infra.sandbox.written_trees import (
    SEAL,
    TreeEntry,
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
from tests.kit.ordinary_users import may_be_reached_by_all


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
    """Seal a tree of our own user, as a confined process and the platform do together."""
    if os.geteuid() != 0 and not tree.is_symlink():
        subprocess.run([sys.executable, "-I", "-S", "-c", SEAL, tree], check=True)
    with open_tree(tree) as top:
        seal_tree(top, [os.geteuid()])


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


def put_second_name(place: Path) -> None:
    place.hardlink_to(place.parents[1] / "outside" / "secret")


def put_socket(place: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(str(place))


def put_device(place: Path) -> None:
    try:
        os.mknod(place, stat.S_IFBLK | 0o666, os.makedev(8, 0))
    except PermissionError:
        pytest.skip("this user makes no devices")


def put_file_of_another(place: Path) -> None:
    place.write_text("of another")
    if os.geteuid() != 0:
        pytest.skip("this user gives no files away")
    os.chown(place, 4321, 4321)


def put_pipe(place: Path) -> None:
    os.mkfifo(place)


ODD: dict[str, tuple[Callable[[Path], None], str]] = {
    "a pipe": (put_pipe, "is not a file"),
    "a socket": (put_socket, "is not a file"),
    "a device": (put_device, "is not a file"),
    "a second name": (put_second_name, "has more than one name"),
    "a file of another user": (put_file_of_another, "belongs to something else"),
}


@pytest.mark.parametrize("kind", ODD)
def test_files_of_others_are_not_sealed(tree: Path, kind: str) -> None:
    make, says = ODD[kind]
    make(tree / "x")
    before = (tree / "x").lstat()
    with pytest.raises(Refused, match=says):
        seal(tree)
    told = (tree / "x").lstat()
    if os.geteuid() == 0:
        assert (told.st_mode, told.st_uid) == (before.st_mode, before.st_uid)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root could change it")
@pytest.mark.parametrize("kind", ODD)
def test_twin_without_the_check_the_platform_changes_it(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "secret").write_text("secret")
    (tmp_path / "tree").mkdir()
    ODD[kind][0](tmp_path / "tree" / "x")
    (tmp_path / "tree" / "x").chmod(0o640)
    monkeypatch.setattr(written_trees, "_check", lambda *_: None)
    seal(tmp_path / "tree")
    told = (tmp_path / "tree" / "x").lstat()
    assert (stat.S_IMODE(told.st_mode), told.st_uid) == (0o444, 0)


def test_another_file_system_is_not_sealed(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a mount in the tree would show."""
    (tree / "mounted").mkdir()
    seal(tree)
    inner = (tree / "mounted").lstat().st_ino
    fstat = os.fstat

    def other(handle: int) -> os.stat_result:
        told = fstat(handle)
        device = 4321 if told.st_ino == inner else told.st_dev
        return os.stat_result((*told[:2], device, *told[3:]))

    monkeypatch.setattr("infra.sandbox.written_trees.os.fstat", other)
    with open_tree(tree) as top, pytest.raises(Refused, match="belongs to something else"):
        seal_tree(top, [os.geteuid()])


@pytest.mark.parametrize("kind", ["a pipe", "a second name"])
def test_a_path_that_is_not_one_file_is_not_read(tree: Path, kind: str) -> None:
    ODD[kind][0](tree / "x")
    with pytest.raises(Refused, match="not a file" if kind == "a pipe" else "more than 3 bytes"):
        read_file(tree, "x", most=3)


def test_a_walk_has_an_end(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(written_trees, "MOST_ENTRIES", 100)
    for number in range(101):
        (tree / str(number)).mkdir()
    with pytest.raises(Refused, match="more than 100 files and directories"):
        measure_tree(tree)
    (tree / "0").rmdir()
    assert measure_tree(tree) == (0, 100), "directories count too"


def test_an_entry_that_is_exchanged_is_not_sealed(
    tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tree / "a").write_text("")
    walk = written_trees.walk_tree

    def exchange(top: int) -> Iterator[TreeEntry]:
        for entry in walk(top):
            (tree / "b").write_text("")
            (tree / "b").replace(tree / "a")
            yield entry

    monkeypatch.setattr(written_trees, "walk_tree", exchange)
    with pytest.raises(Refused, match="was exchanged"):
        seal(tree)


def test_rights_of_their_own_are_taken_from_files(tree: Path) -> None:
    (tree / "su").write_text("")
    (tree / "su").chmod(0o6755)
    (tree / "group").mkdir(mode=0o2775)
    if os.geteuid() == 0:  # others are refused
        (tree / "none").mkdir(mode=0o000)
    seal(tree)
    assert stat.S_IMODE((tree / "su").lstat().st_mode) == 0o555
    assert {stat.S_IMODE(p.lstat().st_mode) for p in tree.iterdir() if p.is_dir()} == {0o755}


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
    assert measure_tree(tree) == (0, 1), "the directory, and nothing of the other"


ORDINARY = """
import os, subprocess, sys
from pathlib import Path
from infra.sandbox.written_trees import SEAL, measure_tree, open_tree, remove_tree, seal_tree
from schemas.errors import Refused
tree = Path(sys.argv[1]) / "own"
(tree / "none" / "inner").mkdir(parents=True)
(tree / "none" / "inner" / "x").write_text("x" * 1000)
(tree / "none").chmod(0)
try:
    measure_tree(tree)
except Refused as refused:
    print(refused)
(tree / "none").chmod(0o755)
with open_tree(tree) as top:
    try:
        seal_tree(top, [os.geteuid()])
    except Refused as refused:
        print(refused)
    subprocess.run([sys.executable, "-c", SEAL, tree], check=True)
    seal_tree(top, [os.geteuid()])
print(measure_tree(tree))
(tree / "none" / "inner").chmod(0)
remove_tree(tree)
print(tree.exists())
"""


def test_directories_without_permissions_hide_nothing_from_their_owner(tmp_path: Path) -> None:
    user = 61_900 if os.geteuid() == 0 else None
    python = sys.executable if user is None else shutil.which("python3", path="/usr/bin")
    root = Path(__file__).resolve().parents[4]
    if python is None or not (user is None or may_be_reached_by_all(root)):
        pytest.skip("needs a Python and a clone that another user can use")
    place = Path("/tmp") / f"headrace-trees-{os.getpid()}"
    place.mkdir(mode=0o755)
    try:
        if user is not None:
            os.chown(place, user, user)
        said = subprocess.run(
            [python, "-c", ORDINARY, str(place)],
            env={"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
            cwd=root,
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
    assert "'none/inner/x' can still be written" in said[1]
    assert said[2:] == ["(1000, 3)", "False"]
