"""Texts in the form in which they are shown."""

import pytest

from schemas.text import model_name


@pytest.mark.parametrize(
    ("model", "shown"),
    [
        ("/models/llm/SmolLM2-135M.Q4_1.gguf", "SmolLM2-135M.Q4_1.gguf"),
        ("/models/tiny/", "tiny"),
        ("Qwen/Qwen3-0.6B", "Qwen/Qwen3-0.6B"),
        ("scratch:qwen3-tiny", "scratch:qwen3-tiny"),
        ("", ""),
    ],
)
def test_a_model_with_a_path_is_shown_by_its_last_part(model: str, shown: str) -> None:
    assert model_name(model) == shown
