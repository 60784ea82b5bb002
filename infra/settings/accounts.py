"""The accounts of the services of a cluster: `HEADRACE_DATABASE_ACCOUNTS` and `HEADRACE_S3_ACCOUNTS`.

Only `python -m consumers.process.accounts` reads them. A service knows its own account and no other.
"""

import re
from collections.abc import Mapping

DATABASE_ACCOUNTS = "HEADRACE_DATABASE_ACCOUNTS"
S3_ACCOUNTS = "HEADRACE_S3_ACCOUNTS"
SERVICE = re.compile(r"[a-z][a-z0-9]{0,30}")
PASSWORD = re.compile(r"[A-Za-z0-9]{16,128}")


def load_accounts(environ: Mapping[str, str], name: str) -> dict[str, str]:
    """Read a variable like `api=PASSWORD,run=PASSWORD`: service -> password. Empty without the
    variable. Raises ValueError with the line to print, which never shows a password."""
    accounts: dict[str, str] = {}
    for entry in filter(None, environ.get(name, "").split(",")):
        service, _, password = entry.strip().partition("=")
        if not SERVICE.fullmatch(service) or not PASSWORD.fullmatch(password):
            raise ValueError(
                f"entry {len(accounts) + 1} of {name} is not SERVICE=PASSWORD; a service is named by "
                "lower-case letters, and a password has 16 to 128 letters and digits"
            )
        accounts[service] = password
    return accounts
