"""The endpoint of webhooks over the real application: signatures first, durable before 202, nothing told
to a sender without a signature."""

import asyncio
import hashlib
import hmac
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from urllib.parse import quote_plus
from uuid import uuid4

import httpx
import pytest

from infra.spine.ports.event_log import EdgeAppend, EdgeAppended
from infra.spine.postgres.errors import DatabaseUnavailable
from producers.webhook.body import MOST_BYTES
from schemas.errors import Refused
from schemas.events import ForgeKind, HookPinged, PushReceived
from schemas.ids import delivery_stream
from tests.kit.application import Application, application
from tests.kit.prometheus import samples

pytestmark = pytest.mark.postgres

SECRET = "It's a Secret to Everybody"
A, B, ZERO = "a" * 40, "b" * 40, "0" * 40


@pytest.fixture
async def app(database_url: str, tmp_path: Path) -> AsyncIterator[Application]:
    async with application(database_url, tmp_path / "home") as served:
        await connect(served, "sums", "github")
        yield served


async def connect(app: Application, name: str, forge: ForgeKind, secret: str = SECRET) -> None:
    await app.services.readmodel.names.take("workspace", name, f"w-{name}")
    await app.services.connections.put_connection(
        f"w-{name}", forge=forge, url="/srv/x.git", secret=secret
    )


def push(**changes: object) -> bytes:
    body = {"ref": "refs/heads/main", "before": A, "after": B, "forced": False, "deleted": False}
    return json.dumps(body | {"pusher": {"name": "ada"}} | changes).encode()


def signed(body: bytes, secret: str = SECRET, **more: str) -> dict[str, str]:
    digest = hmac.new(secret.encode(), body, hashlib.sha256).hexdigest()
    headers = {
        "content-type": "application/json",
        "x-github-event": "push",
        "x-github-delivery": str(uuid4()),
        "x-hub-signature-256": f"sha256={digest}",
    }
    return headers | {name.replace("_", "-"): value for name, value in more.items()}


async def deliver(
    app: Application, body: bytes, headers: Any, name: str = "sums"
) -> httpx.Response:
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(app.app, raise_app_exceptions=False),
        base_url="http://127.0.0.1:8420",
    ) as nobody:
        return await nobody.post(f"/webhooks/{name}", content=body, headers=headers)


async def received(app: Application, name: str = "sums") -> list[Any]:
    stream = delivery_stream(f"w-{name}")
    return [r.event for r in (await app.services.log.load({stream: 0}))[stream]]


def test_the_official_signature_is_accepted() -> None:
    from producers.webhook.signature import WebhookKeys

    digest = "757107ea0eb2509fc211221cce984b8a37570b6d7586c22c46f4379c8b043e17"
    keys = WebhookKeys.of((SECRET,), b"Hello, World!")
    assert keys.accept(f"sha256={digest}".encode())
    assert not keys.accept(f"sha256={digest[:-1]}8".encode())
    assert not keys.accept(digest.encode())


async def test_a_signed_push_is_durable_when_it_is_answered(app: Application) -> None:
    body = push(forced=True)
    headers = signed(body)
    answer = await deliver(app, body, headers)
    assert answer.status_code == 202
    assert await received(app) == [
        PushReceived(
            workspace="w-sums",
            forge="github",
            delivery=headers["x-github-delivery"],
            ref="refs/heads/main",
            before=A,
            after=B,
            forced=True,
            pusher="ada",
        )
    ]
    assert (await deliver(app, body, signed(body), "w-sums")).status_code == 202, "by its id too"


async def test_a_redelivered_push_is_the_same_event(app: Application) -> None:
    body = push()
    headers = signed(body)
    answers = await asyncio.gather(*(deliver(app, body, headers) for _ in range(10)))
    assert {answer.status_code for answer in answers} == {202}
    assert len(await received(app)) == 1
    counts = app.services.webhooks.counts
    assert (counts["github", "accepted"], counts["github", "doubled"]) == (1, 9)
    metrics = samples((await app.api.get("/metrics")).text)["headrace_webhook_deliveries"]
    assert sum(metrics.values()) == 10


async def test_two_pushes_under_one_id_of_a_delivery_are_two_events(app: Application) -> None:
    """The id is not signed: who replays it cannot make a later push the same as an earlier one."""
    first, second = push(), push(before=B, after=A)
    headers = signed(first)
    again = signed(second, x_github_delivery=headers["x-github-delivery"])
    assert (await deliver(app, first, headers)).status_code == 202
    assert (await deliver(app, second, again)).status_code == 202
    assert [event.after for event in await received(app)] == [B, A]


async def test_twin_without_the_cause_of_a_delivery_it_would_be_two(
    app: Application, monkeypatch: pytest.MonkeyPatch
) -> None:
    import producers.webhook.endpoint as endpoint

    monkeypatch.setattr(endpoint, "derive_id", lambda *_: uuid4())
    body = push()
    headers = signed(body)
    for _ in range(2):
        assert (await deliver(app, body, headers)).status_code == 202
    assert len(await received(app)) == 2


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"x-hub-signature-256": ""},
        {"x-hub-signature-256": "sha256="},
        {"x-hub-signature-256": "sha256=" + "0" * 64},
        {"x-hub-signature": "sha1=" + "0" * 40},
        {"x-hub-signature-256": "sha1=" + "0" * 40},
        {"x-gitlab-token": SECRET},
        {"authorization": f"Bearer {SECRET}"},
    ],
)
async def test_a_sender_without_a_signature_learns_nothing(
    app: Application, headers: dict[str, str]
) -> None:
    body = push()
    answers = [
        await deliver(app, body, {"x-github-event": "push"} | headers, name)
        for name in ("sums", "unknown", "w-sums", "UPPER", "x" * 300)
    ]
    answers.append(await deliver(app, body, signed(body, "of another workspace")))
    assert {answer.status_code for answer in answers} == {401}
    assert len({answer.content for answer in answers}) == 1
    assert await received(app) == []


async def test_a_correct_sha1_signature_alone_is_refused(app: Application) -> None:
    body = push()
    sha1 = hmac.new(SECRET.encode(), body, hashlib.sha1).hexdigest()
    headers = {"x-github-event": "push", "x-hub-signature": f"sha1={sha1}"}
    assert (await deliver(app, body, headers)).status_code == 401


async def test_the_secret_of_another_workspace_opens_nothing(app: Application) -> None:
    await connect(app, "other", "github", "another secret")
    body = push()
    assert (await deliver(app, body, signed(body, "another secret"))).status_code == 401
    assert (await deliver(app, body, signed(body, "another secret"), "other")).status_code == 202


async def test_doubled_headers_are_refused(app: Application) -> None:
    body = push()
    once = list(signed(body).items())
    twice = [*once, ("x-hub-signature-256", dict(once)["x-hub-signature-256"])]
    assert (await deliver(app, body, twice)).status_code == 401
    for name in ("x-github-event", "x-github-delivery"):
        answer = await deliver(app, body, [*once, (name, "push")])
        assert answer.status_code == 400
        assert name in answer.json()["detail"]


async def test_both_secrets_are_valid_during_a_rotation(app: Application) -> None:
    await app.services.connections.rotate("w-sums")
    found = await app.services.connections.get_connection("w-sums")
    assert found is not None
    for secret in (SECRET, found.secrets[0]):
        body = push(before=ZERO)
        assert (await deliver(app, body, signed(body, secret))).status_code == 202
    await app.services.connections.rotate("w-sums", now=True)
    await asyncio.sleep(1.1)  # a lookup is remembered for a second
    body = push()
    assert (await deliver(app, body, signed(body))).status_code == 401


async def test_without_a_connection_there_is_no_endpoint(app: Application) -> None:
    await app.services.connections.drop("w-sums")
    body = push()
    assert (await deliver(app, body, signed(body))).status_code == 401


async def test_ping_is_answered_and_recorded_and_other_events_are_counted(app: Application) -> None:
    body = b'{"zen": "x"}'
    answer = await deliver(app, body, signed(body, x_github_event="ping"))
    assert answer.status_code == 200
    assert [type(event) for event in await received(app)] == [HookPinged]
    answer = await deliver(app, body, signed(body, x_github_event="issues"))
    assert answer.status_code == 202
    assert len(await received(app)) == 1
    assert app.services.webhooks.counts["github", "ignored"] == 1


async def test_a_form_is_read_like_json(app: Application) -> None:
    body = b"payload=" + quote_plus(push()).encode()
    form = signed(body, content_type="application/x-www-form-urlencoded")
    assert (await deliver(app, body, form)).status_code == 202
    assert len(await received(app)) == 1


@pytest.mark.parametrize(
    ("changes", "before", "after"),
    [({"before": ZERO}, None, B), ({"after": ZERO}, A, None), ({"deleted": True}, A, None)],
)
async def test_new_and_deleted_refs_have_one_commit(
    app: Application, changes: dict[str, object], before: str | None, after: str | None
) -> None:
    body = push(**changes)
    assert (await deliver(app, body, signed(body))).status_code == 202
    [event] = await received(app)
    assert (event.before, event.after) == (before, after)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"null",
        b"[" * 200_000,
        b'{"a":' * 50_000,
        b"\xff\xfe\x00",
        push(ref=None),
        push(ref=7),
        push(after="x"),
        push(ref="refs/heads/\0"),
        push(ref="refs/heads/" + "x" * 10_000),
        push(ref="main"),
        push(ref="refs/heads/a..b"),
    ],
)
async def test_signed_nonsense_is_400_with_a_sentence(app: Application, body: bytes) -> None:
    answer = await deliver(app, body, signed(body))
    assert answer.status_code == 400
    assert 20 < len(answer.json()["detail"]) < 400
    assert await received(app) == []


async def test_a_ref_like_an_option_is_ignored(app: Application) -> None:
    body = push(ref="refs/heads/--upload-pack=x")
    assert (await deliver(app, body, signed(body))).status_code == 202
    assert await received(app) == []


async def test_other_methods_are_405(app: Application) -> None:
    for method in ("GET", "PUT", "DELETE", "OPTIONS"):
        assert (await app.api.request(method, "/webhooks/sums")).status_code == 405


async def test_a_body_beyond_25_mib_is_413_declared_or_not(app: Application) -> None:
    answer = await deliver(app, b"x", signed(b"x", content_length=str(MOST_BYTES + 1)))
    assert answer.status_code == 413

    async def chunks() -> AsyncIterator[bytes]:
        for _ in range(26):
            yield b"x" * (1 << 20)

    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(app.app), base_url="http://127.0.0.1:8420"
    ) as nobody:
        answer = await nobody.post("/webhooks/sums", content=chunks())
    assert answer.status_code == 413
    largest = push() + b" " * (MOST_BYTES - len(push()))
    assert (await deliver(app, largest, signed(largest))).status_code == 202


async def test_gitlab_sends_its_secret_and_its_own_headers(app: Application) -> None:
    await connect(app, "lab", "gitlab")
    body = push(user_username="grace")
    headers = {
        "x-gitlab-token": SECRET,
        "x-gitlab-event": "Push Hook",
        "x-gitlab-event-uuid": str(uuid4()),
        "content-type": "application/json",
    }
    assert (await deliver(app, body, headers, "lab")).status_code == 202
    [event] = await received(app, "lab")
    assert (event.forge, event.pusher, event.after) == ("gitlab", "grace", B)
    assert (await deliver(app, body, signed(body), "lab")).status_code == 401
    wrong = headers | {"x-gitlab-token": SECRET + "x"}
    assert (await deliver(app, body, wrong, "lab")).status_code == 401


async def test_a_database_that_is_away_is_503_and_the_others_are_not_lost(
    app: Application, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = push()
    log = app.services.log
    with monkeypatch.context() as away:

        async def fail(_: object) -> list[EdgeAppended | Refused]:
            raise DatabaseUnavailable("away")

        away.setattr(log, "append_all", fail)
        assert (await deliver(app, body, signed(body))).status_code == 503
    assert (await deliver(app, body, signed(body))).status_code == 202


async def test_deliveries_that_arrive_together_share_commits(
    app: Application, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []
    append_all = app.services.log.append_all

    async def counting(batch: list[EdgeAppend]) -> Any:
        sizes.append(len(batch))
        return await append_all(batch)

    monkeypatch.setattr(app.services.log, "append_all", counting)
    bodies = [push(pusher={"name": str(n)}) for n in range(40)]
    answers = await asyncio.gather(*(deliver(app, body, signed(body)) for body in bodies))
    assert {answer.status_code for answer in answers} == {202}
    assert len(await received(app)) == 40
    assert len(sizes) < 20
    assert sum(sizes) == 40


async def test_a_workspace_that_is_named_like_an_id_takes_no_delivery_of_that_workspace(
    app: Application,
) -> None:
    theirs = "0123456789abcdef"
    await app.services.connections.put_connection(
        theirs, forge="github", url="/srv/x.git", secret=SECRET
    )
    await connect(app, theirs, "github", "the secret of somebody else")
    body = push()
    accepted = await deliver(app, body, signed(body), theirs)
    assert accepted.status_code == 202, accepted.text
    refused = await deliver(app, body, signed(body, "the secret of somebody else"), theirs)
    assert refused.status_code == 401
    stream = delivery_stream(theirs)
    [recorded] = (await app.services.log.load({stream: 0}))[stream]
    assert isinstance(recorded.event, PushReceived)
    assert recorded.event.workspace == theirs
