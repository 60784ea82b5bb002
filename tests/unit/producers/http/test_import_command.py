"""`headrace eval import` against the application over HTTP."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from producers.cli.client import Client, ServerAddress
from producers.cli.commands.evaluations.local_evaluation import find_files, import_results
from producers.cli.errors import Failure
from tests.kit.application import API_KEY, Application, rows
from tests.kit.local_evaluation import RUN, attempt_id, local_evaluation
from tests.unit.producers.http.test_staged_commands import address

__all__ = ["address"]
pytestmark = pytest.mark.postgres

DATA = rows(5)


async def run(address: str, directory: Path, *, replace: bool = False) -> Any:
    """The document that the command prints."""

    def send() -> Any:
        with Client(ServerAddress(address, API_KEY)) as client:
            command: Any = import_results.callback
            body = command.__wrapped__
            shown = body(client, directory, workspace=None, replace=replace, as_json=True)
            return shown._document["import"]

    return await asyncio.to_thread(send)


async def test_a_directory_is_imported_once_and_replaced_on_request(
    app: Application, address: str, tmp_path: Path
) -> None:
    assert (await app.post("/workspaces", {"url": "/repo", "name": "w"})).status_code == 201
    assert (await app.upload("numbers", DATA)).status_code == 200
    local = local_evaluation(DATA.encode())
    directory = local.write(tmp_path)
    first = await run(address, directory)
    assert (first["status"], first["number"]) == ("finalized", 1)
    assert await run(address, directory) == first
    shown = await app.get(f"/evals/{first['eval']}")
    assert shown["imported"]["local_run"]["id"] == RUN
    assert shown["eval"]["reward"] == pytest.approx((1 + 0.25) / 3)
    (directory / "logs.txt").write_text("again")
    with pytest.raises(Failure, match="--replace"):
        await run(address, directory)
    again = await run(address, directory, replace=True)
    assert (again["eval"], again["number"]) == (first["eval"], 2)


def test_a_link_out_of_the_directory_is_refused(tmp_path: Path) -> None:
    directory = local_evaluation(DATA.encode()).write(tmp_path)
    (tmp_path / "secret").write_text("s")
    place = directory / f"rollout_trials/{attempt_id(0, 0)}/artifacts/link"
    place.symlink_to(tmp_path / "secret")
    with pytest.raises(Failure, match="not a link"):
        find_files(directory)
