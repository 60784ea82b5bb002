"""`python -m consumers.process.accounts STORE`: makes an account for each service of a cluster at a
store, with the rights that the service needs.

It reads the address of the store from the settings, and the accounts from `HEADRACE_DATABASE_ACCOUNTS`.
It logs in as an administrator of the store, and changes the passwords and rights of accounts that exist.
Run it again after every upgrade.
"""

import argparse
import asyncio
import os
import sys
from collections.abc import Mapping, Sequence

from infra.maintenance.service_roles import make_service_roles
from infra.settings.accounts import DATABASE_ACCOUNTS, load_accounts
from infra.settings.settings import BadSetting, Settings
from schemas.errors import HeadraceError

DATABASE = "database"
VARIABLES = {DATABASE: DATABASE_ACCOUNTS}


async def make_accounts(store: str, environ: Mapping[str, str]) -> tuple[str, ...]:
    """Make the accounts at one store. Returns the services that have one now. Raises ValueError,
    InvalidConfig and TransientError."""
    settings = Settings.load(environ)
    accounts = load_accounts(environ, VARIABLES[store])
    if not accounts:
        raise BadSetting(f"{VARIABLES[store]} is not set; give it api=PASSWORD,run=PASSWORD,...")
    if settings.database_url is None:
        raise BadSetting("HEADRACE_DATABASE_URL is not set; name the database as its owner")
    await make_service_roles(settings.database_url, accounts)
    return tuple(accounts)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m consumers.process.accounts")
    parser.add_argument("store", choices=list(VARIABLES))
    store = parser.parse_args(argv).store
    try:
        services = asyncio.run(make_accounts(store, os.environ))
    except (HeadraceError, ValueError) as error:
        sys.stderr.write(f"{error}\n")
        return 1
    sys.stdout.write(f"{store}: accounts for {', '.join(services)}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
