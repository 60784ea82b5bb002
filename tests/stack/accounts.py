"""The accounts of the services on the stack without Docker, with the rights that docker-compose.yml
gives them. Their passwords are new at every start."""

import asyncio
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from consumers.process.accounts import STORES, consumed_types, make_accounts
from infra.blobs.s3.accounts import access_key_of
from infra.operations.local.supervisor import DEVICE_CONSUMERS
from infra.settings.accounts import DATABASE_ACCOUNTS, S3_ACCOUNTS
from infra.spine.bus.kafka.accounts import user_of
from infra.spine.postgres.migrate import migrate
from infra.spine.postgres.pool import service_role

SERVICES = {"control": "api", "serving": "deploy", **{name: name for name in DEVICE_CONSUMERS}}
"""Child process of `headrace up` -> the service that it is in docker-compose.yml."""


def _fresh_passwords() -> dict[str, str]:
    return {service: secrets.token_hex(16) for service in consumed_types()}


@dataclass(frozen=True)
class Passwords:
    """The passwords of all services at each store."""

    database: Mapping[str, str] = field(default_factory=_fresh_passwords)
    kafka: Mapping[str, str] = field(default_factory=_fresh_passwords)
    s3: Mapping[str, str] = field(default_factory=_fresh_passwords)

    @property
    def kafka_users(self) -> dict[str, str]:
        """The users of the broker, without its own."""
        return {user_of(service): password for service, password in self.kafka.items()}

    def login_of(self, service: str, url: str) -> dict[str, str]:
        """The variables with which a service logs in. `url` is the owner's URL of the database."""
        return {
            "HEADRACE_DATABASE_URL": url_of_service(url, service, self.database[service]),
            "HEADRACE_KAFKA_USERNAME": user_of(service),
            "HEADRACE_KAFKA_PASSWORD": self.kafka[service],
            "AWS_ACCESS_KEY_ID": access_key_of(service),
            "AWS_SECRET_ACCESS_KEY": self.s3[service],
        }


def make_service_accounts(
    environment: Mapping[str, str], passwords: Passwords
) -> dict[str, dict[str, str]]:
    """Make the accounts of all services on the components of `environment`, which names their
    administrators. Returns for each child process the variables with which it logs in."""
    url = environment["HEADRACE_DATABASE_URL"]
    given = {
        **environment,
        DATABASE_ACCOUNTS: _list(passwords.database),
        S3_ACCOUNTS: _list(passwords.s3),
    }
    asyncio.run(migrate(url))
    for store in STORES:
        asyncio.run(make_accounts(store, given))
    return {child: passwords.login_of(service, url) for child, service in SERVICES.items()}


def url_of_service(url: str, service: str, password: str) -> str:
    """The URL with which a service logs in to a database."""
    parts = urlsplit(url)
    user = service_role(parts.path.lstrip("/"), service)
    return f"{parts.scheme}://{user}:{password}@{parts.hostname}:{parts.port}{parts.path}"


def _list(accounts: Mapping[str, str]) -> str:
    return ",".join(f"{service}={password}" for service, password in accounts.items())
