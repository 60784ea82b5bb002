"""Fixtures of the tests that kill known bugs."""

from tests.unit.trainer.conftest import engine, shelf
from tests.unit.trainer.forward.test_architectures import tokenizer, wide
from tests.unit.trainer.model.test_chat_template import chat

__all__ = ["chat", "engine", "shelf", "tokenizer", "wide"]
