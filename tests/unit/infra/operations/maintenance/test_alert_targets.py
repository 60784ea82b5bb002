"""Targets of a workspace's alerts: who is told of what, how it is signed, and what is refused."""

import asyncio
import base64
import hmac
import json
import re
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from infra.operations.maintenance.alert_channels import TIMEOUT_S, AlertAway, AlertChannels, sign
from infra.operations.maintenance.alert_targets import MOST_TARGETS
from infra.operations.maintenance.alerts import Alerts
from infra.settings.alerts import AlertSettings, MailServer
from infra.settings.git import AllowedAddresses, GitSettings
from schemas.ids import RunId
from tests.kit.application import Application, application
from tests.kit.showcase import FAILED, FIRST, WORKSPACE, fill
from tests.kit.source import ROOT

pytestmark = pytest.mark.postgres

LOOPBACK = AllowedAddresses(loopback=True)
ALERTS = f"/workspaces/{WORKSPACE}/alerts"


def documented() -> Any:
    """The function that the runbook shows."""
    text = (ROOT / "docs" / "runbook.md").read_text()
    [code] = re.findall(r"```python\n(def is_genuine.*?)```", text, re.DOTALL)
    lines = code.strip().split("\n")
    assert len(lines) == 1 + 5
    found: dict[str, Any] = {"base64": base64, "hmac": hmac, "time": time}
    exec(code, found)  # noqa: S102 - the code of our own page
    return found["is_genuine"]


@dataclass
class Receiver:
    """A webhook that keeps what it gets. With `is_silent` it never answers."""

    is_silent: bool = False
    got: list[tuple[Mapping[str, str], bytes]] = field(default_factory=list)
    status: int = 200

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        pairs = (line.split(": ", 1) for line in head.split("\r\n")[1:] if ": " in line)
        headers = {name.lower(): value for name, value in pairs}
        body = await reader.readexactly(int(headers["content-length"]))
        self.got.append((headers, body))
        if not self.is_silent:
            answer = f"HTTP/1.1 {self.status} X\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
            writer.write(answer.encode())
            await writer.drain()
        else:
            await reader.read()
        writer.close()

    @property
    def told(self) -> list[tuple[str, str]]:
        alerts = [json.loads(body) for _, body in self.got]
        return sorted((one["run"], one["kind"]) for one in alerts)


@asynccontextmanager
async def listening(receiver: Receiver) -> AsyncIterator[str]:
    server = await asyncio.start_server(receiver.serve, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/a-secret-path"
    finally:
        server.close()


@pytest.fixture
async def app(database_url: str, tmp_path: Path) -> AsyncIterator[Application]:
    async with application(database_url, tmp_path / "home") as served:
        served.services.__dict__.pop("alert_targets", None)
        object.__setattr__(served.services.settings, "git", GitSettings(LOOPBACK))
        yield served


def alerts_of(app: Application) -> Alerts:
    core = app.services
    return Alerts(
        app.database,
        core.log,
        core.readmodel,
        AlertSettings(stalled_min=0),
        targets=core.alert_targets,
        target_addresses=LOOPBACK,
        public_url="https://train.example.org",
    )


async def add(app: Application, address: str, **more: Any) -> tuple[str, str]:
    """The id and the secret of a new webhook."""
    body = {"medium": "webhook", "address": address, **more}
    answer = await app.post(ALERTS, body)
    assert answer.status_code == 201, answer.text
    return answer.json()["target"]["id"], answer.json()["secret"]


async def look(alerts: Alerts, times: int = 1) -> None:
    for _ in range(times):
        await alerts.look()
        await alerts.deliver()


async def test_each_alert_is_verified_by_the_lines_of_the_runbook(app: Application) -> None:
    await fill(app, steps=2)
    await app.database.durable.execute("delete from alerts")
    receiver = Receiver()
    async with listening(receiver) as url:
        target, secret = await add(app, url)
        alerts = alerts_of(app)
        await look(alerts)
        await end_runs(app)
        await look(alerts, 2)
        rotated = (await app.post(f"{ALERTS}/{target}/rotate", {})).json()["secret"]
        await app.database.durable.execute(
            "update alerts set sent_at = null where run = $1 and channel <> ''", FIRST
        )
        await alerts.deliver()
    assert receiver.told == sorted([(FIRST, "ended"), (FIRST, "ended"), (FAILED, "failed")])
    is_genuine = documented()
    for headers, body in receiver.got[:2]:
        assert is_genuine(secret, headers, body)
        assert not is_genuine(secret, headers, body + b" ")
        assert not is_genuine(secret, {**headers, "webhook-id": "another"}, body)
    headers, body = receiver.got[2]
    assert is_genuine(rotated, headers, body)
    assert not is_genuine(secret, headers, body)
    ids = [one["webhook-id"] for one, body in receiver.got if json.loads(body)["run"] == FIRST]
    assert len(ids) == 2
    assert len(set(ids)) == 1, "a receiver can leave out repetitions"


def test_an_old_alert_is_not_genuine() -> None:
    secret = "whsec_" + base64.b64encode(b"k" * 32).decode()
    for age_s, is_fresh in ((0, True), (600, False)):
        headers = sign(secret, "x", int(time.time()) - age_s, b"{}")
        assert documented()(secret, headers, b"{}") is is_fresh


async def test_a_target_is_told_of_the_kinds_it_names_and_of_nothing_older(
    app: Application,
) -> None:
    alerts = alerts_of(app)
    await look(alerts)
    await fill(app, steps=2)
    await look(alerts)
    late, failures = Receiver(), Receiver()
    async with listening(late) as url, listening(failures) as other:
        await add(app, url)
        await look(alerts)
        assert late.got == [], "it ended before the target was added"
        await app.database.durable.execute("delete from alerts where run <> ''")
        await add(app, other, kinds=["failed"])
        await look(alerts)
    assert late.told == sorted([(FIRST, "ended"), (FAILED, "failed")])
    assert failures.told == [(FAILED, "failed")]


async def test_a_target_of_another_workspace_is_told_nothing(app: Application) -> None:
    alerts, receiver = alerts_of(app), Receiver()
    await look(alerts)
    await app.post("/workspaces", {"url": "/repo", "name": "other"})
    async with listening(receiver) as url:
        body = {"medium": "webhook", "address": url}
        assert (await app.post("/workspaces/other/alerts", body)).status_code == 201
        await fill(app, steps=2)
        await look(alerts)
    assert receiver.got == []


async def test_a_target_that_never_answers_delays_no_other(
    app: Application, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("infra.operations.maintenance.alert_channels.TIMEOUT_S", 3.0)
    assert TIMEOUT_S == 15.0
    alerts, silent, good, broken = alerts_of(app), Receiver(is_silent=True), Receiver(), Receiver()
    broken.status = 500
    await look(alerts)
    await fill(app, steps=2)
    async with listening(silent) as first, listening(broken) as second, listening(good) as third:
        for url in (first, second, third):
            await add(app, url)
        await app.database.durable.execute("delete from alerts where run <> ''")
        await alerts.look()
        delivering = asyncio.ensure_future(alerts.deliver())
        async with asyncio.timeout(2.5):
            while len(good.got) < 2:
                await asyncio.sleep(0.05)
        await delivering
    assert [len(one.got) for one in (silent, broken)] == [1, 1], "and the rest of theirs waits"
    listed = (await app.get(f"{ALERTS}"))["targets"]
    errors = [one["error"] for one in listed]
    assert errors[2] is None
    assert "does not answer" in errors[0]
    assert "answered 500" in errors[1]
    assert "a-secret-path" not in str(listed)


async def test_a_forbidden_target_is_refused(app: Application) -> None:
    await fill(app, steps=2)
    object.__setattr__(app.services.settings, "git", GitSettings(AllowedAddresses()))
    app.services.__dict__.pop("alert_targets", None)
    refused = {
        "http://127.0.0.1:9/x": "HEADRACE_GIT_ALLOW",
        "http://169.254.169.254/latest": "not public",
        "http://[::1]:9/": "not public",
        "ftp://example.org/x": "must be an address such as",
        "https://user:pass@example.org/": "must be an address such as",
    }
    for address, says in refused.items():
        answer = await app.post(ALERTS, {"medium": "webhook", "address": address})
        assert answer.status_code == 400
        assert says in answer.text
    bodies: tuple[dict[str, object], ...] = (
        {"medium": "mail", "address": "ada@example.org"},
        {"medium": "mail", "address": "ada"},
        {"medium": "fax", "address": "1"},
        {"medium": "webhook", "address": "https://example.org", "kinds": ["all"]},
        {"medium": "webhook", "address": "https://example.org", "kinds": []},
    )
    for body in bodies:
        assert (await app.post(ALERTS, body)).status_code == 400, body
    assert (await app.get(ALERTS))["targets"] == []


async def test_a_refusal_says_what_was_wrong_and_that_nothing_was_stored(
    app: Application,
) -> None:
    await fill(app, steps=2)
    hook = {"medium": "webhook", "address": "https://does-not-resolve.invalid/x"}
    unknown = await app.post(ALERTS, hook)
    assert unknown.status_code == 400
    assert "no target was stored: the name does-not-resolve.invalid does not" in unknown.text
    assert "retrying" not in unknown.text
    assert "got 'fialed'" in (await app.post(ALERTS, {**hook, "kinds": ["fialed"]})).text
    assert (await app.get(ALERTS))["targets"] == []
    absent = await app.post(f"{ALERTS}/at-1/rotate", {})
    assert absent.status_code == 404
    assert "WORKSPACE" not in absent.text


async def test_a_mail_address_that_no_mail_can_have_is_refused(app: Application) -> None:
    """It would fail when a mail is made, and stop the alerts of everybody."""
    await fill(app, steps=2)
    server = MailServer("127.0.0.1", 9, is_tls=False)
    object.__setattr__(app.services.settings, "alerts", AlertSettings(server=server))
    for address in ("ada@[", "=?utf-8?q?=0aBcc?=@x.org", "a\x01@x.org", ".@.", "a@b;"):
        answer = await app.post(ALERTS, {"medium": "mail", "address": address})
        assert answer.status_code == 400, (ascii(address), answer.text)
        assert "must be a mail address" in answer.text
    good = await app.post(ALERTS, {"medium": "mail", "address": "o'neil+x.y@mail.example.org"})
    assert good.status_code == 201


async def test_a_mail_that_cannot_be_made_is_not_delivered_and_stops_no_other() -> None:
    settings = AlertSettings(server=MailServer("127.0.0.1", 9, is_tls=False))
    channels = AlertChannels(settings, None, allowed=LOOPBACK)  # type: ignore[arg-type]  # mails need no database
    with pytest.raises(AlertAway, match="ValueError"):
        await channels.send("mail:=?utf-8?q?=0aBcc?=@x.org", "run/ended", '{"text": "x"}')


async def test_of_simultaneous_requests_at_the_limit_one_adds_a_target(app: Application) -> None:
    await fill(app, steps=2)
    for n in range(MOST_TARGETS - 1):
        await add(app, f"http://127.0.0.1:9/{n}")
    durable = app.database.durable
    workspace = await durable.fetchval("select workspace from alert_targets limit 1")
    async with durable.take_turns(f"alert targets of {workspace}") as other:
        body = {"medium": "webhook", "address": "http://127.0.0.1:9/"}
        request = asyncio.create_task(app.post(ALERTS, body))
        await asyncio.wait([request], timeout=0.5)
        await other.execute(
            "insert into alert_targets (id, workspace, medium, shown, address, kinds, created_by) "
            "select 'at-other', workspace, medium, shown, address, kinds, created_by "
            "from alert_targets limit 1"
        )
    assert (await request).status_code == 409


async def test_targets_are_sealed_bounded_and_removed_with_what_waits(app: Application) -> None:
    await fill(app, steps=2)
    targets = [await add(app, f"http://127.0.0.1:9/{n}/path") for n in range(MOST_TARGETS)]
    full = await app.post(ALERTS, {"medium": "webhook", "address": "http://127.0.0.1:9/"})
    assert full.status_code == 409
    pool = app.database.durable
    rows = await pool.fetch("select t::text from alert_targets t")
    assert len(rows) == MOST_TARGETS
    assert not any("/path" in str(row) or targets[0][1] in str(row) for row in rows)
    assert await app.services.alert_targets.rewrap() == 2 * MOST_TARGETS
    opened = await app.services.alert_targets.open(targets[0][0])
    assert opened is not None
    assert (opened.address, opened.secret) == ("http://127.0.0.1:9/0/path", targets[0][1])
    await pool.execute("delete from alerts")
    alerts = alerts_of(app)
    await alerts.look()
    await end_runs(app)
    await alerts.look()
    waiting = "select count(*) from alerts where channel = $1"
    assert await pool.fetchval(waiting, targets[0][0]) == 2
    assert (await app.api.delete(f"/api/v1{ALERTS}/{targets[0][0]}")).status_code == 200
    assert await pool.fetchval(waiting, targets[0][0]) == 0
    assert (await app.api.delete(f"/api/v1{ALERTS}/{targets[0][0]}")).status_code == 404


async def end_runs(app: Application) -> None:
    """As if the runs of the showcase ended now."""
    for run in (FIRST, FAILED):
        await app.database.durable.execute(
            "update runs set completed_at = clock_timestamp() where run = $1", RunId(run)
        )
