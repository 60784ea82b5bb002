"""What the tests that kill known bugs ask for."""

from tests.unit.trainer.conftest import engine, shelf
from tests.unit.trainer.test_chat import chat

__all__ = ["chat", "engine", "shelf"]
