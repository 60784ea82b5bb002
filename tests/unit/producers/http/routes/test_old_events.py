"""Events that earlier releases recorded are shown as today's."""

import pytest

from schemas.errors import Conflict
from schemas.events import CommitRequested, HookPinged, PushReceived, WorkspaceConnected
from schemas.ids import HEADRACE, derive_id, short_id
from schemas.specs import CommitSpec
from tests.kit.application import Application
from tests.kit.old_events import (
    OldHookPinged,
    OldPushReceived,
    OldRepositoryPushed,
    OldWorkspaceConnected,
)

pytestmark = pytest.mark.postgres

WS, URL, MAIN = "w1", "https://git.example.org/team/sums.git", "refs/heads/main"
A, B = "a" * 40, "b" * 40


async def test_the_forge_of_old_connections_and_deliveries_is_shown(app: Application) -> None:
    await app.services.readmodel.names.take("workspace", "sums", WS)
    pushed = CommitRequested(workspace=WS, workspace_name="sums", commit=CommitSpec(url=URL))
    for event in (
        pushed,
        OldWorkspaceConnected(workspace=WS, provider="gitea", can_post=True),
        OldHookPinged(workspace=WS, provider="gitea", delivery="d0"),
        OldPushReceived(workspace=WS, provider="gitea", delivery="d1", ref=MAIN, before=A, after=B),
    ):
        await app.append([event])
    assert (await app.get("/workspaces/sums"))["workspace"]["forge"] == "gitea"
    found = (await app.get("/workspaces/sums/deliveries"))["deliveries"]
    assert [(one["delivery"], one["forge"]) for one in found] == [("d1", "gitea"), ("d0", "gitea")]
    assert await app.recorded(WS, WorkspaceConnected, HookPinged, PushReceived) == [
        WorkspaceConnected(workspace=WS, forge="gitea", can_post=True),
        HookPinged(workspace=WS, forge="gitea", delivery="d0"),
        PushReceived(workspace=WS, forge="gitea", delivery="d1", ref=MAIN, before=A, after=B),
    ]


async def test_a_workspace_of_an_earlier_release_keeps_its_name_and_repository(
    app: Application,
) -> None:
    """`add` knows the event of the release before by its id, which follows from its name."""
    core, identity = app.services.workspaces, short_id("workspace", "sums")
    await app.services.readmodel.names.take("workspace", "sums", identity)
    old = OldRepositoryPushed(workspace=identity, workspace_name="sums", commit=CommitSpec(url=URL))
    await app.services.log.append([old], cause=derive_id(HEADRACE, "workspace/sums"))
    assert (await core.find_workspace("sums")).url == URL

    async def check(_: str) -> None:
        """Every repository exists."""

    with pytest.raises(Conflict, match="the name sums is already used"):
        await core.add("https://git.example.org/other/sums.git", name="sums", check=check)
    assert await app.recorded(identity) == [
        CommitRequested(workspace=identity, workspace_name="sums", commit=CommitSpec(url=URL))
    ]
