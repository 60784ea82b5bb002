"""Fixtures that several folders use."""

from hypothesis import settings

from tests.kit.kafka import kafka, kafka_address, kafka_node
from tests.kit.postgres import database, database_url, postgres_url

__all__ = ["database", "database_url", "kafka", "kafka_address", "kafka_node", "postgres_url"]

# How long an example takes says more about the machine than about the law.
settings.register_profile("headrace", deadline=None)
settings.load_profile("headrace")
