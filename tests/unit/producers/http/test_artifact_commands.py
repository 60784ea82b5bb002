"""`headrace artifact` against the application over HTTP."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from infra.http.limits import ConnectionLimits
from infra.http.server import HttpServer
from producers.cli.main import cli
from tests.kit.application import API_KEY, Application
from tests.kit.artifacts import TASK

pytestmark = pytest.mark.postgres

Headrace = Callable[..., Any]


@pytest.fixture
async def headrace(app: Application, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Headrace]:
    """Runs a command with --json against a server of the application. Returns what it printed."""
    server = HttpServer(app.app, host="127.0.0.1", port=0, limits=ConnectionLimits())
    await server.listen()
    serving = asyncio.ensure_future(server.serve())
    monkeypatch.setenv("HEADRACE_URL", f"http://127.0.0.1:{server.port}")
    monkeypatch.setenv("HEADRACE_API_KEY", API_KEY)

    async def run(*arguments: str) -> Any:
        def invoke() -> Any:
            ran = CliRunner().invoke(cli, [*arguments, "--json"], standalone_mode=False)
            if ran.exception is not None:
                raise ran.exception
            return json.loads(ran.stdout)

        return await asyncio.to_thread(invoke)

    yield run
    server.stop()
    await asyncio.wait_for(serving, 10)


def folder_of_task(folder: Path, version: str) -> Path:
    (folder / "files").mkdir(parents=True, exist_ok=True)
    (folder / "__pycache__").mkdir(exist_ok=True)
    (folder / "__pycache__" / "x.pyc").write_bytes(b"x")
    (folder / "task.yaml").write_text(TASK.format(name="org/flags", version=version))
    (folder / "files" / "solve.sh").write_text("echo flag\n")
    (folder / "files" / "solve.sh").chmod(0o755)
    return folder


async def test_a_folder_is_pushed_listed_pulled_and_deleted(
    headrace: Headrace, tmp_path: Path
) -> None:
    source = folder_of_task(tmp_path / "task", "1.0.0")
    made = await headrace("artifact", "push", "task", str(source))
    assert (made["is_new"], made["artifact"]["version"]) == (True, "1.0.0")
    again = await headrace("artifact", "push", "task", str(source))
    assert (again["is_new"], again["artifact"]) == (False, made["artifact"])
    folder_of_task(source, "1.1.0")
    assert (await headrace("artifact", "push", "task", str(source)))["is_new"]
    [listed] = (await headrace("artifact", "list", "--search", "flag"))["artifacts"]
    assert (listed["name"], listed["version"], listed["num_versions"]) == ("flags", "1.1.0", 2)
    found = (await headrace("artifact", "versions", "task", "flags"))["versions"]
    assert [one["version"] for one in found] == ["1.1.0", "1.0.0"]
    info = (await headrace("artifact", "info", "task", "flags@1.0.0"))["artifact"]
    assert [one["path"] for one in info["files"]] == ["files/solve.sh", "task.yaml"]
    target = tmp_path / "pulled"
    saved = await headrace("artifact", "pull", "task", "flags", str(target))
    assert saved["files"] == 2
    assert (target / "task.yaml").read_text() == (source / "task.yaml").read_text()
    assert (target / "files" / "solve.sh").stat().st_mode & 0o100
    await headrace("artifact", "delete", "task", "flags@1.1.0", "--yes")
    [listed] = (await headrace("artifact", "list"))["artifacts"]
    assert listed["version"] == "1.0.0"


async def test_a_link_in_a_folder_is_refused_before_anything_is_sent(
    headrace: Headrace, tmp_path: Path
) -> None:
    source = folder_of_task(tmp_path / "task", "1.0.0")
    (source / "files" / "passwd").symlink_to("/etc/passwd")
    with pytest.raises(Exception, match="passwd is a link"):
        await headrace("artifact", "push", "task", str(source))


async def test_other_files_under_a_version_need_a_higher_one(
    headrace: Headrace, tmp_path: Path
) -> None:
    source = folder_of_task(tmp_path / "task", "1.0.0")
    await headrace("artifact", "push", "task", str(source))
    (source / "more.txt").write_text("x")
    with pytest.raises(Exception, match="so raise the version"):
        await headrace("artifact", "push", "task", str(source))
