"""`headrace up`, `down`, `status` and `worker`: commands for the processes of this machine."""

import logging
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from producers.cli.command import command
from producers.cli.display.output import (
    Document,
    Output,
    Part,
    console,
    fields,
    note,
    print_json,
    say,
    table,
)
from producers.cli.display.read_model import description
from producers.cli.display.units import format_duration, format_size
from producers.cli.errors import Failure, Interrupted
from schemas.secrets.redact import redact

if TYPE_CHECKING:
    from infra.operations.local.home import ChildState, SupervisorState
    from producers.cli.client import Client

DOWN_S = 60.0
LINK_USE = "opens once, within 10 minutes"


@command(None, "up", example="headrace up --detach")
@click.option(
    "--detach",
    is_flag=True,
    help="Run in the background: return when server and workers are ready. Says what still starts.",
)
def up(*, detach: bool, as_json: bool) -> None:
    """Start the server, its workers and its database on this machine, and restart them when they die.

    State is kept in HEADRACE_HOME. The server listens at HEADRACE_URL, by default
    http://127.0.0.1:8420. For another port, set HEADRACE_URL=http://127.0.0.1:9000 for this and every
    other command. Ctrl-C, SIGTERM or `headrace down` stops everything.
    """
    from infra.settings.settings import Settings

    settings = Settings.load(os.environ)
    started = time.monotonic()

    def document(pid: int) -> Document:
        return {"url": redact(settings.url), "home": str(settings.home), "pid": pid}

    def ready(pid: int, starting: "Sequence[ChildState]" = ()) -> None:
        took_s = time.monotonic() - started
        if as_json:
            names = [child.name for child in starting]
            print_json({**document(pid), "ready_s": round(took_s, 2), "starting": names})
            return
        say(f"Headrace is ready at {redact(settings.url)} (home {settings.home}, {took_s:.1f} s)")
        for child in starting:
            say(f"Still starting: {child.name}; `headrace status` shows it, its log is {child.log}")
        _say_link()

    if detach:
        pid, starting = _start_detached(settings.home, quiet=as_json)
        if starting is not None:
            ready(pid, starting)
        elif as_json:
            print_json({**document(pid), "starting": ["server"]})
        else:
            say(f"Still starting: the server (pid {pid}); its logs are in {settings.home / 'logs'}")
        return
    from infra.operations.local.home import prepare
    from infra.operations.local.supervisor import supervise
    from infra.sandbox.levels.probe import choose_level

    if settings.sandbox_service is None:
        choose_level(settings.sandbox)  # its error is said once, before anything starts
    prepare(settings.home)
    _log(None if not as_json else settings.home / "logs" / "supervisor.log")
    supervise(settings, os.environ, on_ready=lambda: ready(os.getpid()))


def _start_detached(home: Path, *, quiet: bool) -> "tuple[int, Sequence[ChildState] | None]":
    """Start a supervisor in the background. Returns its pid and the processes that still start, or None
    instead of these if its server does not answer yet. Says what it waits for, unless `quiet`. Raises
    Failure, and Interrupted on SIGINT; the supervisor continues then."""
    from producers.cli.display.waiting import told_while_waiting
    from producers.cli.launch import await_workers, describe_start, is_ready, launch

    try:
        with told_while_waiting(lambda: describe_start(home), quiet=quiet):
            pid = launch(home, os.environ, tied=False).pid
            return pid, await_workers(home) if is_ready(home) else None
    except KeyboardInterrupt as error:
        raise Interrupted(
            "stopped waiting; Headrace goes on starting in the background. `headrace status` shows it, "
            "and `headrace down` stops it"
        ) from error


def _say_link() -> None:
    """Show a link that opens the dashboard once."""
    try:
        say(f"Dashboard: {_new_link()['url']}  ({LINK_USE})")
        say("Another link: headrace open")
    except Failure as failure:
        say(f"Dashboard: sign in with an API key, because no link could be made: {failure.message}")
    sys.stdout.flush()  # `up` goes on, and its reader may be a pipe


def _new_link() -> Document:
    from producers.cli.client import Client

    with Client() as client:
        return client.post("/login-links", {})


@command(None, "open", example="headrace open")
def open_() -> Output:
    """Print a new link that signs a browser in to the dashboard. It opens once, within 10 minutes.

    The browser gets the rights of the API key that this command uses.
    """
    link = _new_link()
    return Output(link, str(link["url"]), note(f"({LINK_USE}; `headrace open` prints another one)"))


def _log(file: Path | None) -> None:
    """Send the supervisor's own log to a file, or to the terminal that it runs in."""
    logging.basicConfig(
        filename=file, level=logging.INFO, format="%(asctime)s supervisor: %(message)s"
    )
    logging.getLogger("httpx").setLevel(logging.WARNING)  # it would log the address of a link


@command(None, "down", example="headrace down")
def down() -> Output:
    """Stop the supervisor of HEADRACE_HOME and all its processes, and wait until they have ended."""
    from infra.operations.local.home import owner
    from infra.settings.settings import Settings

    home = Settings.load(os.environ).home
    pid = owner(home)
    if pid is None:
        raise Failure(
            "NOT_RUNNING", f"no server is running on {home}; start one with `headrace up`"
        )
    os.kill(pid, signal.SIGTERM)
    deadline = time.monotonic() + DOWN_S
    while owner(home) == pid:
        if time.monotonic() > deadline:
            raise Failure("FAILED", f"pid {pid} does not stop; read the logs in {home / 'logs'}")
        time.sleep(0.05)
    return Output({"stopped": pid, "home": str(home)}, f"stopped (pid {pid}, home {home})")


@command(None, "status", example="headrace status --json")
def status(client: "Client") -> Output:
    """Show what is running: processes, workers, waiting work, lag, and the number of runs by status."""
    from dataclasses import asdict

    from infra.operations.local.home import read_state
    from infra.settings.settings import Settings

    state = read_state(Settings.load(os.environ).home)
    answer = client.get("/status")
    supervisor = asdict(state) if state and state.url == client.address.url else None
    url = redact(client.address.url)
    return Output(
        {**answer, "url": url, "supervisor": supervisor},
        _status(answer, url, state if supervisor else None),
    )


def _status(answer: Document, url: str, supervisor: "SupervisorState | None") -> Iterator[Part]:
    pairs = [
        ("server", url),
        ("version", answer.get("version")),
        ("home", answer.get("home")),
        ("supervisor", f"pid {supervisor.pid}" if supervisor else "not on this machine"),
        ("horizon age", f"{answer.get('horizon_age_s') or 0:.1f} s"),
        ("bus", _bus(answer.get("bus"))),
        ("read model", description(answer.get("read_model"))),
        ("lag", _pairs(answer.get("lag"))),
        ("runs", _pairs(answer.get("runs"))),
        *(("waits for", wait["message"]) for wait in answer.get("waiting_for") or ()),
    ]
    yield fields("Headrace", pairs)
    if supervisor:
        rows = [
            (c.name, c.pid or "starting", c.restarts, c.note or "-", c.log)
            for c in supervisor.children
        ]
        yield table("Processes", ("name", "pid", "restarts", "note", "log"), rows)
    workers = [
        (w.get("id"), w.get("host"), w.get("pid"), ", ".join(w.get("lanes") or ()))
        for w in answer.get("workers") or ()
    ]
    yield table("Workers", ("id", "host", "pid", "lanes"), workers)
    lanes = [
        (lane, count.get("waiting"), count.get("claimed"), _age(count.get("oldest_s")))
        for lane, count in (answer.get("effects") or {}).items()
    ]
    yield table("Effects", ("lane", "waiting", "claimed", "oldest waits"), lanes)
    places = [
        (", ".join(one["directories"]), format_size(one["free"]), format_size(one["total"]))
        for one in answer.get("disks") or ()
    ]
    yield table("Disks", ("directories", "free", "size"), places)


def _age(seconds: object) -> str:
    return format_duration(seconds) if isinstance(seconds, float) else "-"


def _bus(bus: object) -> str:
    if not isinstance(bus, dict) or bus.get("kind") != "kafka":
        return "the event log"
    if bus.get("seen_s") is None:
        return "Kafka, not reached yet; events come from the log"
    return f"Kafka, last reached {bus['seen_s']:.0f} s ago, {bus.get('relay_behind')} events to publish"


def _pairs(counts: object) -> str:
    if not isinstance(counts, dict) or not counts:
        return "none"
    return ", ".join(f"{name} {count}" for name, count in counts.items())


@command(None, "worker", example="headrace worker rollout grade --drain")
@click.argument("names", nargs=-1, required=True, metavar="NAME...")
@click.option("--drain", is_flag=True, help="Exit when no work is left.")
@click.option(
    "--lanes", multiple=True, metavar="LANE", help="Do only the work of this lane. Can be repeated."
)
def worker(*, names: tuple[str, ...], drain: bool, lanes: tuple[str, ...], as_json: bool) -> None:
    """Run selected consumers in this process. This is the same as `python -m consumers`.

    It needs HEADRACE_DATABASE_URL, and HEADRACE_BLOBS unless the blobs are in HEADRACE_HOME.
    """
    chosen = ["--lanes", *lanes] if lanes else []
    ends = ["--drain"] if drain else ["--forever"]
    if not as_json:
        console().print(f"consumers: {', '.join(names)}")
    sys.stdout.flush()
    program = [sys.executable, "-P", "-m", "consumers", *names, *ends, *chosen]
    os.execv(sys.executable, program)  # noqa: S606 - the process becomes the worker: no shell
