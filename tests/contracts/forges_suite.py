"""The contract of every `infra.repositories.forges.forge.Forge`."""

from collections.abc import AsyncIterator

import httpx
import pytest

from infra.repositories.forge_connections import ForgeConnection
from infra.repositories.forges.api import ForgeApis
from infra.repositories.forges.forge import Forge, PushHook, ShownStatus
from infra.repositories.forges.transport import MOST_BYTES
from infra.repositories.git.credentials import TokenCredential
from infra.settings.git import LAPTOP
from schemas.errors import ForgeAway, Refused
from schemas.events import ForgeKind
from tests.kit.forge_server import COMMIT, OTHER_COMMIT, TOKEN, FakeForge, Reply

HOOK = PushHook("https://headrace.example/webhooks/w", "first-secret")
PENDING = ShownStatus("headrace/sums", "pending", "run x is pending", "https://h.example/runs/x")


def connection_to(server: FakeForge, token: str = TOKEN) -> ForgeConnection:
    forge: ForgeKind = server.forge  # type: ignore[assignment]  # a class of a test says which
    return ForgeConnection("w", forge, server.url, credential=TokenCredential("git", token))


class ForgesSuite:
    """Bind with a fixture `server`."""

    @pytest.fixture
    def server(self) -> FakeForge:
        raise NotImplementedError

    @pytest.fixture
    async def apis(self, server: FakeForge) -> AsyncIterator[ForgeApis]:
        async def find(_: str) -> ForgeConnection:
            return connection_to(server)

        async with ForgeApis(
            find, public_url="https://h.example", allowed=LAPTOP.addresses
        ) as apis:
            yield apis

    @pytest.fixture
    def forge(self, server: FakeForge, apis: ForgeApis) -> Forge:
        return open_forge(apis, server)

    async def test_the_repository_is_seen_with_the_right_token_only(
        self, forge: Forge, server: FakeForge, apis: ForgeApis
    ) -> None:
        await forge.check()
        with pytest.raises(Refused, match=r"answers 401.*make a new one") as refused:
            await open_forge(apis, server, token="wrong-token-wrong-token").check()
        assert "wrong-token" not in str(refused.value)

    async def test_a_hook_is_made_once_and_gets_the_new_secret(
        self, forge: Forge, server: FakeForge
    ) -> None:
        first = await forge.put_hook(HOOK)
        assert server.shown_hooks() == [(HOOK.url, HOOK.secret)]
        assert first
        await forge.put_hook(PushHook(HOOK.url, "second-secret"))
        assert server.shown_hooks() == [(HOOK.url, "second-secret")]

    async def test_hooks_of_others_stay(self, forge: Forge, server: FakeForge) -> None:
        others = [PushHook(f"https://other.example/{n}", "s") for n in range(5)]
        for other in others:
            await forge.put_hook(other)
        await forge.put_hook(HOOK)
        await forge.put_hook(HOOK)
        assert await forge.delete_hook(HOOK.url) is True
        assert sorted(server.shown_hooks()) == sorted((one.url, one.secret) for one in others)
        assert await forge.delete_hook(HOOK.url) is False

    async def test_a_status_is_shown_with_text_and_link(
        self, forge: Forge, server: FakeForge
    ) -> None:
        assert await forge.post_status(COMMIT, PENDING) is True
        [(sha, context, state, text, link)] = server.shown_statuses()
        assert (sha, context, state) == (COMMIT, "headrace/sums", "pending")
        assert (text, link) == (PENDING.text, PENDING.link)

    @pytest.mark.parametrize("state", ["success", "failure", "error"])
    async def test_an_end_follows_pending(
        self, forge: Forge, server: FakeForge, state: str
    ) -> None:
        end = ShownStatus(PENDING.context, state, "the end", None)  # type: ignore[arg-type]  # of the list
        await forge.post_status(COMMIT, PENDING)
        assert await forge.post_status(COMMIT, end) is True
        shown = server.shown_statuses()[-1][2]
        failed = {"failure": "failed", "error": "failed"} if server.forge == "gitlab" else {}
        assert shown == failed.get(state, state)

    async def test_posting_twice_is_posting_once(self, forge: Forge, server: FakeForge) -> None:
        other = ShownStatus("headrace/other", "success", "another", None)
        assert [await forge.post_status(COMMIT, one) for one in (PENDING, other)] == [True, True]
        assert [await forge.post_status(COMMIT, one) for one in (PENDING, other)] == [False, False]
        assert len(server.shown_statuses()) == 2
        assert await forge.post_status(OTHER_COMMIT, PENDING) is True

    async def test_a_long_text_is_cut(self, forge: Forge, server: FakeForge) -> None:
        long = ShownStatus("c", "error", "x" * 500, None)
        assert await forge.post_status(COMMIT, long) is True
        assert await forge.post_status(COMMIT, long) is False
        assert len(server.shown_statuses()[0][3]) == 140

    async def test_a_commit_that_is_not_there_is_refused(self, forge: Forge) -> None:
        with pytest.raises(Refused, match="answers 4"):
            await forge.post_status("d" * 40, PENDING)

    @pytest.mark.parametrize("status", [403, 404])
    async def test_a_missing_permission_is_named(
        self, forge: Forge, server: FakeForge, status: int
    ) -> None:
        server.planned.append(Reply(status, {"message": "Resource not accessible"}))
        with pytest.raises(Refused, match="the token may not do this: it needs the"):
            await forge.check()

    @pytest.mark.parametrize(
        ("reply", "least", "most"),
        [
            (Reply(500), 1, 60),
            (Reply(503, headers={"retry-after": "120"}), 120, 120),
            (Reply(429, headers={"retry-after": "7"}), 7, 7),
            (Reply(429), 1, 60),
            (Reply(403, headers={"retry-after": "99999999"}), 3600, 3600),
            (Reply(403, {"message": "You have exceeded a secondary rate limit"}), 1, 60),
            (
                Reply(403, headers={"x-ratelimit-remaining": "0", "x-ratelimit-reset": "1"}),
                1,
                1,
            ),
            (
                Reply(403, headers={"x-ratelimit-remaining": "0", "x-ratelimit-reset": "x"}),
                60,
                60,
            ),
            (Reply(503, headers={"retry-after": "Fri, 01 Jan 2100 00:00:00 GMT"}), 3600, 3600),
            (Reply(503, headers={"retry-after": "nonsense"}), 60, 60),
            (Reply(200, raw=b"<html>maintenance</html>"), 1, 60),
            (Reply(200, ["not", "the", "document"]), 1, 60),
            (Reply(200, raw=b"[" * 100_000), 1, 60),
            (Reply(200, headers={"content-type": "application/json; charset=none"}), 1, 60),
        ],
        ids=str,
    )
    async def test_a_forge_that_is_away_asks_for_a_pause(
        self, forge: Forge, server: FakeForge, reply: Reply, least: float, most: float
    ) -> None:
        server.planned.append(reply)
        with pytest.raises(ForgeAway) as away:
            await forge.check()
        assert least <= away.value.pause_s <= most
        await forge.check()

    async def test_an_answer_without_end_is_not_read(self, forge: Forge, server: FakeForge) -> None:
        server.planned.append(Reply(200, raw=b" " * (MOST_BYTES + 2)))
        with pytest.raises(ForgeAway, match="more than"):
            await forge.check()

    async def test_a_slow_answer_has_a_deadline(
        self, forge: Forge, server: FakeForge, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("infra.repositories.forges.transport.DEADLINE_S", 0.1)
        server.planned.append(Reply(200, {}, after_s=0.5))
        with pytest.raises(ForgeAway, match="does not answer"):
            await forge.check()

    async def test_the_token_does_not_leave_for_another_host(
        self, forge: Forge, server: FakeForge
    ) -> None:
        other = server.url.replace("127.0.0.1", "localhost")
        server.planned.append(Reply(301, headers={"location": other}))
        with pytest.raises(Refused, match="does not get the token"):
            await forge.check()
        assert len(server.requests) == 1

    async def test_a_redirect_within_the_forge_is_followed(
        self, forge: Forge, server: FakeForge
    ) -> None:
        await forge.check()
        place = server.requests[0].path
        server.planned.append(Reply(301, headers={"location": place}))
        await forge.check()
        server.planned += [Reply(302, headers={"location": place})] * 9
        with pytest.raises(Refused, match="has moved the repository"):
            await forge.check()

    async def test_no_error_shows_the_token(self, forge: Forge, server: FakeForge) -> None:
        echo = {"message": f"no such token {TOKEN}", "errors": [{"message": TOKEN}]}
        for status in (400, 401, 403, 404, 422, 429, 500):
            server.planned.append(Reply(status, echo))
            with pytest.raises((Refused, ForgeAway)) as raised:
                await forge.check()
            assert TOKEN not in str(raised.value)

    @pytest.mark.parametrize("token", ["with\nbreak-" + TOKEN, "wíth-accent" + TOKEN])
    async def test_a_token_that_is_no_header_is_refused_and_not_shown(
        self, apis: ForgeApis, server: FakeForge, token: str
    ) -> None:
        with pytest.raises(Refused, match="connect again with the token alone") as refused:
            await open_forge(apis, server, token=token).check()
        assert refused.value.__suppress_context__
        assert TOKEN not in str(refused.value)

    async def test_a_forge_that_nobody_runs_is_away(self, server: FakeForge) -> None:
        def refuse(request: httpx.Request) -> httpx.Response:
            raise httpx.ConnectError("connection refused", request=request)

        async def find(_: str) -> ForgeConnection:
            return connection_to(server)

        client = httpx.AsyncClient(transport=httpx.MockTransport(refuse))
        async with ForgeApis(find, public_url="https://h.example", client=client) as apis:
            with pytest.raises(ForgeAway, match="connection refused"):
                await open_forge(apis, server).check()


def open_forge(apis: ForgeApis, server: FakeForge, *, token: str = TOKEN) -> Forge:
    forge = apis.open(connection_to(server, token))
    assert forge is not None
    return forge
