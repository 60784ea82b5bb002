"""What arrived about a repository and what it led to, as the API shows it."""

from typing import Any
from uuid import uuid4

import pytest

from schemas.events import (
    CommitRequested,
    CommitStatusDecided,
    Event,
    HookPinged,
    PushExamined,
    PushReceived,
    RefsCheckRequested,
    RefsListed,
    RefsMoved,
    TriggerFired,
    TriggerRefused,
    TriggerSkipped,
    TriggerSubmitted,
    WorkspaceConnected,
    WorkspaceDisconnected,
)
from schemas.ids import workspace_stream
from schemas.specs import CommitSpec, CommitStatus, Push, PushOrigin, RefMove, TriggerMatch
from tests.kit.application import Application

pytestmark = pytest.mark.postgres

WS, URL, MAIN = "w1", "https://git.example.org/team/sums.git", "refs/heads/main"
A, B = "a" * 40, "b" * 40
PUSH = Push(workspace=WS, workspace_name="sums", url=URL, number=1, ref=MAIN, before=A, after=B)
ORIGIN = PushOrigin(
    push=PUSH,
    match=TriggerMatch(trigger=1, config="configs/training/x.toml"),
    context="headrace/sums/x",
)


def later_push(number: int) -> Push:
    return PUSH.model_copy(update={"number": number})


async def known_workspace(app: Application) -> None:
    await app.services.readmodel.names.take("workspace", "sums", WS)
    pushed = CommitRequested(workspace=WS, workspace_name="sums", commit=CommitSpec(url=URL))
    await append(app, pushed, WorkspaceConnected(workspace=WS, forge="gitea"))


async def append(app: Application, *events: Event) -> None:
    for event in events:
        await app.append([event])


def received(ref: str = MAIN, after: str | None = B) -> PushReceived:
    return PushReceived(
        workspace=WS,
        forge="gitea",
        delivery=uuid4().hex,
        ref=ref,
        before=A,
        after=after,
        pusher="ada",
    )


def moved(after: str | None = B, number: int = 1, *, baseline: bool = False) -> RefsMoved:
    move = RefMove(ref=MAIN, before=A, after=after, number=number)
    return RefsMoved(
        workspace=WS,
        workspace_name="sums",
        url=URL,
        round=number,
        moves=(move,),
        baseline=baseline,
    )


def listed(number: int = 1, error: str | None = None) -> RefsListed:
    return RefsListed(workspace=WS, round=number, digest=None if error else "d1", error=error)


async def entries(app: Application) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = (await app.get("/workspaces/sums/deliveries"))["deliveries"]
    return found


async def test_a_push_shows_its_run_and_the_status_of_its_commit(app: Application) -> None:
    await known_workspace(app)
    await append(app, HookPinged(workspace=WS, forge="gitea", delivery="d0"), received())
    [push, ping] = await entries(app)
    assert (ping["event"], ping["result"]) == ("ping", "the webhook works")
    assert push["result"] == "waits until the repository answers which refs it has"
    await append(app, moved(), listed())
    assert (await entries(app))[0]["result"] == "its commit is being examined"
    run = ORIGIN.run
    await append(
        app,
        PushExamined(workspace=WS, push=PUSH, matches=(ORIGIN.match,), day="2026-11-22"),
        TriggerFired(workspace=WS, run=run, origin=ORIGIN),
        TriggerSubmitted(workspace=WS, run=run, origin=ORIGIN, run_name="x-1"),
    )
    [push, _] = await entries(app)
    assert push["result"] == "run x-1: pending"
    assert (push["event"], push["ref"], push["pusher"], push["push"]) == ("push", MAIN, "ada", 1)
    status = CommitStatus(workspace=WS, sha=B, context="c", state="success", text="0.2 -> 0.9")
    await append(
        app, CommitStatusDecided(workspace=WS, subject=run, number=1, stage=3, status=status)
    )
    [push, _] = await entries(app)
    assert push["result"] == "run x-1: 0.2 -> 0.9"
    assert push["runs"][0]["commit_state"] == "success"


async def test_a_push_without_a_run_says_why(app: Application) -> None:
    await known_workspace(app)
    reasons: tuple[tuple[PushExamined | TriggerSkipped, str], ...] = (
        (PushExamined(workspace=WS, push=PUSH, day="d", reason="[skip train]"), "[skip train]"),
        (PushExamined(workspace=WS, push=PUSH, day="d", error="unknown key x"), "unknown key x"),
        (PushExamined(workspace=WS, push=PUSH, day="d"), "no trigger matches"),
    )
    await append(app, received(), moved(), listed())
    for event, reason in reasons[2:] + reasons[:2]:
        await append(app, event)
        assert (await entries(app))[0]["result"] == f"no run: {reason}"


async def test_a_skipped_and_a_refused_trigger_name_the_reason(app: Application) -> None:
    await known_workspace(app)
    skipped = TriggerSkipped(workspace=WS, run="r1", origin=ORIGIN, reason="run y is running")
    await append(app, received(), moved(), listed(), skipped)
    assert (await entries(app))[0]["result"] == f"{ORIGIN.match.config} skipped: run y is running"
    refused = TriggerRefused(workspace=WS, run="r1", origin=ORIGIN, message="no dataset d")
    await append(app, refused)
    assert (await entries(app))[0]["result"] == f"{ORIGIN.match.config} refused: no dataset d"


async def test_the_error_of_a_workspace_is_that_of_the_newest_examined_push(
    app: Application,
) -> None:
    async def error() -> str | None:
        found: str | None = (await app.get("/workspaces/sums"))["workspace"]["push_error"]
        return found

    await known_workspace(app)
    matched = PushExamined(workspace=WS, push=PUSH, matches=(ORIGIN.match,), day="d")
    await append(app, received(), moved(), listed(), matched)
    assert await error() is None
    refused = TriggerRefused(workspace=WS, run="r1", origin=ORIGIN, message="no dataset d")
    await append(app, refused)
    assert await error() == f"{ORIGIN.match.config} for {MAIN} at {B[:12]}: no dataset d"
    wrong = PushExamined(workspace=WS, push=later_push(2), day="d", error="unknown key x")
    await append(app, moved(number=2), wrong)
    assert await error() == f"{MAIN} at {B[:12]}: unknown key x"
    await append(app, moved(number=3), PushExamined(workspace=WS, push=later_push(3), day="d"))
    assert await error() is None
    # A refusal of an older push may come later than the examination of a newer one.
    late = TriggerRefused(workspace=WS, run="r2", origin=ORIGIN, message="no dataset d")
    await append(app, late)
    assert await error() is None


async def test_a_move_without_a_webhook_is_found_and_a_baseline_is_not_shown(
    app: Application,
) -> None:
    await known_workspace(app)
    await append(app, moved(baseline=True), listed())
    assert await entries(app) == []
    await append(app, RefsCheckRequested(workspace=WS, reason="poll"), moved(A, 2), listed(2))
    [found] = await entries(app)
    assert (found["event"], found["after"], found["push"]) == ("found", A, 2)
    await append(app, received(after=None), moved(None, 3), listed(3))
    assert (await entries(app))[0]["result"] == "no run: the ref was deleted"


async def test_a_late_delivery_says_that_nothing_moved(app: Application) -> None:
    await known_workspace(app)
    await append(app, received("refs/heads/old"), listed())
    assert "had moved on" in (await entries(app))[0]["result"]


async def test_a_workspace_shows_its_forge_and_why_its_refs_cannot_be_listed(
    app: Application,
) -> None:
    await known_workspace(app)
    await append(app, listed(error="it is not there"))
    found = (await app.get("/workspaces/sums"))["workspace"]
    assert (found["forge"], found["refs_error"]) == ("gitea", "it is not there")
    known = await app.services.readmodel.deliveries.known_refs([WS, "unknown"])
    assert known[WS].error == "it is not there"
    assert known[WS].digest is None
    assert "unknown" not in known
    await append(app, listed(2), WorkspaceDisconnected(workspace=WS))
    found = (await app.get("/workspaces/sums"))["workspace"]
    assert (found["forge"], found["refs_error"]) == (None, None)
    assert (await app.services.readmodel.deliveries.known_refs([WS]))[WS].digest == "d1"


async def test_a_manual_sync_is_a_request_to_look(app: Application) -> None:
    await known_workspace(app)
    answer = await app.post("/workspaces/sums/sync", {})
    assert answer.status_code == 202
    stream = RefsCheckRequested(workspace=WS, reason="manual").stream
    loaded = (await app.services.log.load({stream: 0}))[stream]
    assert [recorded.event for recorded in loaded] == [
        RefsCheckRequested(workspace=WS, reason="manual")
    ]
    assert workspace_stream(WS) != stream
    assert (await app.post("/workspaces/unknown/sync", {})).status_code == 404
