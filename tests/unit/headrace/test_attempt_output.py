"""What user code prints, raises and writes is kept with its own attempt, and bounded."""

import asyncio
import base64
import os
import sys
import threading
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from headrace import attempt_output
from headrace.attempt_output import HALF, MOST_FILES, AttemptOutput, running


@contextmanager
def captured() -> Iterator[None]:
    """Capture as a confined process does, and undo it."""
    with pytest.MonkeyPatch.context() as patch:
        for owner, name in (
            (threading.Thread, "start"),
            (ThreadPoolExecutor, "submit"),
            (sys, "stdout"),
            (sys, "stderr"),
        ):
            patch.setattr(owner, name, getattr(owner, name))
        with warnings.catch_warnings():
            attempt_output.capture()
            yield
    running.set(None)


def document(output: AttemptOutput) -> dict[str, object]:
    found = output.document()
    assert found is not None
    return found


def write(text: str) -> None:
    print(text)  # noqa: T201 - as user code does


async def test_each_attempt_gets_what_it_prints_itself() -> None:
    with captured(), ThreadPoolExecutor(1) as pool:

        async def attempt(name: str) -> AttemptOutput:
            output = AttemptOutput()
            running.set(output)
            write(f"{name} begins")
            await asyncio.sleep(0)
            thread = threading.Thread(target=write, args=(f"{name} in a thread",))
            thread.start()
            thread.join()
            await asyncio.to_thread(write, f"{name} in a task's thread")
            await asyncio.get_running_loop().run_in_executor(pool, write, f"{name} in a pool")
            sys.stderr.write(f"{name} warns\n")
            sys.stdout.buffer.write(f"{name} \ud800 ends\n".encode(errors="replace"))
            return output

        outputs = await asyncio.gather(*(attempt(f"a{n}") for n in range(3)))
    for number, output in enumerate(outputs):
        lines = str(document(output)["stdout"]).splitlines()
        assert len(lines) == 6
        assert all(line.startswith(f"a{number} ") for line in lines)


def test_a_warning_names_the_line_of_the_workspace(tmp_path: Path) -> None:
    entry = tmp_path / "rollouts" / "x" / "main.py"
    for place, shown in ((entry, "rollouts/x/main.py:3: "), (tmp_path.parent / "library.py", "")):
        output = AttemptOutput(entry)
        with captured():
            running.set(output)
            for _ in range(2):  # the second attempt of a process sees it too
                warnings.warn_explicit(
                    "coroutine 'chat' was never awaited", RuntimeWarning, str(place), 3
                )
        said = "coroutine 'chat' was never awaited; write `await` before its call"
        assert document(output)["stdout"] == f"{shown}RuntimeWarning: {said}\n" * 2


def test_closing_the_streams_leaves_them_to_others() -> None:
    output = AttemptOutput()
    with captured():
        running.set(output)
        sys.stdout.close()
        write("later")
    assert document(output)["stdout"] == "later\n"


def test_the_first_and_the_last_half_of_a_long_text_are_kept() -> None:
    output = AttemptOutput()
    output.write(b"begin")
    for _ in range(50):
        output.write(b"x" * 10_000)
    output.write(b"y" * (1 << 20))
    output.write(b"end")
    found = document(output)
    text = str(found["stdout"])
    assert text.startswith("beginx")
    assert text.endswith("yend")
    assert found["is_cut"]
    assert f"[... {5 + 500_000 + (1 << 20) + 3 - 2 * HALF} bytes are left out ...]" in text


def test_nothing_is_reported_when_there_is_nothing() -> None:
    assert AttemptOutput().document() is None


def test_files_are_kept_by_plain_names_and_links_are_not_followed(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("hidden")
    kept = tmp_path / "kept"
    (kept / "inner").mkdir(parents=True)
    (kept / "inner" / "a b\n.txt").write_text("inner")
    (kept / ".hidden").write_text("dot")
    (kept / "link").symlink_to(secret)
    (kept / "directory").symlink_to(tmp_path)
    os.mkfifo(kept / "pipe")
    output = AttemptOutput()
    output.collect(kept)
    files = document(output)["files"]
    assert isinstance(files, dict)
    assert {name: base64.b64decode(data) for name, data in files.items()} == {
        "hidden": b"dot",
        "inner/a_b_.txt": b"inner",
    }


def test_a_directory_that_user_code_removed_leaves_nothing(tmp_path: Path) -> None:
    output = AttemptOutput()
    output.collect(tmp_path / "removed")
    assert output.document() is None


def test_files_are_bounded_in_number_and_in_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attempt_output, "MOST_FILE_BYTES", 100)
    for number in range(MOST_FILES + 8):
        (tmp_path / f"{number:03}").write_bytes(b"12")
    (tmp_path / "000").write_bytes(b"x" * 101)
    output = AttemptOutput()
    output.collect(tmp_path)
    found = document(output)
    assert isinstance(found["files"], dict)
    assert len(found["files"]) == MOST_FILES
    assert found["is_cut"]
