"""The channels of alerts: a webhook and mail. An error names the host and never an address or a
password, because the path of a webhook is often its secret."""

import asyncio
import hashlib
import json
import smtplib
import ssl
from collections.abc import Mapping
from email.message import EmailMessage
from typing import Any
from urllib.parse import urlsplit

import httpx

from infra.http.checked_addresses import CheckedDialling
from infra.http.dialling import CheckedTransport, no_cookies
from infra.settings.alerts import AlertSettings, MailServer
from schemas.errors import HeadraceError, TransientError

ADVICE = "use a public address, or let the operator allow it with HEADRACE_ALERT_ALLOW"
TIMEOUT_S = 15.0
LONGEST_SUBJECT = 200


class AlertAway(TransientError):
    """A channel did not take an alert. It is tried again."""


class AlertChannels:
    """Sends alerts through the channels of the settings."""

    def __init__(self, settings: AlertSettings) -> None:
        self._settings = settings
        self._client: httpx.AsyncClient | None = None

    async def send(self, channel: str, identity: str, content: str) -> None:
        """Send an alert (a JSON object) through a channel. The same `identity` means the same alert, so
        a receiver can leave out repetitions. Raises AlertAway."""
        if channel == "webhook":
            await self._post(identity, content)
        else:
            await asyncio.to_thread(self._mail, identity, json.loads(content))

    async def aclose(self) -> None:
        """Close the connections. Whoever sends later opens new ones."""
        client, self._client = self._client, None
        if client is not None:
            await client.aclose()

    async def _post(self, identity: str, content: str) -> None:
        url = self._settings.webhook or ""
        host = urlsplit(url).hostname
        headers = {"Content-Type": "application/json", "Idempotency-Key": _key(identity)}
        try:
            async with (
                asyncio.timeout(TIMEOUT_S),
                self._http().stream(
                    "POST", url, content=content.encode(), headers=headers
                ) as answer,
            ):
                status = answer.status_code
        except HeadraceError as error:
            raise AlertAway(f"the webhook of {host}: {error}") from error
        except (httpx.HTTPError, httpx.InvalidURL, TimeoutError, OSError) as error:
            raise AlertAway(f"the webhook of {host} does not answer: {_kind(error)}") from None
        if not 200 <= status < 300:
            raise AlertAway(f"the webhook of {host} answered {status}; it must answer 2xx")

    def _http(self) -> httpx.AsyncClient:
        """The HTTP client. It follows no redirect, because a server could lead it to another host."""
        if self._client is None:
            dialling = CheckedDialling(self._settings.allowed, advice=ADVICE)
            tls, limits = httpx.create_ssl_context(), httpx.Limits(max_connections=4)
            self._client = httpx.AsyncClient(
                timeout=TIMEOUT_S,
                transport=CheckedTransport(dialling, tls=tls, limits=limits),
                cookies=no_cookies(),
            )
        return self._client

    def _mail(self, identity: str, alert: Mapping[str, Any]) -> None:
        server = self._settings.server
        if server is None:
            raise AlertAway("no mail server is set; set HEADRACE_SMTP_URL")
        message = mail_of(identity, alert, self._settings)
        try:
            _deliver(server, message)
        except smtplib.SMTPResponseException as error:
            raise AlertAway(f"the mail server {server.host} answered {error.smtp_code}") from None
        except (smtplib.SMTPException, OSError, ValueError) as error:
            raise AlertAway(f"the mail server {server.host} fails: {_kind(error)}") from None


def mail_of(identity: str, alert: Mapping[str, Any], settings: AlertSettings) -> EmailMessage:
    """The mail of an alert. Its names are text of users, so they are made printable and short."""
    message = EmailMessage()
    message["Subject"] = _one_line(f"Headrace: {alert['text']}")[:LONGEST_SUBJECT]
    message["From"] = settings.mail_from
    message["To"] = ", ".join(settings.mail_to)
    message["Message-ID"] = f"<{_key(identity)}@headrace>"
    lines = (
        f"{name}: {_one_line(str(value))}" for name, value in alert.items() if value is not None
    )
    message.set_content("\n".join(lines))
    return message


def _deliver(server: MailServer, message: EmailMessage) -> None:
    tls = ssl.create_default_context()
    if server.is_tls:
        opened: smtplib.SMTP = smtplib.SMTP_SSL(
            server.host, server.port, timeout=TIMEOUT_S, context=tls
        )
    else:
        opened = smtplib.SMTP(server.host, server.port, timeout=TIMEOUT_S)
    with opened as smtp:
        smtp.ehlo()
        if not server.is_tls and (server.user or smtp.has_extn("starttls")):
            smtp.starttls(context=tls)  # fails without TLS, so a password is never sent in clear
        if server.user:
            smtp.login(server.user, server.password or "")
        smtp.send_message(message)


def _one_line(text: str) -> str:
    return "".join(c if c.isprintable() else " " for c in text)


def _key(identity: str) -> str:
    return hashlib.sha256(identity.encode("utf-8", "replace")).hexdigest()[:32]


def _kind(error: Exception) -> str:
    return type(error).__name__
