"""Runs that pushes submit: through the same door as a person's, once, and approved before they start."""

import json
import tomllib
from typing import Any

import pytest

from producers.core.run_submissions import RunSubmissions
from producers.core.submit import SubmitRequest
from schemas.errors import Conflict, InvalidConfig
from schemas.events import (
    CommitRequested,
    Event,
    RunApproved,
    RunRequested,
    RunStopped,
    RunStopRequested,
    WorkspaceSynced,
)
from schemas.ids import run_stream, workspace_stream
from schemas.specs import DiscoveredRollout, Entrypoint, PushOrigin
from schemas.toml.untrusted import MOST_BYTES
from tests.kit.application import Application, rows
from tests.kit.pushes import AFTER, origin
from tests.kit.specs import ref

pytestmark = pytest.mark.postgres

CONFIG = """
[experiment]
rollout = "say"
entrypoint = "main.py"
model_path = "scratch:qwen3-tiny"
dataset = "numbers"
branch = "another"
[training]
rollout_batch_size = 2
n_samples_per_prompt = 2
"""
SFT = """
[experiment]
model_path = "scratch:qwen3-tiny"
dataset = "numbers"
[advanced]
algorithm = "sft"
batch_size = 4
"""


@pytest.fixture
async def ready(app: Application) -> Application:
    """An application that has a dataset and two workspaces."""
    assert (await app.upload("numbers", rows(8))).status_code == 200
    for name in ("math", "other"):
        made = await app.post("/workspaces", {"url": "/repo", "name": name})
        assert made.status_code == 201, made.text
    return app


async def pushed(app: Application, number: int = 1, **match: Any) -> PushOrigin:
    """The origin of a run in the workspace `math`."""
    found = origin(number, **match)
    workspace = await app.services.workspaces.find_workspace("math")
    push = found.push.model_copy(update={"workspace": workspace.id, "url": workspace.url})
    return found.model_copy(update={"push": push})


async def submit(
    app: Application, of: PushOrigin, config: str = CONFIG, level: str = "bwrap"
) -> str:
    submissions = RunSubmissions(
        app.services.submitter, level=level, home_of=app.services.organisations.home_of
    )
    return await submissions.submit(of, config.encode())


async def events(app: Application, of: PushOrigin) -> list[Event]:
    """The events of the run, and the pushes that bring its commit."""
    streams = [run_stream(of.run), workspace_stream(of.push.workspace)]
    loaded = await app.services.log.load(dict.fromkeys(streams, 0))
    wanted = [recorded.event for recorded in loaded[streams[0]]]
    return wanted + [
        recorded.event
        for recorded in loaded[streams[1]]
        if isinstance(recorded.event, CommitRequested)
        and recorded.event.requester == run_stream(of.run)
    ]


async def test_a_push_submits_its_commit_with_the_values_that_its_trigger_sets(
    ready: Application,
) -> None:
    of = await pushed(ready, overrides=json.dumps({"training": {"lr": 0.25}}))
    assert await submit(ready, of) == "grpo-aaa"
    requested, push = await events(ready, of)
    assert isinstance(requested, RunRequested)
    assert requested.run == of.run
    assert requested.origin == of
    assert requested.config.training.lr == 0.25
    assert requested.config.experiment.commit_sha == AFTER
    assert requested.config.experiment.branch is None
    assert isinstance(push, CommitRequested)
    assert (push.commit.sha, push.commit.ref, push.commit.branch) == (AFTER, of.push.ref, None)
    assert push.workspace_name == "math"


async def test_a_level_that_trusts_authors_refuses_the_runs_of_pushes(ready: Application) -> None:
    of = await pushed(ready)
    with pytest.raises(InvalidConfig, match="HEADRACE_SANDBOX is process-trusted"):
        await submit(ready, of, level="process-trusted")
    assert await events(ready, of) == []


async def test_submitting_again_is_the_same_run(ready: Application) -> None:
    of = await pushed(ready)
    names = [await submit(ready, of) for _ in range(3)]
    assert names == ["grpo-aaa"] * 3
    assert len(await events(ready, of)) == 2
    with pytest.raises(Conflict):
        await submit(ready, of, CONFIG + "total_epochs = 2\n")


async def test_a_name_in_use_gets_a_suffix_and_a_persons_does_not(ready: Application) -> None:
    first, second = await pushed(ready, 1), await pushed(ready, 2)
    assert await submit(ready, first) == "grpo-aaa"
    assert await submit(ready, second) == f"grpo-aaa-{second.run[:6]}"
    assert await submit(ready, second) == f"grpo-aaa-{second.run[:6]}"
    long = await pushed(ready, 3, run_name="x" * 100)
    assert await submit(ready, long) == "x" * 100
    longer = await pushed(ready, 4, run_name="x" * 100)
    assert await submit(ready, longer) == f"{'x' * 93}-{longer.run[:6]}"
    request = SubmitRequest(config=tomllib.loads(SFT), name="grpo-aaa")
    await ready.services.submitter.submit_run(request, key="of-no-workspace")
    with pytest.raises(Conflict):
        await ready.services.submitter.submit_run(request, key="a person's")


async def test_the_commit_is_checked_when_it_is_known(ready: Application) -> None:
    of = await pushed(ready)
    entry = Entrypoint(rollout="say", path="main.py")
    synced = WorkspaceSynced(
        workspace=of.push.workspace,
        request="00000000-0000-0000-0000-000000000001",  # type: ignore[arg-type]  # parsed
        commit=AFTER,
        snapshot=ref("tree"),
        rollouts=(DiscoveredRollout(entrypoint=entry, error="main.py:1: no such module"),),
    )
    await ready.append([synced])
    with pytest.raises(InvalidConfig, match="no such module"):
        await submit(ready, of)


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ("[", "not valid TOML"),
        ("#" * (MOST_BYTES + 1), "at most 65536"),
        ("a = " + "[" * 10_000, "levels deep"),
        ("a = 1979-01-01", "must not be a date"),
        (CONFIG.replace("numbers", "nubmers"), "numbers"),
        (CONFIG + "lrr = 1", "training.lr"),
    ],
)
async def test_a_wrong_config_is_refused(ready: Application, config: str, says: str) -> None:
    with pytest.raises(InvalidConfig) as refused:
        await submit(ready, await pushed(ready), config)
    assert says in str(refused.value) + str(refused.value.issues)


@pytest.mark.parametrize("config", [CONFIG, SFT])
async def test_a_run_waits_for_approval_which_brings_its_commit(
    ready: Application, config: str
) -> None:
    of = await pushed(ready, require_approval=True)
    await submit(ready, of, config)
    assert [type(event) for event in await events(ready, of)] == [RunRequested]
    log = ready.services.log
    assert await ready.services.readmodel.caught_up(await log.visible_head())
    shown = await ready.get(f"/runs/{of.run}")
    assert (shown["run"]["status"], shown["run"]["phase"]) == ("pending", "approval")
    [wait] = shown["waiting_for"]
    assert "headrace train approve grpo-aaa" in wait["message"]
    for _ in range(2):
        answer = await ready.post(f"/runs/{of.run}/approve", {})
        assert answer.status_code == 200, answer.text
        assert answer.json()["run"]["phase"] == ("provision" if config == CONFIG else "init")
    kinds = [type(event) for event in await events(ready, of)]
    assert kinds == [RunRequested, RunApproved, *([CommitRequested] if config == CONFIG else [])]
    if config == CONFIG:
        push = (await events(ready, of))[-1]
        assert isinstance(push, CommitRequested)
        assert (push.commit.sha, push.commit.ref) == (AFTER, of.push.ref)


async def test_only_a_run_that_waits_can_be_approved(ready: Application) -> None:
    free, waiting = await pushed(ready, 1), await pushed(ready, 2, require_approval=True)
    await submit(ready, free)
    await submit(ready, waiting)
    answer = await ready.post(f"/runs/{free.run}/approve", {})
    assert answer.status_code == 409
    assert "does not wait for approval" in answer.json()["detail"]
    stop = RunStopRequested(run=waiting.run)
    await ready.append([stop])
    answer = await ready.post(f"/runs/{waiting.run}/approve", {})
    assert "is stopping" in answer.json()["detail"]
    await ready.append([RunStopped(run=waiting.run, step=0, origin=waiting)])
    answer = await ready.post(f"/runs/{waiting.run}/approve", {})
    assert answer.status_code == 409
    assert "is stopped, so it cannot be approved" in answer.json()["detail"]
    assert (await ready.post("/runs/absent/approve", {})).status_code == 404
