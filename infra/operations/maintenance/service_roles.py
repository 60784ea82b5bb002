"""A login role for each service of a cluster, with the rights that this service needs.

The service `api` is a member of the role of processes and may do what a process of `headrace up` may.
Every other service shares the tables of the runtime with the rest, reads what the API shows, and reaches
a table of `PRIVATE` only as it says there. No service owns anything, so none can change the schema. The
roles are named after the database, so that installations on one server share none.
"""

from collections.abc import Mapping
from typing import Any

import asyncpg

from infra.spine.postgres.pool import ROLE, administering, service_role
from schemas.errors import InvalidConfig

API = "api"

SHARED = "select, insert, update, delete"

PRIVATE: dict[str, dict[str, str]] = {
    "admitted_runs": {},
    "alert_targets": {},
    "alerts": {},
    "api_keys": {},
    "audit": {},
    "audit_heads": {},
    "browser_sessions": {},
    "chat_grants": {"rollout": "select, delete"},
    "connections": {"sync": "select"},
    "device_logins": {},
    "invitations": {},
    "members": {},
    "organisations": {},
    "people": {},
    "person_accounts": {},
    "workspace_homes": {},
    "evaluation_imports": {},
    "evaluation_import_files": {},
    "upload_parts": {},
    "uploads": {},
    "url_keys": {},
    "dataset_upload_lines": {},
    "inference_usage": {"deploy": "select, insert, update"},
    "quota_use": {},
    "organisation_quotas": {},
    "owner_quotas": {},
    "admitted_amounts": {},
    "run_notes": {},
    "run_shares": {},
    "run_secrets": dict.fromkeys(("rollout", "grade", "regrade"), "select"),
    "secrets": dict.fromkeys(("rollout", "grade", "publish", "regrade"), "select, update"),
    "serving_grants": {"deploy": "select"},
    "sign_in_attempts": {},
    "sign_in_codes": {},
}
"""Tables with credentials, with the names of people, or with what they have used -> the services besides
`api` that need them, and their rights."""

LIMITED = {
    "events": "select, insert",
    "artifacts": "select, insert",
    "migrations": "select",
    "cluster": "select",
    "workspace_quotas": "select",  # a claim compares samples in flight with them
    **dict.fromkeys(
        (
            *("runs", "metric_points", "checkpoints", "graded_groups", "log_lines", "datasets"),
            *("costs", "workspaces", "evaluations", "dead_letters", "deliveries", "pushes"),
            *("triggered_runs", "deployments", "hub_uploads"),
        ),
        "select",
    ),
}
"""Tables that services other than `api` do not rewrite. Only the API projects the log."""

TABLES = "select tablename from pg_tables where schemaname = current_schema() order by tablename"


def rights_of(service: str, table: str) -> str:
    """The rights of a service other than `api` on a table; empty when it has none."""
    if table in PRIVATE:
        return PRIVATE[table].get(service, "")
    return LIMITED.get(table, SHARED)


async def make_service_roles(url: str, accounts: Mapping[str, str]) -> None:
    """Make the roles of these services (name -> password), or give existing ones this password and the
    rights of today's schema. Raises InvalidConfig when the user of the URL may not make roles."""
    async with administering(url) as connection, connection.transaction():
        database = await connection.fetchval("select current_database()")
        tables = [row["tablename"] for row in await connection.fetch(TABLES)]
        try:
            for service, password in accounts.items():
                await _make_role(connection, service_role(database, service), password)
                await connection.execute(_grants(service, service_role(database, service), tables))
        except asyncpg.InsufficientPrivilegeError as error:
            raise InvalidConfig(
                "the user of HEADRACE_DATABASE_URL may not make the roles of the services: "
                f"{error}; name an owner of the database who may create roles"
            ) from error


async def _make_role(connection: Any, role: str, password: str) -> None:
    known = await connection.fetchval(
        "select exists (select from pg_roles where rolname = $1)", role
    )
    verb = "alter" if known else "create"
    await connection.execute(f"{verb} role {_quote(role)} login password '{password}'")


def _grants(service: str, role: str, tables: list[str]) -> str:
    """The statements that give a role its rights and take all others."""
    name = _quote(role)
    if service == API:
        return f"grant {ROLE} to {name}"
    statements = [
        f"grant usage on schema public to {name}",
        f"revoke all on all tables in schema public from {name}",
        *(
            f"grant {rights} on {_quote(table)} to {name}"
            for table in tables
            if (rights := rights_of(service, table))
        ),
    ]
    return ";\n".join(statements)


def _quote(name: str) -> str:
    doubled = name.replace('"', '""')
    return f'"{doubled}"'
