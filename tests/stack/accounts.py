"""The accounts of the services on the stack without Docker, with the rights that docker-compose.yml
gives them. Their passwords are new at every start."""

import asyncio
import secrets
from collections.abc import Mapping
from urllib.parse import urlsplit

from consumers.process.accounts import DATABASE, make_accounts
from infra.local.supervisor import DEVICE_CONSUMERS
from infra.postgres.migrate import migrate
from infra.postgres.pool import service_role
from infra.settings.accounts import DATABASE_ACCOUNTS

SERVICES = {"control": "api", "serving": "deploy", **{name: name for name in DEVICE_CONSUMERS}}
"""Child process of `headrace up` -> the service that it is in docker-compose.yml."""


def make_service_accounts(environment: Mapping[str, str]) -> dict[str, dict[str, str]]:
    """Make the accounts of all services on the components of `environment`, which names their
    administrators. Returns for each child process the variables with which it logs in."""
    passwords = {service: secrets.token_hex(16) for service in SERVICES.values()}
    listed = ",".join(f"{service}={password}" for service, password in passwords.items())
    url = environment["HEADRACE_DATABASE_URL"]
    asyncio.run(migrate(url))
    asyncio.run(make_accounts(DATABASE, {**environment, DATABASE_ACCOUNTS: listed}))
    return {
        child: {"HEADRACE_DATABASE_URL": url_of_service(url, service, passwords[service])}
        for child, service in SERVICES.items()
    }


def url_of_service(url: str, service: str, password: str) -> str:
    """The URL with which a service logs in to a database."""
    parts = urlsplit(url)
    user = service_role(parts.path.lstrip("/"), service)
    return f"{parts.scheme}://{user}:{password}@{parts.hostname}:{parts.port}{parts.path}"
