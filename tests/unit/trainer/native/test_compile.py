"""Compiling the C functions: which compiler is used, what is cached, and the message when there is
no compiler."""

import ctypes
import logging
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from tests.kit.postgres import missing
from tests.unit.trainer.native.test_learn import gradients, leaves, micro
from tests.unit.trainer.sampler.test_decode_model import QWEN3, base_of, decoder, views
from trainer.native import compile as native_compile
from trainer.native.compile import LARGE, SMALL, compiler, load_library
from trainer.native.learn import LearnerPass

NEEDED = ("gcc", "clang", "ccache")


@pytest.fixture(autouse=True)
def cache_of_its_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CCACHE_DIR", str(tmp_path / "ccache"))
    load_library.cache_clear()
    compiler.cache_clear()
    yield
    load_library.cache_clear()
    compiler.cache_clear()


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> Callable[..., ctypes.CDLL]:
    """Compile with the compiler that `CC` names."""

    def build(cc: str, *defines: str, name: str = "adapt") -> ctypes.CDLL:
        for program in NEEDED:
            if program in cc.split() and shutil.which(program) is None:
                missing(f"no {program} (apt-get install {program})")
        monkeypatch.setenv("CC", cc)
        made = load_library(name, *defines)
        assert made is not None
        return made

    return build


def file_of(made: ctypes.CDLL) -> Path:
    return Path(str(made._name))


def test_gcc_and_clang_give_the_same_numbers_and_libraries_of_other_names(
    built: Callable[..., ctypes.CDLL],
) -> None:
    base = base_of(QWEN3)
    view, shape, batch = views(base)["all-linear"], decoder(base), micro()
    trained, found, names = leaves(view), [], []
    for cc in ("gcc", "clang"):
        load_library.cache_clear()
        made = built(cc, "DOUBLE", name="learn")
        native = LearnerPass(made, shape, view)
        hidden = native.hidden_states(batch.tokens_N, batch.positions_N, batch.segments)
        found.append([hidden.detach(), *gradients(hidden, trained)])
        names.append(file_of(made).stem)
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, atol=1e-10, rtol=1e-10)
    assert [name.split("-")[1] for name in names] == ["gcc", "clang"]


def test_vectors_of_both_sizes_give_the_same_numbers(
    built: Callable[..., ctypes.CDLL], monkeypatch: pytest.MonkeyPatch
) -> None:
    base = base_of(QWEN3)
    view, shape, batch = views(base)["all-linear"], decoder(base), micro()
    trained, found = leaves(view), []
    for size in (SMALL, LARGE):
        monkeypatch.setattr(native_compile, "vector_bytes", lambda size=size: size)
        load_library.cache_clear()
        native = LearnerPass(built("cc", "DOUBLE", name="learn"), shape, view)
        hidden = native.hidden_states(batch.tokens_N, batch.positions_N, batch.segments)
        found.append([hidden.detach(), *gradients(hidden, trained)])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, atol=1e-10, rtol=1e-10)


@pytest.mark.parametrize(
    ("lines", "size"),
    [
        (("flags\t: fpu avx avx2 avx512f avx512dq",), LARGE),
        (("flags\t: fpu avx avx2 avx512f",), LARGE),
        (("flags\t: fpu avx avx2",), SMALL),
        (("flags\t: fpu avx avx2 avx512f", "flags\t: fpu avx avx2"), SMALL),
        (("Features\t: fp asimd",), SMALL),
        ((), SMALL),
        (None, SMALL),
    ],
)
def test_vectors_are_as_large_as_those_of_every_processor(
    lines: tuple[str, ...] | None, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GCC keeps larger ones in memory: a step took twenty times as long."""
    monkeypatch.setattr(native_compile, "processor", lambda: lines)
    assert native_compile.vector_bytes.__wrapped__() == size


def test_a_compiler_behind_another_program_is_called_as_a_shell_would(
    built: Callable[..., ctypes.CDLL],
) -> None:
    assert file_of(built("ccache gcc")).is_file()
    load_library.cache_clear()
    assert file_of(built("gcc -pipe")).is_file()


@pytest.mark.parametrize("wanted", ["no-such-compiler", "ccache 'cc", "", "false"])
def test_without_a_compiler_one_warning_says_what_follows(
    wanted: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CC", wanted)
    if not wanted:
        monkeypatch.setenv("PATH", "/nowhere")
    with caplog.at_level(logging.WARNING, logger="trainer.native.compile"):
        assert [load_library(name) for name in ("adapt", "decode", "learn")] == [None] * 3
    [said] = caplog.messages
    assert "narrow models run through torch" in said
    assert "other roundings" in said
    assert "apt-get install gcc" in said


LOAD = """import sys
from trainer.native.compile import load_library
sys.exit(load_library("adapt") is None)"""


@pytest.mark.parametrize("kept", [0, 100, 0.5, -1])
def test_a_library_that_is_not_whole_is_compiled_again(
    kept: float, built: Callable[..., ctypes.CDLL]
) -> None:
    """Runs in a process of its own, because loading half a library would end this one."""
    file = file_of(built("cc"))
    whole = file.read_bytes()
    file.unlink()
    size = int(kept * len(whole)) if isinstance(kept, float) else kept
    file.write_bytes(whole[:size])
    subprocess.run([sys.executable, "-c", LOAD], check=True, timeout=120)
    assert file.read_bytes() == whole


def test_a_broken_library_is_compiled_again_once(
    built: Callable[..., ctypes.CDLL], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    load = ctypes.CDLL

    def failing_once(name: str) -> ctypes.CDLL:
        calls.append(name)
        if len(calls) == 1:
            raise OSError("invalid ELF header")
        return load(name)

    monkeypatch.setattr(ctypes, "CDLL", failing_once)
    assert built("cc") is not None
    assert len(calls) == 2


def test_twin_a_library_that_is_not_whole_ends_the_process(
    built: Callable[..., ctypes.CDLL],
) -> None:
    """The failure that the check of the digest prevents."""
    file = file_of(built("cc"))
    half = file.with_name("half.so")
    half.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    done = subprocess.run(
        [sys.executable, "-c", f"import ctypes; ctypes.CDLL({str(half)!r})"], capture_output=True
    )
    assert done.returncode != 0
