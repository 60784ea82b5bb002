"""Fixtures that several folders use."""

from tests.kit.postgres import database, database_url, postgres_url

__all__ = ["database", "database_url", "postgres_url"]
