"""The settings of the process that serves deployments."""

from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

from infra.settings.vllm import BadValue, read_number

MAX, SHARE, URL = "HEADRACE_MAX_DEPLOYMENTS", "HEADRACE_SERVING_SHARE", "HEADRACE_SERVING_URL"


@dataclass(frozen=True, slots=True)
class ServingSettings:
    """At most `max_deployments` are active (0: `headrace up` starts no process for them). While a run
    trains, serving computes for at most `share_percent` of the time. `url` is where control processes
    reach the process that serves; port 0 is a free one."""

    max_deployments: int = 5
    share_percent: int = 25
    url: str = "http://127.0.0.1:0"

    @classmethod
    def load(cls, environ: Mapping[str, str]) -> "ServingSettings":
        """Read the environment. Raises BadValue."""
        return cls(
            max_deployments=read_number(environ, MAX, 5, 0, 64),
            share_percent=read_number(environ, SHARE, 25, 1, 100),
            url=_url(environ),
        )

    @property
    def host(self) -> str:
        return urlsplit(self.url).hostname or "127.0.0.1"

    @property
    def port(self) -> int:
        return urlsplit(self.url).port or 0


def _url(environ: Mapping[str, str]) -> str:
    value = environ.get(URL) or "http://127.0.0.1:0"
    parts = urlsplit(value)
    try:
        is_valid = parts.scheme == "http" and bool(parts.hostname) and parts.port is not None
    except ValueError:
        is_valid = False
    if not is_valid or parts.path not in ("", "/"):
        raise BadValue(URL, value, "http://host:port, where port 0 is a free one")
    return value.rstrip("/")
