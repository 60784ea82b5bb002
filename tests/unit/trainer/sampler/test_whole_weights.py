"""How the weights of a server are replaced: the order of the steps, the labels, and the lock."""

import fcntl
import shutil
from pathlib import Path
from unittest.mock import AsyncMock, call

import httpx
import pytest

from schemas.errors import Refused, StoreAway
from trainer.sampler.vllm.client import VllmServer
from trainer.sampler.vllm.weight_turns import BASE
from trainer.sampler.vllm.whole_weights import (
    OtherWeights,
    WeightsFolder,
    replace_weights,
    weights_of,
)

URLS = ("http://a:1", "http://b:2")


class LabelledServer(AsyncMock):
    """A server that keeps the label that it is given. With `restarts` it is restarted before it loads
    weights, which nobody notices."""

    label = "default"
    restarts = False

    async def weight_label(self) -> str:
        return self.label

    async def set_weight_label(self, label: str) -> None:
        self.label = "default" if self.restarts else label
        self.restarts = False
        await self.labelled(label)


async def test_the_prefix_cache_is_dropped_once_the_new_weights_are_there() -> None:
    """The label changes before the weights do, and it is another one each time."""
    server = LabelledServer()
    labels = [await replace_weights(server, "/weights") for _ in range(2)]
    assert len(set(labels)) == 2
    assert server.mock_calls == [
        step
        for label in labels
        for step in (
            call.labelled(label),
            call.reload_weights("/weights"),
            call.reset_prefix_cache(),
        )
    ]
    assert [weights_of(label) for label in labels] == [None, None], "nobody has checked them"


async def test_weights_do_not_have_the_label_of_a_server_that_was_restarted_meanwhile() -> None:
    """It says `default`, as if it had its own weights, and has the new ones."""
    server = LabelledServer()
    server.restarts = True
    with pytest.raises(OtherWeights, match="replaced meanwhile"):
        await replace_weights(server, "/weights")
    server.reload_weights.assert_awaited_once()
    assert weights_of(server.label) is None


@pytest.mark.parametrize(("status", "label"), [(404, None), (401, None), (403, None), (200, "x.1")])
async def test_a_proxy_that_knows_only_the_api_of_models_does_not_end_lora_runs(
    status: int, label: str | None
) -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        return httpx.Response(status, json={"weight_version": "x.1"})

    server = VllmServer("http://server")
    await server.aclose()
    server._http = httpx.AsyncClient(
        base_url="http://server", transport=httpx.MockTransport(answer)
    )
    assert await server.weight_label() == label
    await server.aclose()


@pytest.mark.parametrize(
    ("label", "weights"),
    [
        ("default", BASE),
        ("headrace-base.1f", BASE),
        ("headrace-abc.1f", "abc"),
        ("headrace-abc", None),
        ("unchecked.1f", None),
        ("step-5", None),
        ("step-5.1", None),
    ],
)
def test_a_label_names_weights_that_we_checked(label: str, weights: str | None) -> None:
    assert weights_of(label) == weights


def test_one_process_replaces_the_weights_of_the_same_servers(tmp_path: Path) -> None:
    """Whatever their order, and which others it has. A killed process leaves weights behind, which the
    next one overwrites."""
    one, same = WeightsFolder(tmp_path, URLS), WeightsFolder(tmp_path, URLS[::-1])
    other, third = WeightsFolder(tmp_path, URLS[:1]), WeightsFolder(tmp_path, ("http://c:3",))
    assert one.lock()
    assert one.lock(), "it has it already"
    for shared in (same, other, WeightsFolder(tmp_path, ("http://c:3", *URLS))):
        assert not shared.lock()
        assert not shared.is_locked
    assert third.lock()
    first = one.write("abc", b"123")
    assert (first / "model.safetensors").read_bytes() == b"123"
    assert one.write("def", b"45") != first
    assert not first.exists()
    one.unlock()
    assert other.lock()
    assert not same.lock(), "it needs both"
    other.unlock()
    assert same.lock()
    assert [path.name for path in tmp_path.rglob("*.safetensors")] == []


def test_a_directory_that_somebody_removed_is_locked_and_written_again(tmp_path: Path) -> None:
    """Its lock keeps nobody out any more, so who was first has it."""
    one, same = WeightsFolder(tmp_path / "x", URLS), WeightsFolder(tmp_path / "x", URLS)
    assert one.lock()
    shutil.rmtree(tmp_path / "x")
    one.clear()
    assert (one.write("abc", b"123") / "model.safetensors").read_bytes() == b"123"
    assert same.lock()
    assert not one.lock()
    assert not one.is_locked
    same.unlock()
    assert one.lock()


def test_a_disk_that_is_full_is_named_and_gets_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A part of a version would keep it full."""
    folder = WeightsFolder(tmp_path, URLS)
    assert folder.lock()

    def write_some(path: Path, data: bytes) -> None:
        path.touch()
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(Path, "write_bytes", write_some)
        with pytest.raises(StoreAway, match=r"No space left .* set HEADRACE_VLLM_ADAPTERS to ano"):
            folder.write("abc", b"123")
    assert not list(tmp_path.rglob("*.safetensors"))
    (tmp_path / "file").touch()
    with pytest.raises(StoreAway, match="Not a directory"):
        WeightsFolder(tmp_path / "file", URLS).lock()


def test_a_directory_without_locks_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(descriptor: int, operation: int) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(
        Refused, match="HEADRACE_VLLM_ADAPTERS to a directory whose file system has"
    ):
        WeightsFolder(tmp_path, URLS).lock()
