"""HEADRACE_SANDBOX_LIMITS: memory, disk and processes of one process of user code."""

from collections.abc import Mapping
from dataclasses import dataclass

VARIABLE = "HEADRACE_SANDBOX_LIMITS"
GIB = 1 << 30
MOST_GIB, MOST_PROCESSES = 4096, 65536
FORM = (
    f"memory, disk (GiB, whole numbers from 1 to {MOST_GIB}) and processes (from 16 to "
    f"{MOST_PROCESSES}), such as memory=8,disk=4,processes=512"
)


@dataclass(frozen=True, slots=True)
class SandboxLimits:
    """The limits of a sandbox: bytes of memory, bytes of all files that it writes, and the number of its
    processes and threads."""

    memory_bytes: int = 16 * GIB
    written_bytes: int = 2 * GIB
    processes: int = 1024


def parse_sandbox_limits(value: str) -> SandboxLimits:
    """Return the limits that are named, and the defaults of the others. Raises ValueError."""
    found: dict[str, int] = {}
    for part in filter(None, (part.strip() for part in value.split(","))):
        name, _, number = (piece.strip() for piece in part.partition("="))
        is_number = number.isascii() and number.isdigit() and len(number) <= 6
        least, most = BOUNDS.get(name, (1, 0))
        if name in found or not is_number or not least <= int(number) <= most:
            raise ValueError(part)
        found[name] = int(number)
    defaults = SandboxLimits()
    return SandboxLimits(
        memory_bytes=found["memory"] * GIB if "memory" in found else defaults.memory_bytes,
        written_bytes=found["disk"] * GIB if "disk" in found else defaults.written_bytes,
        processes=found.get("processes", defaults.processes),
    )


BOUNDS: Mapping[str, tuple[int, int]] = {
    "memory": (1, MOST_GIB),
    "disk": (1, MOST_GIB),
    "processes": (16, MOST_PROCESSES),
}


def load_sandbox_limits(environ: Mapping[str, str]) -> SandboxLimits:
    """Return the limits that the environment sets. Raises ValueError, which says what the variable may
    hold."""
    value = environ.get(VARIABLE) or ""
    try:
        return parse_sandbox_limits(value)
    except ValueError as error:
        raise ValueError(f"{VARIABLE} holds {value!r}; it may hold {FORM}") from error
