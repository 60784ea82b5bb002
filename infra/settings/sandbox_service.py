"""The settings of a sandbox service that runs elsewhere. The message of a ValueError is the line to
print, and does not show a key."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

URL = "HEADRACE_SANDBOX_URL"
CERT, KEY, CA = (f"HEADRACE_SANDBOX_TLS_{name}" for name in ("CERT", "KEY", "CA"))
VARIABLES = (CERT, KEY, CA)
FORMER_KEY = "HEADRACE_SANDBOX_KEY"
PEM = "-----BEGIN"
MAKE_THEM = (
    "a sandbox service and its clients need certificates of one authority (make them with: "
    "sh deploy/make_certificates.sh FOLDER CLIENT)"
)


@dataclass(frozen=True, slots=True)
class SandboxCertificates:
    """The certificate of one end, its private key, and the authority that signed those of all ends, as
    PEM. `key_file` is the file that the key was read from, if it was."""

    certificate: str = field(repr=False)
    key: str = field(repr=False)
    authority: str = field(repr=False)
    key_file: Path | None = None

    @classmethod
    def load(cls, environ: Mapping[str, str]) -> "SandboxCertificates":
        """Read HEADRACE_SANDBOX_TLS_CERT, _KEY and _CA. Raises ValueError."""
        certificate, key, authority = (_read_pem(environ, name) for name in VARIABLES)
        is_text = environ[KEY].lstrip().startswith(PEM)
        return cls(certificate, key, authority, None if is_text else Path(environ[KEY]).absolute())


@dataclass(frozen=True, slots=True)
class SandboxAddress:
    """A sandbox service, and the certificates with which its clients reach it."""

    host: str
    port: int
    certificates: SandboxCertificates

    @classmethod
    def load(cls, environ: Mapping[str, str]) -> "SandboxAddress | None":
        """Read HEADRACE_SANDBOX_URL, and the certificates if it is set. Raises ValueError."""
        url = environ.get(URL)
        if not url:
            return None
        parts = urlsplit(_check_address(URL, url))
        if not parts.port or not parts.hostname:
            raise _bad(URL, url)
        return cls(parts.hostname, parts.port, SandboxCertificates.load(environ))


def listen_address(url: str) -> str:
    """Return the address of `--listen`, whose port may be 0. Raises ValueError."""
    return _check_address("--listen", url)


def _read_pem(environ: Mapping[str, str], name: str) -> str:
    """The PEM text that a variable holds, or the file that it names. An environment file has one line
    for each variable, so line breaks may be written as \\n."""
    value = environ.get(name, "").strip()
    if not value:
        former = f", and {FORMER_KEY} is not read any more" if environ.get(FORMER_KEY) else ""
        raise ValueError(f"{name} is not set{former}; {MAKE_THEM}")
    if value.startswith(PEM):
        return value.replace("\\n", "\n") + "\n"
    try:
        text = Path(value).read_text(encoding="ascii")
    except (OSError, ValueError):
        text = ""
    if PEM not in text:
        raise ValueError(
            f"{name} holds neither PEM text nor the path of a PEM file that can be read; {MAKE_THEM}"
        )
    return text


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
