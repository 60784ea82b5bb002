"""The generations of the protocol, and how a server shows which one it speaks."""

import json
import re
from typing import Any, Literal

from headrace.servers.callbacks import ReportingRollouts
from headrace.servers.leases import LeasedRollouts
from headrace.servers.loopback import Loopback, ServerAway

Dialect = Literal["leases", "single reports", "reports"]

SCHEMA_S = 20.0
_RESULT = re.compile(r"/rollout/\{[^/]+\}/result")
_STATUS = re.compile(r"/rollout/\{[^/]+\}/status")


class UnknownDialect(Exception):
    """The server speaks no generation that is supported; the message says what to do."""


async def find_dialect(server: Loopback) -> Dialect:
    """Return the dialect of a server. One that publishes no schema is taken for the current generation.
    Raises UnknownDialect, and ServerAway when the server does not answer."""
    reply = await server.request("GET", "/openapi.json", timeout_s=SCHEMA_S)
    try:
        schema: Any = json.loads(reply.body) if reply.status == 200 else None
        paths = [str(path) for path in schema["paths"]]
    except (ValueError, KeyError, TypeError, RecursionError):
        return "leases"
    return dialect_of(paths)


def dialect_of(paths: list[str]) -> Dialect:
    """Return the dialect of a server with these paths. Raises UnknownDialect."""
    if any(_RESULT.fullmatch(path) for path in paths):
        return "leases"
    if any(_STATUS.fullmatch(path) for path in paths):
        return "single reports"
    if "/rollout" in paths:
        return "reports"
    if "/v1/rollout/init" in paths:
        raise UnknownDialect(
            "the server speaks generation 0 of the rollout protocol, which is not supported; use "
            "osmosis-ai 0.2.18 or later"
        )
    raise UnknownDialect(
        f"the server has no path /rollout, only {', '.join(paths[:10])[:500] or 'none'}; serve the app "
        "of create_rollout_server"
    )


def rollouts_of(server: Loopback, dialect: Dialect) -> LeasedRollouts | ReportingRollouts:
    """Return what makes attempts with a server of this dialect."""
    if dialect == "leases":
        return LeasedRollouts(server)
    return ReportingRollouts(server, is_single=dialect == "single reports")


async def capacity_of(server: Loopback) -> int | None:
    """Return how many rollouts a server makes at the same time, or None if it names no number. Raises
    ServerAway."""
    reply = await server.request("GET", "/health", timeout_s=SCHEMA_S)
    if reply.status != 200:
        raise ServerAway(f"GET /health answers {reply.status}: {reply.excerpt()}")
    try:
        most = json.loads(reply.body)["concurrency"]["max_concurrent"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    return most if type(most) is int and most > 0 else None
