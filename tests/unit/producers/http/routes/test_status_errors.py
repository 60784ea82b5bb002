"""A status that the forge of a workspace refuses, from its post to what users see of it."""

import logging
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from uuid import uuid4

import pytest

from consumers.status import CONSUMER, Statuses, StatusPorts, evolve, handle
from infra.repositories.forge_connections import ForgeConnection
from infra.repositories.forges.api import ForgeApis
from infra.repositories.git.credentials import TokenCredential
from infra.settings.git import LAPTOP
from infra.spine.ports.effects import Claimed
from infra.spine.runtime.attempt import perform_once
from infra.spine.runtime.consumer import Meta
from schemas.effects import Failed, PostStatus, StatusPosted
from schemas.events import (
    CommitStatusDecided,
    WorkspaceConnected,
    WorkspaceDisconnected,
)
from schemas.ids import EffectId, status_stream
from schemas.specs import CommitStatus
from tests.kit.application import Application
from tests.kit.forge_server import COMMIT, TOKEN, FakeGitea, Reply, Request, serving
from tests.kit.signed_in import signed_in
from tests.unit.producers.http.routes.test_deliveries import (
    WS,
    append,
    known_workspace,
)

pytestmark = pytest.mark.postgres

SHOWN = f"commit {COMMIT[:12]}: 127.0.0.1:"
MOVED = "/api/v1/repos/team/moved/statuses/" + COMMIT


class RefusingForge(FakeGitea):
    """A forge that answers a post of a status with `refusal`, if there is one."""

    refusal: Reply | None = None

    def route(self, request: Request) -> Reply:
        if self.refusal is not None and request.method == "POST":
            return self.refusal
        return super().route(request)


@dataclass
class Posting:
    """Posts statuses as the consumer does, and records its events."""

    app: Application
    forge: RefusingForge
    apis: ForgeApis

    async def post(self, subject: str) -> None:
        status = CommitStatus(workspace=WS, sha=COMMIT, context=subject, state="error", text="x")
        decided = CommitStatusDecided(
            workspace=WS, subject=subject, number=1, stage=3, status=status
        )
        stream, identity = status_stream(subject), uuid4()
        effect = PostStatus(subject=subject, number=1, status=status)
        claimed = Claimed(
            EffectId(identity), effect, CONSUMER.name, stream, 1, 0, 0, identity, None
        )
        attempt = await perform_once(CONSUMER, claimed, StatusPorts(self.apis))
        meta = Meta(identity, stream, identity, datetime.now(UTC))
        assert isinstance(attempt.outcome, StatusPosted | Failed)
        decision = handle(evolve(Statuses(), decided), attempt.outcome, meta)
        await append(self.app, decided, *decision.events)

    async def error(self) -> str | None:
        found: str | None = (await self.app.get("/workspaces/sums"))["workspace"]["status_error"]
        return found


@pytest.fixture
def forge() -> Iterator[RefusingForge]:
    forge = RefusingForge()
    with serving(forge):
        yield forge


@pytest.fixture
async def posting(app: Application, forge: RefusingForge) -> AsyncIterator[Posting]:
    connection = ForgeConnection(
        WS, "gitea", forge.url, credential=TokenCredential("git", TOKEN), secrets=("hush",)
    )

    async def find(workspace: str) -> ForgeConnection:
        assert workspace == WS
        return connection

    await known_workspace(app)
    async with ForgeApis(find, public_url="https://h", allowed=LAPTOP.addresses) as apis:
        yield Posting(app, forge, apis)


@pytest.mark.parametrize(
    ("refusal", "said"),
    [
        (Reply(307), "answers 307; check the address"),
        (Reply(307, headers={"location": "https://other.example/x"}), "connect the repository by"),
        (Reply(307, headers={"location": MOVED}), "has moved the repository"),
        (Reply(403, {"message": f"not {TOKEN}"}), "answers 403"),
    ],
)
async def test_a_refused_status_is_logged_once_and_shown_until_one_is_taken(
    posting: Posting, caplog: pytest.LogCaptureFixture, refusal: Reply, said: str
) -> None:
    assert await posting.error() is None
    posting.forge.refusal = refusal
    with caplog.at_level(logging.WARNING):
        await posting.post("r1")
    [record] = caplog.records
    for part in (posting.forge.url, COMMIT, said):
        assert part in record.getMessage()
    assert TOKEN not in caplog.text
    error = await posting.error()
    assert error is not None
    assert error.startswith(SHOWN)
    assert said in error or said in record.getMessage()
    assert TOKEN not in error
    posting.forge.refusal = None
    await posting.post("r2")
    assert len(posting.forge.statuses) == 1
    assert await posting.error() is None


async def test_the_page_shows_a_refused_status_and_a_new_connection_clears_it(
    posting: Posting,
) -> None:
    posting.forge.refusal = Reply(307)
    for subject, over in (
        ("r1", WorkspaceConnected(workspace=WS, forge="gitea")),
        ("r2", WorkspaceDisconnected(workspace=WS)),
    ):
        await posting.post(subject)
        async with signed_in(posting.app) as browser:
            page = (await browser.get("/workspaces/sums")).text
        assert SHOWN in page
        assert "answers 307" in page
        await append(posting.app, over)
        assert await posting.error() is None
