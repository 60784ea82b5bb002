"""The settings of Kafka: HEADRACE_KAFKA and the HEADRACE_KAFKA_* variables.

It imports no Kafka client, because the command line reads the settings too.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from schemas.secrets.redact import redact_setting

PREFIX = "HEADRACE_KAFKA"
PROTOCOLS = ("PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL")
MECHANISMS = ("PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512")
SERVER = re.compile(r"^(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+):([0-9]{1,5})$")
TOPIC_PREFIX = re.compile(r"^[A-Za-z0-9._-]{0,100}$")


@dataclass(frozen=True, slots=True)
class KafkaSettings:
    """How to reach Kafka. A `replication` of -1 means the brokers' default. The names of topics and
    groups begin with `prefix`, so that installations can share a cluster."""

    servers: tuple[str, ...]
    protocol: str = "PLAINTEXT"
    mechanism: str = "PLAIN"
    username: str | None = None
    password: str | None = field(default=None, repr=False)
    ca: Path | None = None
    certificate: Path | None = None
    key: Path | None = None
    partitions: int = 6
    replication: int = -1
    retention_hours: int = 168
    prefix: str = ""

    @property
    def tls(self) -> bool:
        return self.protocol in ("SSL", "SASL_SSL")

    @property
    def sasl(self) -> bool:
        return self.protocol.startswith("SASL_")

    @property
    def address(self) -> str:
        """The servers in the form of HEADRACE_KAFKA."""
        return ",".join(self.servers)

    @classmethod
    def load(cls, environ: Mapping[str, str]) -> "KafkaSettings | None":
        """Read the environment. Returns None when HEADRACE_KAFKA is empty. Raises ValueError with the
        line to print."""
        value = environ.get(PREFIX)
        if not value:
            return None
        settings = cls(
            servers=_servers(value),
            protocol=_one_of(environ, "SECURITY_PROTOCOL", PROTOCOLS),
            mechanism=_one_of(environ, "SASL_MECHANISM", MECHANISMS),
            username=environ.get(f"{PREFIX}_USERNAME") or None,
            password=environ.get(f"{PREFIX}_PASSWORD") or None,
            ca=_file(environ, "CA"),
            certificate=_file(environ, "CERT"),
            key=_file(environ, "KEY"),
            partitions=_number(environ, "PARTITIONS", 6, least=1, most=10_000),
            replication=_number(environ, "REPLICATION", -1, least=1, most=100),
            retention_hours=_number(environ, "RETENTION_HOURS", 168, least=1, most=1_000_000),
            prefix=_prefix(environ),
        )
        if settings.sasl and not (settings.username and settings.password):
            raise ValueError(
                f"{PREFIX}_SECURITY_PROTOCOL holds {settings.protocol!r}, which needs a login; set "
                f"{PREFIX}_USERNAME and {PREFIX}_PASSWORD"
            )
        return settings


def _servers(value: str) -> tuple[str, ...]:
    servers = tuple(part.strip() for part in value.split(","))
    for server in servers:
        match = SERVER.fullmatch(server)
        if match is None or not 0 < int(match.group(2)) < 65536:
            raise _bad(PREFIX, value, "host:port[,host:port...]")
    return servers


def _one_of(environ: Mapping[str, str], name: str, known: tuple[str, ...]) -> str:
    value = environ.get(f"{PREFIX}_{name}") or known[0]
    if value not in known:
        raise _bad(f"{PREFIX}_{name}", value, ", ".join(known))
    return value


def _number(environ: Mapping[str, str], name: str, default: int, *, least: int, most: int) -> int:
    value = environ.get(f"{PREFIX}_{name}")
    if not value:
        return default
    if not value.isascii() or not value.isdigit() or not least <= int(value) <= most:
        raise _bad(f"{PREFIX}_{name}", value, f"a number from {least} to {most}")
    return int(value)


def _file(environ: Mapping[str, str], name: str) -> Path | None:
    value = environ.get(f"{PREFIX}_{name}")
    if not value:
        return None
    if not Path(value).is_file():
        raise _bad(f"{PREFIX}_{name}", value, "the path of a PEM file")
    return Path(value).absolute()


def _prefix(environ: Mapping[str, str]) -> str:
    value = environ.get(f"{PREFIX}_PREFIX") or ""
    if not TOPIC_PREFIX.fullmatch(value):
        raise _bad(f"{PREFIX}_PREFIX", value, "letters, digits, dots, dashes, underscores")
    return value


def _bad(name: str, value: str, may: str) -> ValueError:
    return ValueError(f"{name} holds {redact_setting(value)!r}; it may hold {may}")
