"""Settings: the environment, read once, into one frozen value. Imports nothing heavy.

A bad value stops the process at start with one line that names the variable, what it held, and what
it may hold. A value that is valid but whose feature is not built yet is refused by name.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from infra.kafka.settings import KafkaSettings


class BadSetting(ValueError):
    """A variable holds what it may not; the message is the one line to print."""


@dataclass(frozen=True, slots=True)
class Settings:
    """How this process was told to run. `database_url` None: the supervisor's embedded Postgres;
    `kafka` None: the bus tails the event log."""

    home: Path
    url: str
    token: str | None
    database_url: str | None
    kafka: KafkaSettings | None
    blobs: str
    sampler: str
    sandbox: str
    workers: str
    failpoint: str | None
    telemetry: bool

    @classmethod
    def load(cls, environ: Mapping[str, str]) -> "Settings":
        """Read the environment. Raises BadSetting."""
        home = Path(environ.get("HEADRACE_HOME") or "~/.headrace").expanduser().absolute()
        return cls(
            home=home,
            url=_url(environ),
            token=environ.get("HEADRACE_TOKEN") or None,
            database_url=_database(environ),
            kafka=_kafka(environ),
            blobs=_blobs(environ, home),
            sampler=_one_of(environ, "HEADRACE_SAMPLER", ("torch",), later="vllm="),
            sandbox=_one_of(environ, "HEADRACE_SANDBOX", ("process",), later=("bwrap", "gvisor")),
            workers=_one_of(environ, "HEADRACE_WORKERS", ("one", "each"), later=()),
            failpoint=environ.get("HEADRACE_FAILPOINT") or None,
            telemetry=any(
                environ.get(name)
                for name in ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
            ),
        )

    @property
    def host(self) -> str:
        return urlsplit(self.url).hostname or "127.0.0.1"

    @property
    def port(self) -> int:
        return urlsplit(self.url).port or 8420

    def read_token(self) -> str | None:
        """The API token: from the environment, else from the home's token file."""
        if self.token:
            return self.token
        path = self.home / "token"
        return path.read_text().strip() if path.exists() else None


def _url(environ: Mapping[str, str]) -> str:
    value = environ.get("HEADRACE_URL") or "http://127.0.0.1:8420"
    parts = urlsplit(value)
    try:
        good = parts.scheme in ("http", "https") and parts.hostname and (parts.port or 1) > 0
    except ValueError:
        good = False
    if not good:
        raise _bad("HEADRACE_URL", value, "http://host:port")
    return value.rstrip("/")


def _database(environ: Mapping[str, str]) -> str | None:
    value = environ.get("HEADRACE_DATABASE_URL") or None
    if value and urlsplit(value).scheme not in ("postgres", "postgresql"):
        raise _bad("HEADRACE_DATABASE_URL", value, "postgresql://user@host/database")
    return value


def _kafka(environ: Mapping[str, str]) -> KafkaSettings | None:
    try:
        return KafkaSettings.load(environ)
    except ValueError as error:
        raise BadSetting(str(error)) from error


def _blobs(environ: Mapping[str, str], home: Path) -> str:
    value = environ.get("HEADRACE_BLOBS") or f"file://{home}/blobs"
    if value.startswith("s3://"):
        raise BadSetting(
            f"HEADRACE_BLOBS holds {value!r}; s3 is not built in this version: use file:///directory"
        )
    if not value.startswith("file:///"):
        raise _bad("HEADRACE_BLOBS", value, "file:///directory")
    return value


def _one_of(
    environ: Mapping[str, str], name: str, known: tuple[str, ...], *, later: str | tuple[str, ...]
) -> str:
    value = environ.get(name) or known[0]
    if value in known:
        return value
    if value.startswith(later):
        raise BadSetting(
            f"{name} holds {value!r}; that is not built in this version: use {', '.join(known)}"
        )
    raise _bad(name, value, ", ".join(known))


def _bad(name: str, value: str, may: str) -> BadSetting:
    return BadSetting(f"{name} holds {value!r}; it may hold {may}")
