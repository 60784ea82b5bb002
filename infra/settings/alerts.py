"""Settings of alerts: where they are sent, and when a run counts as stalled."""

import base64
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from ipaddress import ip_address
from urllib.parse import unquote, urlsplit

from infra.settings.git import HOST, AllowedAddresses

WEBHOOK, MAIL, SENDER = "HEADRACE_ALERT_WEBHOOK", "HEADRACE_ALERT_MAIL", "HEADRACE_ALERT_FROM"
SMTP, STALLED, ALLOW = "HEADRACE_SMTP_URL", "HEADRACE_ALERT_STALLED_MIN", "HEADRACE_ALERT_ALLOW"
MAIL_CHANNEL = "mail:"
PORTS = {"smtp": 587, "smtps": 465}
ADDRESS = re.compile(r"[^\s@<>,]{1,64}@[^\s@<>,]{1,190}")
CLASSES = ("loopback", "private")
ALERT_KINDS = ("ended", "failed", "collapsed", "stalled")
"""The kinds of alerts."""
MOST_MINUTES = 7 * 24 * 60
LONGEST_URL = 2000
SECRET, PREFIX, LEAST_KEY = "HEADRACE_ALERT_SECRET", "whsec_", 24


class BadAlertSetting(ValueError):
    """A variable holds a value that it may not hold. `may` says what it may hold, never its value, which
    can be a secret."""

    def __init__(self, name: str, may: str) -> None:
        super().__init__(f"{name} must be {may}")
        self.name, self.may = name, may


@dataclass(frozen=True, slots=True)
class MailServer:
    """A server that takes mail. With a user it gets the password, over TLS only."""

    host: str
    port: int
    is_tls: bool
    user: str | None = None
    password: str | None = field(default=None, repr=False)


@dataclass(frozen=True, slots=True)
class AlertSettings:
    """Where alerts go. `secret` signs what the webhook gets. A run without progress for
    `stalled_min` minutes is stalled; 0 for never."""

    webhook: str | None = field(default=None, repr=False)
    secret: str | None = field(default=None, repr=False)
    mail_to: tuple[str, ...] = ()
    mail_from: str = ""
    server: MailServer | None = None
    stalled_min: int = 30
    allowed: AllowedAddresses = field(default_factory=AllowedAddresses)

    @property
    def channels(self) -> tuple[str, ...]:
        """The names of the channels that are set. Each mail address is one, because a mail server may
        refuse some of them."""
        webhook = () if self.webhook is None else ("webhook",)
        return (*webhook, *(MAIL_CHANNEL + address for address in self.mail_to))

    @classmethod
    def load(cls, environ: Mapping[str, str]) -> "AlertSettings":
        """Read the environment. Raises BadAlertSetting."""
        mail_to = tuple(filter(None, map(str.strip, environ.get(MAIL, "").split(","))))
        if not all(map(ADDRESS.fullmatch, mail_to)):
            raise BadAlertSetting(
                MAIL, "addresses such as ada@example.org, with commas between them"
            )
        server = _server(environ.get(SMTP, ""))
        if mail_to and server is None:
            raise BadAlertSetting(
                SMTP, f"set when {MAIL} is, such as smtp://user:password@host:587"
            )
        sender = environ.get(SENDER) or (f"headrace@{server.host}" if server else "")
        if sender and not ADDRESS.fullmatch(sender):
            raise BadAlertSetting(SENDER, "an address such as headrace@example.org")
        minutes = environ.get(STALLED) or "30"
        is_number = minutes.isascii() and minutes.isdigit() and len(minutes) < 6
        if not is_number or int(minutes) > MOST_MINUTES:
            raise BadAlertSetting(STALLED, f"a whole number from 0 to {MOST_MINUTES}")
        return cls(
            webhook=_webhook(environ.get(WEBHOOK, "")),
            secret=_secret(environ.get(SECRET, "")),
            mail_to=mail_to,
            mail_from=sender,
            server=server,
            stalled_min=int(minutes),
            allowed=_allowed_addresses(environ.get(ALLOW, "")),
        )


def is_webhook(url: str) -> bool:
    """Whether a text is the address of a webhook. It has no user and no password."""
    try:
        parts = urlsplit(url)
        is_good = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False
    is_short = len(url) <= LONGEST_URL
    return is_good and is_short and url.isprintable() and " " not in url and "@" not in parts.netloc


def _webhook(url: str) -> str | None:
    if url and not is_webhook(url):
        raise BadAlertSetting(WEBHOOK, "an address such as https://hooks.example.org/x")
    return url or None


def _secret(text: str) -> str | None:
    try:
        is_good = len(base64.b64decode(text.removeprefix(PREFIX), validate=True)) >= LEAST_KEY
    except ValueError:
        is_good = False
    if text and not (is_good and text.startswith(PREFIX)):
        raise BadAlertSetting(SECRET, f"{PREFIX} and at least {LEAST_KEY} bytes in base64")
    return text or None


def _server(url: str) -> MailServer | None:
    if not url:
        return None
    may = "such as smtp://user:password@mail.example.org:587, or smtps:// for TLS from the start"
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        raise BadAlertSetting(SMTP, may) from None
    host = parts.hostname or ""
    if parts.scheme not in PORTS or not (HOST.fullmatch(host) or _is_ip_address(host)):
        raise BadAlertSetting(SMTP, may)
    return MailServer(
        host=host,
        port=port or PORTS[parts.scheme],
        is_tls=parts.scheme == "smtps",
        user=unquote(parts.username) if parts.username else None,
        password=unquote(parts.password) if parts.password else None,
    )


def _is_ip_address(host: str) -> bool:
    try:
        ip_address(host)
    except ValueError:
        return False
    return True


def _allowed_addresses(value: str) -> AllowedAddresses:
    words = frozenset(filter(None, map(str.strip, value.split(","))))
    hosts = words - set(CLASSES)
    if not all(map(HOST.fullmatch, hosts)):
        raise BadAlertSetting(ALLOW, "`loopback`, `private` and names of hosts, with commas")
    return AllowedAddresses(loopback="loopback" in words, private="private" in words, hosts=hosts)
