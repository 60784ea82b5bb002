"""The settings of a sandbox service that runs elsewhere. The message of a ValueError is the line to
print, and does not show a key."""

from dataclasses import dataclass, field
from urllib.parse import urlsplit

SHORTEST_KEY = 16


@dataclass(frozen=True, slots=True)
class SandboxAddress:
    """A sandbox service and the key that its clients have."""

    host: str
    port: int
    key: bytes = field(repr=False)

    @classmethod
    def load(cls, url: str, key: str) -> "SandboxAddress | None":
        """Read HEADRACE_SANDBOX_URL and HEADRACE_SANDBOX_KEY. None without the first. Raises
        ValueError."""
        if not url:
            return None
        parts = urlsplit(_check_address("HEADRACE_SANDBOX_URL", url))
        if not parts.port or not parts.hostname:
            raise _bad("HEADRACE_SANDBOX_URL", url)
        return cls(parts.hostname, parts.port, parse_service_key(key))


def listen_address(url: str) -> str:
    """Return the address of `--listen`, whose port may be 0. Raises ValueError."""
    return _check_address("--listen", url)


def parse_service_key(value: str) -> bytes:
    """Return the key. Raises ValueError when it is missing or short."""
    if len(value.strip()) < SHORTEST_KEY:
        held = "holds a short key" if value.strip() else "is not set"
        raise ValueError(
            f"HEADRACE_SANDBOX_KEY {held}; a sandbox service and its clients need the same key of at "
            f"least {SHORTEST_KEY} characters (make one with: openssl rand -hex 32)"
        )
    return value.strip().encode()


def _check_address(name: str, url: str) -> str:
    parts = urlsplit(url)
    try:
        valid = parts.scheme == "tcp" and parts.hostname and parts.port is not None
    except ValueError:
        valid = False
    extra = parts.path.strip("/") or parts.query or parts.fragment or parts.username
    if not valid or extra:
        raise _bad(name, url)
    return url


def _bad(name: str, url: str) -> ValueError:
    shown = urlsplit(url)._replace(netloc="...").geturl() if "@" in url else url
    return ValueError(f"{name} holds {shown!r}; it may hold tcp://host:port")
