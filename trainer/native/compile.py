"""Compiles the C functions at first use, for this processor, and keeps them in the user's cache.

A narrow model computes hundreds of operations of a few microseconds each, and starting one costs as much
as computing it. A single C function has nothing to start. GCC and Clang can compile the sources. Each
rounds in its own way, so the name of a library, which is recorded among the versions of a step, also
depends on the compiler. Where there is no compiler everything runs through torch, which rounds
differently, after one warning.
"""

import ctypes
import hashlib
import logging
import os
import shlex
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path

FOLDER = Path(__file__).parent
FLAGS = ("-O3", "-march=native", "-std=gnu11", "-fno-math-errno", "-fPIC", "-shared", "-pthread")
COMPILE_S = 120.0
VERSION_S = 20.0
DIGEST_BYTES = 32
LARGE, SMALL = 64, 32
"""Bytes of the vectors of a processor with AVX-512, and of others."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Compiler:
    """The command of a compiler (`ccache cc` is two words), and the version that it reports."""

    command: tuple[str, ...]
    version: str

    @property
    def family(self) -> str:
        """A readable part of a library's name."""
        return "clang" if "clang" in self.version.lower() else "gcc"


@cache
def processor() -> tuple[str, ...] | None:
    """The lines with what the processors of this machine can do, each once. None, after one warning,
    where Linux does not say."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError as error:
        _warn(f"/proc/cpuinfo cannot be read: {error}")
        return None
    return tuple(sorted({line for line in lines if line.startswith(("flags", "Features"))}))


@cache
def vector_bytes() -> int:
    """How many bytes the vectors of the C functions have: as many as those of this processor."""
    has_large = [" avx512f " in f"{line} " for line in processor() or ()]
    return LARGE if has_large and all(has_large) else SMALL


@cache
def load_library(name: str, *defines: str) -> ctypes.CDLL | None:
    """The compiled `name`.c, or None where it cannot be compiled or loaded. `defines`: values of
    `-D`."""
    made = compiler(os.environ.get("CC") or "cc")
    if made is None:
        return None
    kind = processor()
    if kind is None:
        return None
    flags = (*FLAGS, f"-DBYTES={vector_bytes()}", *(f"-D{define}" for define in defines))
    sources = [path.read_text() for path in (*sorted(FOLDER.glob("*.h")), FOLDER / f"{name}.c")]
    parts = [*sources, *flags, *made.command, made.version, *kind]
    digest = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]
    file = f"{name}-{made.family}-{digest}.so"
    command = [*made.command, *flags, str(FOLDER / f"{name}.c"), "-lm"]
    try:
        return _load_or_compile(command, file)
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:
        logger.warning("%s runs through torch: %s", name, error)
        return None


@cache
def compiler(wanted: str) -> Compiler | None:
    """The compiler that `CC` names, split as a shell would split it. None, after one warning, where
    there is none."""
    try:
        command = shlex.split(wanted)
        program = shutil.which(command[0]) if command else None
        if program is None:
            raise FileNotFoundError(f"there is no {wanted!r} on the PATH")
        said = subprocess.run(
            [*command, "--version"], capture_output=True, text=True, timeout=VERSION_S, check=True
        )
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        _warn(f"the C compiler {wanted!r} cannot be called: {error}")
        return None
    return Compiler((program, *command[1:]), said.stdout.partition("\n")[0])


def _warn(reason: str) -> None:
    logger.warning(
        "narrow models run through torch, more slowly and with other roundings than in C: %s. Install a "
        "compiler (apt-get install gcc libc6-dev), or name one in CC",
        reason,
    )


def _load_or_compile(command: list[str], name: str) -> ctypes.CDLL:
    """The library from the user's cache. It is compiled first if its file is missing or incomplete."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "headrace"
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / name
    if not _is_whole(target):
        _compile(command, target)
    try:
        return ctypes.CDLL(str(target))
    except OSError:
        _compile(command, target)
        return ctypes.CDLL(str(target))


def _is_whole(file: Path) -> bool:
    """Whether a library ends with the digest of everything before it. Loading an incomplete file could
    end the process."""
    try:
        data = file.read_bytes()
    except FileNotFoundError:
        return False
    content, digest = data[:-DIGEST_BYTES], data[-DIGEST_BYTES:]
    return hashlib.sha256(content).digest() == digest


def _compile(command: list[str], target: Path) -> None:
    """Compile under another name first, because other processes read the cache too. The loader reads
    only a library's sections, so the digest can be appended after them."""
    with tempfile.TemporaryDirectory(dir=target.parent) as directory:
        made = Path(directory) / target.name
        done = subprocess.run(
            [*command, "-o", str(made)],
            check=False,
            capture_output=True,
            text=True,
            timeout=COMPILE_S,
        )
        if done.returncode:
            raise RuntimeError(f"{shlex.join(command[:1])}: {done.stderr.strip()[-500:]}")
        with made.open("ab") as file:
            file.write(hashlib.sha256(made.read_bytes()).digest())
        made.replace(target)
