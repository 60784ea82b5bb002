"""An error of user code names the workspace's own line."""

import errno
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.error_location import LONGEST, last_place, locate_error
from headrace.user_code.discovery import EntryPointError, load

MAIN = """
import json
import helper

def parsed(text):
    return json.loads(text)

def outer(text):
    return parsed(text)

class Rude(Exception):
    def __str__(self):
        raise SystemExit

def rude():
    raise Rude

def deep():
    helper.fail()
"""


@pytest.fixture(autouse=True)
def _own_modules(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.syspath_prepend(tmp_path / "rollouts" / "headrace" / "lib")
    yield
    sys.modules.pop("helper", None)


def raised(tmp_path: Path, name: str, *arguments: object) -> str:
    entry = tmp_path / "rollouts" / "headrace" / "main.py"
    entry.parent.mkdir(parents=True)
    source = entry.parent / "lib" / "helper.py"
    source.parent.mkdir()
    source.write_text("def fail():\n    raise ValueError('x' * 9999)\n")
    entry.write_text(MAIN)
    module = load(entry)
    try:
        getattr(module, name)(*arguments)
    except BaseException as error:
        return locate_error(error, entry)
    raise AssertionError("it did not raise")


def test_frames_of_libraries_are_left_out(tmp_path: Path) -> None:
    said = raised(tmp_path, "outer", "{")
    assert said.startswith("rollouts/headrace/main.py:6 in parsed: JSONDecodeError: ")
    assert said.endswith("(called from rollouts/headrace/main.py:9 in outer)")


def test_a_helper_file_is_named(tmp_path: Path) -> None:
    said = raised(tmp_path, "deep")
    assert said.startswith("rollouts/headrace/lib/helper.py:2 in fail: ValueError: xxx")
    assert len(said) <= LONGEST


def test_an_error_that_cannot_be_printed_is_still_named(tmp_path: Path) -> None:
    said = raised(tmp_path, "rude")
    assert said.startswith("rollouts/headrace/main.py:16 in rude: Rude: the text of this error")


def test_an_error_without_a_line_of_ours_says_what_it_is(tmp_path: Path) -> None:
    assert locate_error(ValueError("nothing"), tmp_path / "main.py") == "ValueError: nothing"
    assert locate_error(ValueError(), tmp_path / "main.py") == "ValueError"


def test_an_import_that_is_not_there_names_the_file_to_add_it_to(tmp_path: Path) -> None:
    entry = tmp_path / "rollouts" / "x" / "main.py"
    entry.parent.mkdir(parents=True)
    entry.write_text("import numpy_that_is_not_there\n")
    with pytest.raises(
        EntryPointError, match=r"main.py:1: ModuleNotFoundError.*rollouts/x/pyproject.toml"
    ):
        load(entry)
    missing = ModuleNotFoundError("No module named 'numpy'")
    assert "rollouts/x/pyproject.toml" in locate_error(missing, entry)
    assert "pyproject.toml" not in locate_error(ImportError("cannot import name"), entry)


def test_the_limits_of_the_sandbox_say_what_to_do(tmp_path: Path) -> None:
    entry = tmp_path / "rollouts" / "x" / "main.py"
    unwritable = OSError(errno.EROFS, "Read-only file system", "out.txt")
    assert "write the file into ctx.artifacts_dir" in locate_error(unwritable, entry)
    unreachable = ConnectionError("no connection")
    unreachable.__cause__ = socket.gaierror(-3, "Temporary failure in name resolution")
    assert "advanced.network" in locate_error(unreachable, entry)
    assert locate_error(OSError(errno.ENOENT, "gone"), entry) == "FileNotFoundError: [Errno 2] gone"


def test_the_place_of_an_error_is_that_of_its_cause(tmp_path: Path) -> None:
    entry = tmp_path / "rollouts" / "x" / "main.py"
    entry.parent.mkdir(parents=True)
    entry.write_text("def wait():\n    raise RuntimeError\n")
    module = load(entry)
    late = TimeoutError()
    with pytest.raises(RuntimeError) as raised:
        module.wait()
    late.__context__ = raised.value
    assert last_place(late, entry) == "rollouts/x/main.py:2 in wait"
    assert last_place(TimeoutError(), entry) is None
