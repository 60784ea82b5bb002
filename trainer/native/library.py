"""C functions, compiled at the first use, for this processor, and kept in the user's cache.

What a narrow model computes is hundreds of operations of a few microseconds, and to start one costs
as much again; as one function of C it has nothing to start. Where there is no compiler everything
runs through torch, with other roundings.
"""

import ctypes
import hashlib
import logging
import os
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

FOLDER = Path(__file__).parent
FLAGS = ("-O3", "-march=native", "-std=gnu11", "-fno-math-errno", "-fPIC", "-shared", "-pthread")
COMPILE_S = 120.0
NARROW = 512
"""Up to this hidden size a model runs in C. A function of the model, not of a trial run: another way
gives other bits."""


@cache
def library(name: str, *defines: str) -> ctypes.CDLL | None:
    """The compiled `name`.c, or None where it cannot be had. `defines`: as `-D` takes them."""
    compiler = shutil.which(os.environ.get("CC") or "cc")
    try:
        processor = Path("/proc/cpuinfo").read_text()
    except OSError:
        return None
    if compiler is None:
        return None
    kind = sorted(
        {line for line in processor.splitlines() if line.startswith(("flags", "Features"))}
    )
    flags = (*FLAGS, *(f"-D{define}" for define in defines))
    sources = [path.read_text() for path in (*sorted(FOLDER.glob("*.h")), FOLDER / f"{name}.c")]
    parts = [*sources, *flags, os.path.realpath(compiler), *kind]
    digest = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]
    command = [compiler, *flags, str(FOLDER / f"{name}.c"), "-lm"]
    try:
        return ctypes.CDLL(str(_compiled(command, f"{name}-{digest}.so")))
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:
        logging.getLogger(__name__).warning("%s runs through torch: %s", name, error)
        return None


def _compiled(command: list[str], name: str) -> Path:
    """The library's file in the user's cache; made under another name first, for others look too."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "headrace"
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / name
    if not target.exists():
        with tempfile.TemporaryDirectory(dir=folder) as directory:
            made = Path(directory) / name
            done = subprocess.run(
                [*command, "-o", str(made)],
                check=False,
                capture_output=True,
                text=True,
                timeout=COMPILE_S,
            )
            if done.returncode:
                raise RuntimeError(f"{command[0]}: {done.stderr.strip()[-500:]}")
            made.replace(target)
    return target
