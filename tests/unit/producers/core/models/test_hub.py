"""A hub id is checked at submit: a misspelt name, or a hub that does not answer, is reported in
full before the run starts."""

import asyncio
import json
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from producers.core.models import hub as module
from producers.core.models.hub import ANSWER_S, hub_config
from schemas.errors import InvalidConfig
from tests.kit.hub import QWEN3_06B, hub


@pytest.fixture(autouse=True)
def nothing_cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_TOKEN", "HF_HUB_CACHE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    with hub(Qwen__Qwen3=QWEN3_06B) as url:
        monkeypatch.setenv("HF_ENDPOINT", url)
        yield url


async def refused(name: str) -> str:
    """The error for this model id, which must come within the time that a submit may take."""
    async with asyncio.timeout(30):
        with pytest.raises(InvalidConfig) as caught:
            await hub_config(name)
    return caught.value.message


async def test_a_model_that_the_hub_has_is_described(served: str) -> None:
    assert await hub_config("Qwen/Qwen3") == QWEN3_06B


async def test_a_misspelt_name_is_told_with_what_to_do(served: str) -> None:
    said = await refused("Qwen/Qwne3")
    assert f"{served} has no model Qwen/Qwne3, or it is private (set HF_TOKEN)" in said
    assert "check the spelling" in said


async def test_a_gated_model_and_a_broken_hub_are_told_as_such(served: str) -> None:
    gated = await refused("org/gated")
    assert "is gated" in gated
    assert "HF_TOKEN" in gated
    assert f"{served} answered 503" in await refused("org/broken")


async def test_a_closed_port_is_told_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        url = f"http://127.0.0.1:{closed.getsockname()[1]}"
    monkeypatch.setenv("HF_ENDPOINT", url)
    said = await refused("Qwen/Qwen3")
    assert f"{url} cannot be reached" in said
    assert "HF_ENDPOINT" in said
    assert "absolute path" in said


async def test_a_hub_that_never_answers_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ANSWER_S < 5
    monkeypatch.setattr(module, "ANSWER_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{silent.getsockname()[1]}")
        assert "did not answer within 0.2 s" in await refused("Qwen/Qwen3")


async def test_offline_only_the_cache_is_looked_into(
    served: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    said = await refused("Qwen/Qwen3")
    assert "HF_HUB_OFFLINE" in said
    assert str(tmp_path / "hf" / "hub") in said
    place = tmp_path / "hf" / "hub" / "models--Qwen--Qwen3"
    (place / "refs").mkdir(parents=True)
    (place / "refs" / "main").write_text("abc")
    (place / "snapshots" / "abc").mkdir(parents=True)
    (place / "snapshots" / "abc" / "config.json").write_text(json.dumps({"vocab_size": 8}))
    assert await hub_config("Qwen/Qwen3") == {"vocab_size": 8}
