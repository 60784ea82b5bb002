"""Fixtures that several folders use."""

from hypothesis import settings

from tests.kit.postgres import database, database_url, postgres_url
from tests.kit.s3 import bucket, s3, s3_client

__all__ = ["bucket", "database", "database_url", "postgres_url", "s3", "s3_client"]

# How long an example takes says more about the machine than about the law.
settings.register_profile("headrace", deadline=None)
settings.load_profile("headrace")
