"""`headrace dataset from-run` against the application over HTTP: its options, and what it prints."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
from click.testing import CliRunner, Result

from infra.http.limits import ConnectionLimits
from infra.http.server import HttpServer
from producers.cli.errors import Failure
from producers.cli.main import cli
from tests.kit.application import API_KEY, Application
from tests.kit.recorded_groups import record_run, recorded_group

pytestmark = pytest.mark.postgres

Headrace = Callable[..., Awaitable[Result]]


@pytest.fixture
async def headrace(app: Application, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Headrace]:
    """Runs `dataset` commands against a server of the application, with a run of three steps."""
    groups = [recorded_group([("good", 1.0), ("bad", 0.0), ("gone", None)])] * 4
    await record_run(app, [groups] * 3)
    server = HttpServer(app.app, host="127.0.0.1", port=0, limits=ConnectionLimits())
    await server.listen()
    serving = asyncio.ensure_future(server.serve())
    monkeypatch.setenv("HEADRACE_URL", f"http://127.0.0.1:{server.port}")
    monkeypatch.setenv("HEADRACE_API_KEY", API_KEY)

    async def run(*arguments: str) -> Result:
        asked = ["dataset", *arguments]
        return await asyncio.to_thread(CliRunner().invoke, cli, asked, standalone_mode=False)

    yield run
    server.stop()
    await asyncio.wait_for(serving, 10)


async def made(headrace: Headrace, *options: str) -> str:
    ran = await headrace("from-run", "first", *options)
    assert ran.exception is None, ran.exception
    return ran.stdout


async def test_the_command_says_how_many_rows_were_made_and_why_not_more(
    headrace: Headrace,
) -> None:
    out = await made(headrace, "--as", "sft", "--name", "d", "--min-reward", "0.5")
    assert "made d: 12 rows of 36 samples (steps 1..3)" in out
    assert "left out: 12 samples have a reward below --min-reward, 12 samples failed" in out
    assert "first has not ended: later samples are not read" in out
    shown = (await headrace("info", "d")).stdout
    assert "steps 1..3 of first as sft, min_reward 0.5" in shown
    assert "unread_columns │ []" in " ".join(shown.split())


@pytest.mark.parametrize(
    ("steps", "said"),
    [("2", "steps 2..2"), ("2..3", "steps 2..3"), ("2..", "steps 2..3"), ("..2", "steps 1..2")],
)
async def test_steps_are_one_step_or_a_range(headrace: Headrace, steps: str, said: str) -> None:
    out = await made(headrace, "--as", "trajectory", "--name", "d", "--steps", steps, "--dry-run")
    assert "d would have" in out
    assert said in out


async def test_recorded_groups_are_previewed_with_their_rewards(headrace: Headrace) -> None:
    await made(headrace, "--as", "trajectory", "--name", "d")
    assert "1 0 -" in (await headrace("preview", "d")).stdout
    shown = (await headrace("info", "d")).stdout
    assert "unread_columns │ []" in " ".join(shown.split())


@pytest.mark.parametrize("steps", ["..", "a", "1-2", "-1", "1..2..3"])
async def test_steps_that_are_no_range_are_refused(headrace: Headrace, steps: str) -> None:
    ran = await headrace("from-run", "first", "--as", "sft", "--name", "d", f"--steps={steps}")
    assert "is not A..B" in str(ran.exception)


async def test_a_refusal_names_the_rewards_that_there_are(headrace: Headrace) -> None:
    ran = await headrace("from-run", "first", "--as", "sft", "--name", "d", "--min-reward", "7")
    assert isinstance(ran.exception, Failure)
    assert "their rewards are from 0 to 1" in str(ran.exception)
