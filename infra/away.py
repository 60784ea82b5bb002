"""Which errors mean that the database does not answer now: the API says 503, never wrong data."""

import asyncpg

AWAY: tuple[type[Exception], ...] = (
    OSError,
    asyncpg.InterfaceError,
    asyncpg.PostgresConnectionError,
    asyncpg.OperatorInterventionError,
    asyncpg.InsufficientResourcesError,
)
