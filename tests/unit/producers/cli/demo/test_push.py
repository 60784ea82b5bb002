"""The push of the demo, and what the server says about it."""

from pathlib import Path
from typing import Any

import pytest

from producers.cli.demo import push
from producers.cli.demo.push import GitServer
from producers.cli.errors import Failure


class SlowServer:
    """A client of a server whose first answers name no delivery."""

    def __init__(self, empty: int) -> None:
        self._empty = empty

    def get(self, path: str, parameters: Any) -> Any:
        del parameters
        assert path.endswith("/deliveries")
        self._empty -= 1
        delivery = {"result": "1 run", "runs": [{"outcome": "submitted"}]}
        return {"deliveries": [] if self._empty >= 0 else [delivery]}


def server(tree: Path, empty: int, monkeypatch: pytest.MonkeyPatch) -> GitServer:
    monkeypatch.setattr(push, "LOOK_EVERY_S", 0.001)
    monkeypatch.setattr(push, "PATIENCE_S", 0.1)
    client: Any = SlowServer(empty)
    return GitServer(client, tree, name="arithmetic")


def test_a_push_is_waited_for_until_its_row_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    delivery = server(tmp_path, 3, monkeypatch).wait_for_run()
    assert delivery["runs"] == [{"outcome": "submitted"}]


def test_a_push_that_never_arrives_ends_the_demo(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(Failure, match="started no run within"):
        server(tmp_path, 10**9, monkeypatch).wait_for_run()
