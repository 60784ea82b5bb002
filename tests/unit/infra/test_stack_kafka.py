"""Kafka without Docker: the settings that it starts with."""

from uuid import UUID

import pytest

from tests.stack import kafka
from tests.stack.kafka import new_cluster_id


def test_a_cluster_s_id_is_no_option_of_a_command(monkeypatch: pytest.MonkeyPatch) -> None:
    for first in range(256):
        made = UUID(bytes=bytes([first, *range(15)]))
        monkeypatch.setattr(kafka, "uuid4", lambda made=made: made)
        found = new_cluster_id()
        assert len(found) == 22
        assert not found.startswith("-"), first
