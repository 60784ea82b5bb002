"""The channels of alerts: webhooks and mail, of the operator and of workspaces. An error names the host
and never an address or a password, because the path of a webhook is often its secret."""

import asyncio
import base64
import hashlib
import hmac
import json
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from email.message import EmailMessage
from email.utils import format_datetime
from typing import Any
from urllib.parse import urlsplit

import aiosmtplib
import httpx

from infra.http.checked_addresses import CheckedDialling
from infra.http.checked_client import CheckedTransport, no_cookies
from infra.operations.maintenance.alert_targets import ADVICE as TARGET_ADVICE
from infra.operations.maintenance.alert_targets import AlertTargets
from infra.settings.alerts import MAIL_CHANNEL, PREFIX, AlertSettings, MailServer
from infra.settings.git import AllowedAddresses
from schemas.errors import HeadraceError, TransientError

ADVICE = "use a public address, or let the operator allow it with HEADRACE_ALERT_ALLOW"
TIMEOUT_S = 15.0
LONGEST_SUBJECT = 200

AT_ONCE = 32
"""How many channels are served at the same time."""


class AlertAway(TransientError):
    """A channel did not take an alert. It is tried again."""


def sign(secret: str, identity: str, at: int, body: bytes) -> Mapping[str, str]:
    """The headers that let a receiver verify an alert, by the convention of Standard Webhooks."""
    key = base64.b64decode(secret.removeprefix(PREFIX))
    signed = f"{identity}.{at}.".encode() + body
    digest = base64.b64encode(hmac.digest(key, signed, "sha256")).decode()
    return {
        "webhook-id": identity,
        "webhook-timestamp": str(at),
        "webhook-signature": f"v1,{digest}",
    }


class AlertChannels:
    """Sends alerts through the channels of the settings, and to the targets of workspaces. What the
    operator allows for the own webhook is not allowed for those of workspaces: they obey the rules for
    repositories (`allowed`)."""

    def __init__(
        self, settings: AlertSettings, targets: AlertTargets, *, allowed: AllowedAddresses
    ) -> None:
        self._settings = settings
        self._targets = targets
        self._allowed = {"webhook": (settings.allowed, ADVICE), "target": (allowed, TARGET_ADVICE)}
        self._clients: dict[str, httpx.AsyncClient] = {}

    async def send(self, channel: str, identity: str, content: str) -> None:
        """Send an alert (a JSON object) through a channel. The same `identity` means the same alert, so
        a receiver can leave out repetitions. Raises AlertAway."""
        settings = self._settings
        if channel == "webhook":
            await self._post("webhook", settings.webhook or "", settings.secret, identity, content)
        elif channel.startswith(MAIL_CHANNEL):
            await self._mail(identity, content, channel.removeprefix(MAIL_CHANNEL))
        else:
            await self._send_to_target(channel, identity, content)

    async def aclose(self) -> None:
        """Close the connections. Whoever sends later opens new ones."""
        clients, self._clients = self._clients, {}
        for client in clients.values():
            await client.aclose()

    async def _send_to_target(self, target: str, identity: str, content: str) -> None:
        try:
            found = await self._targets.open(target)
        except HeadraceError as error:
            raise AlertAway(f"the target {target} does not open: {error}") from error
        if found is None:
            return
        if found.medium == "webhook":
            await self._post("target", found.address, found.secret, identity, content)
        else:
            await self._mail(identity, content, found.address)

    async def _post(
        self, whose: str, url: str, secret: str | None, identity: str, content: str
    ) -> None:
        host, key, body = urlsplit(url).hostname, _key(identity), content.encode()
        headers = {"Content-Type": "application/json", "Idempotency-Key": key}
        if secret is not None:
            headers |= sign(secret, key, int(time.time()), body)
        try:
            async with (
                asyncio.timeout(TIMEOUT_S),
                self._http(whose).stream("POST", url, content=body, headers=headers) as answer,
            ):
                status = answer.status_code
        except HeadraceError as error:
            raise AlertAway(f"the webhook of {host}: {error}") from error
        except (httpx.HTTPError, httpx.InvalidURL, TimeoutError, OSError) as error:
            raise AlertAway(f"the webhook of {host} does not answer: {_kind(error)}") from None
        if not 200 <= status < 300:
            raise AlertAway(f"the webhook of {host} answered {status}; it must answer 2xx")

    def _http(self, whose: str) -> httpx.AsyncClient:
        """The HTTP client. It follows no redirect, because a server could lead it to another host."""
        if whose not in self._clients:
            allowed, advice = self._allowed[whose]
            dialling = CheckedDialling(allowed, advice=advice)
            tls, limits = httpx.create_ssl_context(), httpx.Limits(max_connections=32)
            self._clients[whose] = httpx.AsyncClient(
                timeout=TIMEOUT_S,
                transport=CheckedTransport(dialling, tls=tls, limits=limits),
                cookies=no_cookies(),
            )
        return self._clients[whose]

    async def _mail(self, identity: str, content: str, to: str) -> None:
        server = self._settings.server
        if server is None:
            raise AlertAway("no mail server is set; set HEADRACE_SMTP_URL")
        try:
            message = mail_of(identity, json.loads(content), self._settings.mail_from, to)
            message["Date"] = format_datetime(datetime.now(UTC))
            await _deliver(server, message)
        except aiosmtplib.SMTPRecipientsRefused as error:
            raise AlertAway(
                f"the mail server {server.host} answered {error.recipients[0].code}"
            ) from None
        except aiosmtplib.SMTPResponseException as error:
            raise AlertAway(f"the mail server {server.host} answered {error.code}") from None
        except (aiosmtplib.SMTPException, OSError, ValueError) as error:
            cause = error.__cause__ if isinstance(error.__cause__, OSError) else error
            raise AlertAway(f"the mail server {server.host} fails: {_kind(cause)}") from None


def mail_of(identity: str, alert: Mapping[str, Any], sender: str, to: str) -> EmailMessage:
    """The mail of an alert. Its names are text of users, so they are made printable and short."""
    message = EmailMessage()
    message["Subject"] = _one_line(f"Headrace: {alert['text']}")[:LONGEST_SUBJECT]
    message["From"] = sender
    message["To"] = to
    message["Message-ID"] = f"<{_key(identity)}@headrace>"
    lines = (
        f"{name}: {_one_line(str(value))}" for name, value in alert.items() if value is not None
    )
    message.set_content("\n".join(lines))
    return message


async def _deliver(server: MailServer, message: EmailMessage) -> None:
    """Hand a mail over. A password is sent over TLS only: the server must offer it then."""
    async with asyncio.timeout(TIMEOUT_S):
        await aiosmtplib.send(
            message,
            hostname=server.host,
            port=server.port,
            username=server.user,
            password=server.password,
            use_tls=server.is_tls,
            start_tls=False if server.is_tls else True if server.user else None,
            timeout=TIMEOUT_S,
        )


def _one_line(text: str) -> str:
    return "".join(c if c.isprintable() else " " for c in text)


def _key(identity: str) -> str:
    return hashlib.sha256(identity.encode("utf-8", "replace")).hexdigest()[:32]


def _kind(error: Exception) -> str:
    return type(error).__name__
