"""Alerts: what is told of a run, and that it arrives at least once."""

import asyncio
import contextlib
import json
import logging
import os
import time
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import pytest

from infra.operations.maintenance.alert_channels import (
    AT_ONCE,
    AlertAway,
    AlertChannels,
    mail_of,
)
from infra.operations.maintenance.alert_targets import AlertTargets
from infra.operations.maintenance.alerts import Alerts, alert_alone, collapse_of
from infra.settings.alerts import AlertSettings, MailServer
from infra.settings.git import AllowedAddresses
from schemas.events import RunDeleted
from tests.kit.application import Application, application
from tests.kit.platform import ROOT
from tests.kit.showcase import FAILED, FIRST, SECOND, fill
from tests.kit.strangers import control_process

LOOPBACK = AllowedAddresses(loopback=True)
SECRET = "a-secret-path"

LOOKING_OFTEN = """
from infra.operations.maintenance import alerts

alerts.LOOK_EVERY_S = 0.5
"""
"""A module that Python imports when it starts (`sitecustomize`)."""


def test_a_collapse_is_told_from_means_and_not_from_noise() -> None:
    rising = [n / 100 for n in range(100)]
    assert collapse_of(rising, []) is None
    assert collapse_of([*rising, 0.0], []) is None, "one bad step is noise"
    told = collapse_of([*rising, *[0.1] * 20], [])
    assert told is not None
    assert told.startswith("its reward fell from 0.9")
    assert collapse_of([0.5] * 100, []) is None
    assert collapse_of([*[0.5] * 20, *[0.1] * 20], []) is None, "it had gained nothing"
    assert collapse_of([], [2.0] * 20 + [0.01] * 20) == "its entropy fell from 2 to 0.01"
    assert collapse_of([], [2.0] * 20 + [1.0] * 20) is None
    assert collapse_of([float("nan")] * 50, [float("nan")] * 50) is None
    assert collapse_of(rising[:5], [1.0]) is None


@dataclass
class Receiver:
    """A webhook that answers with these statuses, and then repeats the last one."""

    statuses: list[int] = field(default_factory=lambda: [200])
    got: list[dict[str, Any]] = field(default_factory=list)
    keys: list[str] = field(default_factory=list)
    extra: str = ""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        names = dict(line.split(": ", 1) for line in head.split("\r\n")[1:] if ": " in line)
        lower = {name.lower(): value for name, value in names.items()}
        body = await reader.readexactly(int(lower["content-length"]))
        self.got.append(json.loads(body))
        self.keys.append(lower["idempotency-key"])
        status = self.statuses.pop(0) if len(self.statuses) > 1 else self.statuses[0]
        writer.write(
            f"HTTP/1.1 {status} X\r\n{self.extra}Content-Length: 0\r\nConnection: close\r\n\r\n".encode()
        )
        await writer.drain()
        writer.close()


@asynccontextmanager
async def listening(receiver: Receiver) -> AsyncIterator[str]:
    server = await asyncio.start_server(receiver.serve, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        yield f"http://127.0.0.1:{port}/{SECRET}"


@pytest.fixture
async def app(database_url: str, tmp_path: Path) -> AsyncIterator[Application]:
    async with application(database_url, tmp_path / "home") as served:
        yield served


def alerts_to(app: Application, url: str, **changes: Any) -> Alerts:
    core = app.services
    settings = AlertSettings(webhook=url, **{"allowed": LOOPBACK, **changes})
    return Alerts(
        app.database,
        core.log,
        core.readmodel,
        settings,
        targets=core.alert_targets,
        target_addresses=LOOPBACK,
        public_url="https://train.example.org/",
    )


def channels_of(settings: AlertSettings) -> AlertChannels:
    return AlertChannels(settings, cast("AlertTargets", None), allowed=AllowedAddresses())


async def make_due(app: Application) -> None:
    await app.database.durable.execute("update alerts set due_at = clock_timestamp()")


@pytest.mark.postgres
async def test_ended_and_failed_runs_are_told_once(app: Application) -> None:
    receiver = Receiver()
    async with listening(receiver) as url:
        alerts = alerts_to(app, url)
        await alerts.look()
        await fill(app, steps=3)
        for _ in range(2):
            await alerts.look()
            await alerts.deliver()
    told = {one["run"]: one for one in receiver.got}
    assert len(told) == len(receiver.got)
    assert (told[FIRST]["kind"], told[FIRST]["status"]) == ("ended", "finished")
    assert told[FAILED]["kind"] == "failed"
    assert "ZeroDivisionError" in told[FAILED]["error"]
    assert told[FIRST]["url"] == f"https://train.example.org/runs/{FIRST}"
    assert SECOND not in told


@pytest.mark.postgres
async def test_runs_that_ended_before_alerts_began_cause_none(app: Application) -> None:
    await fill(app, steps=2)
    receiver = Receiver()
    async with listening(receiver) as url:
        alerts = alerts_to(app, url, stalled_min=0)
        await alerts.look()
        await alerts.deliver()
    assert receiver.got == []


@pytest.mark.postgres
async def test_an_alert_is_sent_until_it_is_taken_and_a_crash_repeats_it(
    app: Application, monkeypatch: pytest.MonkeyPatch
) -> None:
    receiver = Receiver([500, 302, 200], extra="Location: http://127.0.0.1:1/\r\n")
    async with listening(receiver) as url:
        alerts = alerts_to(app, url, stalled_min=0)
        await alerts.look()
        await fill(app, steps=2)
        await app.database.durable.execute("delete from runs where run <> $1", FIRST)
        await alerts.look()
        for attempt in (1, 2):
            await alerts.deliver()
            await alerts.deliver()
            assert len(receiver.got) == attempt, "it waits before it is sent again"
            await make_due(app)

        async def crash(self: AlertChannels, channel: str, identity: str, content: str) -> None:
            await sending(self, channel, identity, content)
            raise asyncio.CancelledError

        sending = AlertChannels.send
        monkeypatch.setattr(AlertChannels, "send", crash)
        with pytest.raises(asyncio.CancelledError):
            await alerts.deliver()
        monkeypatch.undo()
        again = alerts_to(app, url, stalled_min=0)
        await again.deliver()
        await again.deliver()
    assert len(receiver.got) == 4
    assert len(set(receiver.keys)) == 1, "the receiver can tell that they are the same"


@pytest.mark.postgres
async def test_one_of_two_control_processes_alerts_and_an_error_does_not_end_it(
    app: Application, database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("infra.operations.maintenance.alerts.LOOK_EVERY_S", 0.05)
    receiver, looks = Receiver(), 0
    look = Alerts.look

    async def fail_first(self: Alerts) -> None:
        nonlocal looks
        looks += 1
        if looks == 1:
            raise ValueError("of a test")
        await look(self)

    monkeypatch.setattr(Alerts, "look", fail_first)
    async with listening(receiver) as url:
        both = [
            asyncio.create_task(alert_alone(alerts_to(app, url, stalled_min=0), database_url))
            for _ in range(2)
        ]
        async with asyncio.timeout(30):
            while not await app.database.durable.fetchval("select count(*) from alerts"):
                await asyncio.sleep(0.05)
            await fill(app, steps=2)
            while len(receiver.got) < 2:
                await asyncio.sleep(0.05)
        for task in both:
            task.cancel()
        await asyncio.gather(*both, return_exceptions=True)
    assert sorted(one["run"] for one in receiver.got) == sorted([FIRST, FAILED])


@pytest.mark.postgres
@pytest.mark.processes
async def test_the_control_process_alerts(
    app: Application, database_url: str, tmp_path: Path
) -> None:
    """A real process looks every 15 seconds, and this one twice in a second."""
    receiver = Receiver()
    (tmp_path / "sitecustomize.py").write_text(LOOKING_OFTEN)
    async with listening(receiver) as url:
        settings = {
            "HEADRACE_ALERT_WEBHOOK": url,
            "HEADRACE_ALERT_ALLOW": "loopback",
            "PYTHONPATH": f"{tmp_path}:{ROOT}",
        }
        with ExitStack() as stack:
            (tmp_path / "control").mkdir()
            running = control_process(database_url, tmp_path / "control", **settings)
            process = await asyncio.to_thread(stack.enter_context, running)
            async with asyncio.timeout(60):
                while not await app.database.durable.fetchval("select count(*) from alerts"):
                    await asyncio.sleep(0.1)
                await fill(app, steps=2)
                while len(receiver.got) < 2:
                    await asyncio.sleep(0.1)
            assert SECRET not in process.log.read_text()
            await asyncio.to_thread(stack.close)
    assert sorted(one["run"] for one in receiver.got) == sorted([FIRST, FAILED])


@pytest.mark.postgres
async def test_a_run_without_progress_is_told_once_for_each_step(app: Application) -> None:
    await fill(app, steps=3)
    receiver = Receiver()
    pool = app.database.durable
    async with listening(receiver) as url:
        alerts = alerts_to(app, url, stalled_min=10)
        for step in (2, 2, 3):
            await pool.execute(
                """update runs set current_step = $2, last_at = clock_timestamp() - interval '11 min'
                where run = $1""",
                SECOND,
                step,
            )
            await alerts.look()
            await alerts.deliver()
    assert [(one["run"], one["kind"], one["step"]) for one in receiver.got] == [
        (SECOND, "stalled", 2),
        (SECOND, "stalled", 3),
    ], "a paused run and a run that waits for approval are not stalled"


@pytest.mark.postgres
async def test_a_collapsed_run_is_told_and_a_deleted_one_leaves_nothing(app: Application) -> None:
    await fill(app, steps=3)
    pool, receiver = app.database.durable, Receiver()
    await pool.execute("update runs set current_step = 60 where run = $1", SECOND)
    await pool.execute("delete from metric_points where run = $1", SECOND)
    await pool.execute(
        """insert into metric_points (run, key, step, value, at)
        select $1, 'rollout/raw_reward', n, case when n < 40 then n / 40.0 else 0 end, now()
        from generate_series(1, 60) n""",
        SECOND,
    )
    async with listening(receiver) as url:
        alerts = alerts_to(app, url, stalled_min=0)
        for _ in range(2):
            await alerts.look()
            await alerts.deliver()
    assert [(one["run"], one["kind"]) for one in receiver.got] == [(SECOND, "collapsed")]
    await app.append([RunDeleted(run=SECOND)])
    assert await pool.fetchval("select count(*) from alerts where run = $1", SECOND) == 0


@pytest.mark.postgres
async def test_each_of_many_runs_is_looked_at_in_its_turn(app: Application) -> None:
    await fill(app, steps=3)
    pool = app.database.durable
    await pool.execute("update runs set current_step = 60 where run = $1", SECOND)
    await pool.execute("delete from metric_points where run = $1", SECOND)
    await pool.execute(
        """insert into metric_points (run, key, step, value, at)
        select $1, 'rollout/raw_reward', n, case when n < 40 then n / 40.0 else 0 end, now()
        from generate_series(1, 60) n""",
        SECOND,
    )
    await pool.execute(
        """insert into runs select (jsonb_populate_record(r, jsonb_build_object(
            'run', '!' || n, 'name', 'healthy-' || n, 'created_at', '2020-01-01'))).*
        from runs r cross join generate_series(1, 100) n where r.run = $1""",
        SECOND,
    )
    receiver = Receiver()
    async with listening(receiver) as url:
        alerts = alerts_to(app, url, stalled_min=0)
        for _ in range(3):
            await alerts.look()
        await alerts.deliver()
    assert [(one["run"], one["kind"]) for one in receiver.got] == [(SECOND, "collapsed")]


async def test_channels_that_were_closed_send_again() -> None:
    receiver = Receiver()
    async with listening(receiver) as url:
        channels = channels_of(AlertSettings(webhook=url, allowed=LOOPBACK))
        for _ in range(2):
            await channels.send("webhook", "x", "{}")
            await channels.aclose()
    assert len(receiver.got) == 2


@pytest.mark.parametrize(
    "url",
    ["http://127.0.0.1:9/", "http://169.254.169.254/latest", "http://10.0.0.1/", "http://[::1]:9/"],
)
async def test_an_address_that_is_not_public_is_not_reached(url: str) -> None:
    channels = channels_of(AlertSettings(webhook=url + SECRET))
    with pytest.raises(AlertAway, match=r"not public.*HEADRACE_ALERT_ALLOW") as refused:
        await channels.send("webhook", "x", "{}")
    assert SECRET not in str(refused.value)
    await channels.aclose()


@pytest.mark.postgres
async def test_no_secret_is_logged_or_stored(
    app: Application, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    server = MailServer("127.0.0.1", 1, False, "user", "a-password")
    receiver = Receiver([500])
    async with listening(receiver) as url:
        alerts = alerts_to(
            app, url, mail_to=("ada@example.org",), mail_from="h@example.org", server=server
        )
        await alerts.look()
        await fill(app, steps=2)
        await alerts.look()
        await alerts.deliver()
    errors = await app.database.durable.fetch("select distinct error from alerts")
    shown = " ".join(str(row["error"]) for row in errors)
    assert "the webhook of 127.0.0.1 answered 500" in shown
    assert "the mail server 127.0.0.1 fails: ConnectionRefusedError" in shown
    ours = [one.getMessage() for one in caplog.records if one.name.startswith("infra")]
    assert ours
    for text in (*ours, shown):
        assert SECRET not in text
        assert "a-password" not in text


def test_a_mail_has_the_alert_and_no_header_of_its_text() -> None:
    way = ("h@example.org", "ada@example.org")
    text = "run x: stalled\r\nBcc: eve@example.org"
    message = mail_of("r/ended", {"text": text, "kind": "stalled", "error": None}, *way)
    assert message["Bcc"] is None
    assert message["Subject"].startswith("Headrace: run x: stalled")
    assert message["To"] == "ada@example.org"
    assert "kind: stalled" in message.get_content()
    assert mail_of("r/ended", {"text": text}, *way)["Message-ID"] == message["Message-ID"]


@asynccontextmanager
async def mail_server(
    lines: list[str], extension: str = "SIZE", refused: str = "nobody@"
) -> AsyncIterator[MailServer]:
    """A mail server that refuses one recipient, and notes what it hears."""
    served: list[asyncio.Task[None]] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if (task := asyncio.current_task()) is not None:
            served.append(task)
        writer.write(b"220 here\r\n")
        in_data = False
        while line := (await reader.readline()).decode():
            lines.append(line.rstrip())
            if in_data:
                in_data = line != ".\r\n"
                if not in_data:
                    writer.write(b"250 taken\r\n")
            elif line.upper().startswith("EHLO"):
                writer.write(f"250-here\r\n250 {extension}\r\n".encode())
            elif line.upper().startswith("DATA"):
                in_data = True
                writer.write(b"354 go on\r\n")
            elif line.upper().startswith("QUIT"):
                writer.write(b"221 bye\r\n")
                break
            elif refused in line:
                writer.write(b"451 later\r\n")
            else:
                writer.write(b"250 ok\r\n")
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield MailServer("127.0.0.1", server.sockets[0].getsockname()[1], False)
    await asyncio.gather(*served)


async def test_mail_is_delivered_and_a_password_is_never_sent_in_clear() -> None:
    lines: list[str] = []
    async with mail_server(lines, "AUTH PLAIN") as server:
        for user in (None, "user"):
            settings = AlertSettings(
                mail_to=("ada@example.org",),
                mail_from="h@example.org",
                server=replace(server, user=user, password=user and "a-password"),
            )
            channels = channels_of(settings)
            content = json.dumps({"text": "run x: finished", "kind": "ended"})
            if user is None:
                await channels.send("mail:ada@example.org", "r/ended", content)
                assert "Subject: Headrace: run x: finished" in lines
                assert any(line.startswith("Date: ") for line in lines)
                continue
            with pytest.raises(AlertAway, match="SMTPException"):
                await channels.send("mail:ada@example.org", "r/ended", content)
    assert not [line for line in lines if line.upper().startswith("AUTH")]


@pytest.mark.postgres
async def test_an_address_that_the_mail_server_refuses_is_tried_again_and_only_that_one(
    app: Application,
) -> None:
    """Of a mail to several addresses, a server may take some. The others were never told."""
    lines: list[str] = []
    async with mail_server(lines, refused="bob@") as server, listening(Receiver()) as url:
        alerts = alerts_to(
            app,
            url,
            mail_to=("ada@example.org", "bob@example.org"),
            mail_from="h@example.org",
            server=server,
        )
        await alerts.look()
        await fill(app, steps=2)
        await app.database.durable.execute("delete from runs where run <> $1", FIRST)
        await alerts.look()
        for _ in range(2):
            await alerts.deliver()
            await make_due(app)
    rows = await app.database.durable.fetch(
        "select channel, sent_at is not null as is_sent, error, attempts"
        " from alerts where channel like 'mail:%'"
    )
    found = {row["channel"]: tuple(row)[1:] for row in rows}
    assert found == {
        "mail:ada@example.org": (True, None, 0),
        "mail:bob@example.org": (False, "the mail server 127.0.0.1 answered 451", 2),
    }
    assert len([line for line in lines if "TO:<ada@" in line]) == 1
    assert len([line for line in lines if "TO:<bob@" in line]) == 2


@pytest.mark.parametrize("drips", [False, True])
async def test_mail_servers_that_do_not_answer_hold_up_no_other_work(
    monkeypatch: pytest.MonkeyPatch, *, drips: bool
) -> None:
    """The threads that read blobs and disks waited behind mails: requests took 30 seconds, and longer
    with a server whose greeting never ends."""
    monkeypatch.setattr("infra.operations.maintenance.alert_channels.TIMEOUT_S", 2.0)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        greeting = b"220-wait\r\n" if drips else b""
        with contextlib.suppress(OSError):
            while not reader.at_eof():
                writer.write(greeting)
                await writer.drain()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(reader.read(100), timeout=0.1)
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    settings = AlertSettings(
        mail_from="h@example.org",
        server=MailServer("127.0.0.1", server.sockets[0].getsockname()[1], False),
    )
    channels = channels_of(settings)
    content = json.dumps({"text": "run x: finished", "kind": "ended"})
    num_default_threads = (os.cpu_count() or 1) + 4
    mails = [
        asyncio.create_task(channels.send(f"mail:{number}@example.org", "r/ended", content))
        for number in range(min(AT_ONCE, num_default_threads + 4))
    ]
    await asyncio.sleep(0.5)
    async with asyncio.timeout(1):
        await asyncio.to_thread(time.sleep, 0.01)  # whatever needs a default thread
    async with asyncio.timeout(20):
        failures = await asyncio.gather(*mails, return_exceptions=True)
    assert all(isinstance(one, AlertAway) for one in failures), failures
    server.close()
