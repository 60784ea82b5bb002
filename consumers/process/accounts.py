"""`python -m consumers.process.accounts STORE...`: makes an account for each service of a cluster at a
store, with the rights that the service needs.

It reads the address of the store and the login of its administrator from the settings. Passwords are in
`HEADRACE_DATABASE_ACCOUNTS` and `HEADRACE_S3_ACCOUNTS`. The users of Kafka belong to the configuration
of its brokers, so at Kafka only their rights are made. Passwords and rights of accounts that exist are
changed. Run it again after every upgrade.
"""

import argparse
import asyncio
import os
import sys
from collections.abc import Mapping, Sequence

from consumers.process.command import RELAY
from consumers.registry import CONTROL_ONLY, REGISTRY, load
from infra.operations.maintenance.service_roles import API, make_service_roles
from infra.settings.accounts import DATABASE_ACCOUNTS, S3_ACCOUNTS, load_accounts
from infra.settings.s3 import S3Place
from infra.settings.settings import BadSetting, Settings
from schemas.errors import HeadraceError
from schemas.events import MessageRedriven

DATABASE, KAFKA, S3 = "database", "kafka", "s3"
STORES = (DATABASE, KAFKA, S3)


def consumed_types() -> dict[str, tuple[str, ...]]:
    """The services of a cluster, with the types of the events that each of them consumes."""
    consumed = {name: {event.type for event in load(name).reads} for name in REGISTRY}
    services = {name: types for name, types in consumed.items() if name not in CONTROL_ONLY}
    services |= {API: set().union(*consumed.values()), RELAY: set()}
    return {name: (*sorted(types), MessageRedriven.type) for name, types in services.items()}


async def make_accounts(store: str, environ: Mapping[str, str]) -> None:
    """Make the accounts of all services at one store. Raises ValueError, InvalidConfig and
    TransientError."""
    settings = Settings.load(environ)
    if store == DATABASE:
        await _make_roles(settings, _accounts(environ, DATABASE_ACCOUNTS))
    elif store == KAFKA:
        await _grant_on_kafka(settings)
    else:
        await _make_s3_accounts(settings, environ)


def _accounts(environ: Mapping[str, str], variable: str) -> dict[str, str]:
    accounts = load_accounts(environ, variable)
    if missing := set(consumed_types()) - set(accounts):
        raise BadSetting(
            f"{variable} lacks {', '.join(sorted(missing))}; give it SERVICE=PASSWORD of each service, "
            "with commas between them"
        )
    return accounts


async def _make_roles(settings: Settings, accounts: Mapping[str, str]) -> None:
    if settings.database_url is None:
        raise BadSetting("HEADRACE_DATABASE_URL is not set; name the database as its owner")
    await make_service_roles(settings.database_url, accounts)


async def _grant_on_kafka(settings: Settings) -> None:
    if settings.kafka is None or not settings.kafka.sasl:
        raise BadSetting(
            "HEADRACE_KAFKA names no Kafka with logins; set it, and HEADRACE_KAFKA_SECURITY_PROTOCOL "
            "to SASL_SSL or SASL_PLAINTEXT"
        )
    from infra.spine.bus.kafka.accounts import grant_rights

    await grant_rights(settings.kafka, consumed_types())


async def _make_s3_accounts(settings: Settings, environ: Mapping[str, str]) -> None:
    accounts = _accounts(environ, S3_ACCOUNTS)
    keys = [environ.get(name) for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")]
    if settings.s3_endpoint is None or not settings.blobs.startswith("s3://") or not all(keys):
        raise BadSetting(
            "set HEADRACE_BLOBS, HEADRACE_S3_ENDPOINT, AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY to "
            "the place of the blobs and the keys of the store's administrator"
        )
    from infra.blobs.s3.accounts import make_s3_accounts
    from infra.blobs.s3.client import Keys

    await make_s3_accounts(
        S3Place.parse(settings.blobs),
        endpoint=settings.s3_endpoint,
        admin=Keys(str(keys[0]), str(keys[1])),
        accounts=accounts,
    )


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m consumers.process.accounts")
    parser.add_argument(
        "stores", nargs="+", choices=STORES, metavar="STORE", help=", ".join(STORES)
    )
    try:
        for store in parser.parse_args(argv).stores:
            asyncio.run(make_accounts(store, os.environ))
            sys.stdout.write(f"{store}: each service has its account\n")
    except (HeadraceError, ValueError) as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
