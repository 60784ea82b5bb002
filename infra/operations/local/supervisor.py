"""`headrace up`: runs the whole platform on one machine under one process.

It starts Postgres (unless HEADRACE_DATABASE_URL names one), migrates its schema, starts the control
process and the device worker, and restarts processes that die. On SIGTERM or SIGINT it stops everything
in order: workers, control, Postgres. It has one thread, which waits for signals and checks leases and
the size of the logs every 2 s, so it uses almost no CPU time while nothing happens. The death of a
child also arrives as a signal. The supervisor then ends the child's lease at once, so that other workers
take over its work without waiting for the lease to expire.
"""

import asyncio
import contextlib
import errno
import http.client
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from infra.adapters import check_blobs
from infra.operations.local import embedded_postgres, home
from infra.operations.local.child import AWAY, Child, ChildSpec, rotate_log
from infra.operations.local.embedded_postgres import EmbeddedPostgres
from infra.operations.local.forkserver import ForkServer, reap_orphans
from infra.operations.local.lost_leases import LeaseWatch, is_stopped, live_workers
from infra.sandbox.service.self_protection import hide_memory
from infra.settings.secret_key import CURRENT, OLDER
from infra.settings.settings import Settings
from infra.spine.postgres.effects import PostgresEffects
from infra.spine.postgres.migrate import migrate
from infra.spine.postgres.pool import connect
from schemas.errors import Conflict, HeadraceError, Refused, TransientError
from schemas.ids import WorkerId

logger = logging.getLogger(__name__)

SAMPLER = ("run", "rollout", "grade", "evaluate", "publish", "regrade")
LEARNER = ("learn", "checkpoint", "verify", "compare")
DEVICE_CONSUMERS = (*SAMPLER, *LEARNER)
OPENERS = frozenset({"rollout", "grade", "publish", "regrade"})
"""The consumers that open secrets, because they run user code, ask providers' models or upload to a hub.
Other workers do not get the key."""

HOSTED: dict[str, dict[str, tuple[str, ...]]] = {
    "one": {"worker": DEVICE_CONSUMERS},
    "two": {"sampler": SAMPLER, "learner": LEARNER},
    "each": {name: (name,) for name in DEVICE_CONSUMERS},
}
"""The setting `workers` -> process -> the consumers that it hosts."""

SERVING = ("deploy",)
"""The consumer of the process that serves deployments."""

PYTHON = (sys.executable, "-P", "-m")
"""The command that runs a module. With -P, the current directory cannot shadow our modules."""
STOP = frozenset({signal.SIGTERM, signal.SIGINT})
WATCHED = STOP | {signal.SIGCHLD}
VLLM_STOP_S = 30.0
SPIN = "2000"
"""How often a thread of numerical code checks for work before it sleeps. It lasts some 100 us, longer
than the time between two matrix products. Waking a thread costs as much as a small product."""
READY_POLL_S = 0.05
READY_S = 120.0
REVIVE_S = 3.0
"""The embedded server is started again at most this often."""
LOGS_S, FLOODED_LOGS_S = 2.0, 0.1
"""How often the size of the logs is checked, and how often while one of them grows fast."""
FLOOD_BYTES = 1 << 20
"""A log that grew by more than this since the last check grows fast."""
NO_LEASE = "no lease for"
WAITS = "waits:"
EARLY_DEATHS = 3
"""After this many deaths of the control process before it ever answered, `headrace up` fails."""


def supervise(
    settings: Settings,
    environ: Mapping[str, str],
    *,
    on_ready: Callable[[], None],
    identities: Mapping[str, Mapping[str, str]] = {},
) -> None:
    """Run until SIGTERM or SIGINT. Calls `on_ready` once, when the server answers. `identities` has
    variables of single child processes by their names, such as the login of each.

    Raises Conflict when another supervisor owns the home or the port is in use, and InvalidConfig or
    TransientError when the blob store, the database or the control process cannot be used. Raises
    Refused when the control process dies EARLY_DEATHS times before it answers.
    """
    hide_memory()
    home.prepare(settings.home)
    with home.own(settings.home):
        check_port(settings.host, settings.port)
        asyncio.run(check_blobs(settings))
        with _database(settings) as (url, server):
            asyncio.run(migrate(url))
            wanted = [
                replace(spec, env_vars={**spec.env_vars, **identities.get(spec.name, {})})
                for spec in child_specs(settings, environ, database_url=url)
            ]
            logs = settings.home / "logs"
            forks = fork_server(wanted, log=logs / "forkserver.log")
            children = tuple(
                Child(spec, log=logs / f"{spec.name}.log", forks=forks) for spec in wanted
            )
            Supervisor(settings, children, url=url, server=server, forks=forks).run(on_ready)


def check_port(host: str, port: int) -> None:
    """Raise Conflict when no server can listen there. It says why and what to do."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise Conflict(
                f"port {port} on {host} cannot be used: {_why_not_bound(host, port, error)}"
            ) from error


def _why_not_bound(host: str, port: int, error: OSError) -> str:
    another = f"set HEADRACE_URL=http://{_in_url(host)}:PORT to another port"
    if error.errno in (errno.EACCES, errno.EPERM):
        return (
            f"this user may not listen there ({error.strerror}), because ports below 1024 need the "
            f"rights of root; {another}, such as 8080"
        )
    if error.errno == errno.EADDRNOTAVAIL:
        return (
            f"this machine does not have the address {host} ({error.strerror}); set HEADRACE_URL to an "
            f"address of this machine, such as http://127.0.0.1:{port}"
        )
    return f"{error.strerror}; stop the process that listens there, or {another}"


def _in_url(host: str) -> str:
    return f"[{host}]" if ":" in host else host


@contextmanager
def _database(settings: Settings) -> Iterator[tuple[str, EmbeddedPostgres | None]]:
    """The database's URL, and the embedded server if we run one."""
    if settings.database_url is not None:
        yield settings.database_url, None
        return
    server = embedded_postgres.start(settings.home)
    try:
        yield server.url, server
    finally:
        server.stop()


def child_specs(
    settings: Settings, environ: Mapping[str, str], *, database_url: str
) -> tuple[ChildSpec, ...]:
    """The processes of one machine. `settings.workers` chooses between one device worker that hosts all
    consumers, a sampler and a learner, and a worker for each consumer, as on a cluster. One more process
    serves deployments, and a vLLM server is added if one is configured. It stops after the workers that
    use it.

    Threads of numerical code are limited. A device worker uses all cores, or half of them when two work
    at the same time. Waiting threads spin for a moment and then sleep, because other processes need the
    cores too."""
    shared = {
        **environ,
        "HEADRACE_HOME": str(settings.home),
        "HEADRACE_URL": settings.url,
        "HEADRACE_DATABASE_URL": database_url,
        "PYTHONUNBUFFERED": "1",
        "OMP_WAIT_POLICY": environ.get("OMP_WAIT_POLICY", "PASSIVE"),
        "GOMP_SPINCOUNT": environ.get("GOMP_SPINCOUNT", SPIN),
    }
    cores = len(os.sched_getaffinity(0))
    threads = max(1, cores // 2) if settings.workers == "two" else cores
    keyless = {name: value for name, value in shared.items() if name not in (CURRENT, OLDER)}
    device = {"OMP_NUM_THREADS": environ.get("OMP_NUM_THREADS", str(threads))}
    control = (*PYTHON, "producers.serve")
    hosted = HOSTED[settings.workers]
    beside = settings.vllm.server if settings.vllm else None
    return (
        ChildSpec("control", control, {**shared, "OMP_NUM_THREADS": "1"}, stop_s=8, leased=True),
        *(
            [ChildSpec("vllm", beside.argv, beside.env_vars(keyless), VLLM_STOP_S)]
            if beside
            else ()
        ),
        *(
            ChildSpec(
                name,
                (*PYTHON, "consumers", *consumers, "--forever"),
                {**(shared if OPENERS & {*consumers} else keyless), **device},
                stop_s=15,
                forked=(*consumers, "--forever"),
                leased=True,
            )
            for name, consumers in hosted.items()
        ),
        *(
            [_serving_spec({**keyless, **device}, with_vllm=settings.vllm is not None)]
            if settings.serving.max_deployments
            else ()
        ),
    )


def _serving_spec(env_vars: Mapping[str, str], *, with_vllm: bool) -> ChildSpec:
    """The process that serves deployments. With vLLM it needs no GPU of its own."""
    hidden = {"CUDA_VISIBLE_DEVICES": ""} if with_vllm else {}
    return ChildSpec(
        "serving",
        (*PYTHON, "consumers", *SERVING, "--forever"),
        {**env_vars, **hidden},
        stop_s=15,
        forked=(*SERVING, "--forever"),
        leased=True,
    )


def fork_server(wanted: Sequence[ChildSpec], *, log: Path) -> ForkServer:
    """The process that device workers are forked from. It imports the libraries that they need, in the
    environment that they share."""
    shared = next(spec.env_vars for spec in wanted if spec.forked is not None)
    env_vars = {name: value for name, value in shared.items() if name not in (CURRENT, OLDER)}
    return ForkServer((*PYTHON, "consumers.process.fork_server"), env_vars, log=log)


class Supervisor:
    """Keeps `children` alive, and stops them in reverse order at the end."""

    def __init__(
        self,
        settings: Settings,
        children: tuple[Child, ...],
        *,
        url: str,
        server: EmbeddedPostgres | None = None,
        forks: ForkServer | None = None,
    ) -> None:
        self._settings = settings
        self._children = children
        self._url = url
        self._server = server
        self._forks = forks
        self._revived_at = 0.0
        self._started_at = datetime.now(UTC).isoformat()
        self._ready_by = time.monotonic() + READY_S
        self._ready = False
        self._watch = LeaseWatch()
        self._log_sizes: dict[Path, int] = {}
        self._is_flooded = False

    def run(self, on_ready: Callable[[], None]) -> None:
        """Start the children and restart those that die. Returns after everything is stopped. Raises
        Refused or TransientError when the control process does not start."""
        former = signal.pthread_sigmask(signal.SIG_BLOCK, WATCHED)
        try:
            while not self._wait_for_stop():
                self._restart()
                self._check_leases()
                self._rotate_logs()
                if not self._ready and self._is_ready():
                    self._ready = True
                    self._save_state()
                    on_ready()
        finally:
            for child in reversed(self._children):
                child.stop()
            if self._forks is not None:
                self._forks.stop()
            signal.pthread_sigmask(signal.SIG_SETMASK, former)

    def _rotate_logs(self) -> None:
        """Keep each log and its rotated part below their size limit."""
        logs = [*(self._settings.home / "logs").glob("*.log")]
        sizes = {}
        for log in (*logs, self._server.log) if self._server else logs:
            rotate_log(log)
            with contextlib.suppress(OSError):
                sizes[log] = log.stat().st_size
        before = {log: self._log_sizes.get(log, 0) for log in sizes}
        self._is_flooded = any(  # a log that is smaller was put aside just now
            not before[log] <= size <= before[log] + FLOOD_BYTES for log, size in sizes.items()
        )
        self._log_sizes = sizes

    def _wait_for_stop(self) -> bool:
        """Wait for a signal, or until something is due. Returns True if the signal was SIGTERM or
        SIGINT."""
        due = [FLOODED_LOGS_S if self._is_flooded else LOGS_S]
        due += [
            READY_POLL_S if child.should_wait() else s
            for child in self._children
            if (s := child.due_in_s()) is not None
        ]
        if self._forks is not None and (s := self._forks.due_in_s()) is not None:
            due.append(s)
        if self._server is not None and self._server.process.poll() is not None:
            due.append(max(0.0, self._revived_at + REVIVE_S - time.monotonic()))
        if not self._ready:
            due.append(READY_POLL_S)
        if self._leased_children():
            due.append(self._watch.due_in_s())
        came = signal.sigtimedwait(WATCHED, min(due))
        return came is not None and came.si_signo in STOP

    def _revive(self) -> bool:
        """Start the embedded server again if it died, even if its disk may still be full, because
        nothing else would. Returns whether it was started."""
        server = self._server
        if server is None or server.process.poll() is None:
            return False
        if time.monotonic() < self._revived_at + REVIVE_S:
            return False
        code = server.process.returncode
        logger.warning("postgres ended with exit code %s; starting it again", code)
        self._revived_at = time.monotonic()
        server.revive()
        return True

    def _restart(self) -> None:
        changed = self._revive()
        if self._forks is not None:
            self._forks.ensure_running()
        for child in self._children:
            code = child.reap()
            if code == AWAY:
                self._note_wait(child)
                self._fail_early(child)
            elif code is not None:
                logger.warning("%s ended with exit code %s", child.spec.name, code)
                self._expire(child)
                self._fail_early(child)
            if child.due_in_s() == 0.0 and not child.should_wait():
                child.start()
                changed = True
        if self._forks is not None:
            reap_orphans(self._waited_pids(self._forks))
        if changed:
            self._save_state()

    def _leased_children(self) -> dict[str, Child]:
        """The running children that should hold a lease, by worker id."""
        return {c.worker: c for c in self._children if c.spec.leased and c.pid is not None}

    def _check_leases(self) -> None:
        """Kill children that have had no lease for too long. They do no work, and block their claims."""
        if self._watch.due_in_s() > 0 or not (running := self._leased_children()):
            return
        still = {w for w, child in running.items() if child.pid and is_stopped(child.pid)}
        live = asyncio.run(live_workers(self._url, running.keys()))
        without = self._watch.observe(running.keys(), live, still=still)
        changed = False
        for worker, child in running.items():
            note = "" if child.note.startswith(NO_LEASE) else child.note
            if note.startswith(WAITS) and live is not None and worker in live:
                logger.info("%s works again", child.spec.name)
                note = ""
            if worker in without and not self._watch.is_starting(worker, without[worker]):
                note = f"{NO_LEASE} {without[worker]:.0f} s"
                if self._watch.is_overdue(worker, without[worker]):
                    logger.error(
                        "killing %s (pid %s): it is alive but has %s", worker, child.pid, note
                    )
                    note = f"was killed: {note}"
                    child.kill()
            changed |= note != child.note
            child.note = note
        if changed:
            self._save_state()

    def _note_wait(self, child: Child) -> None:
        """Say once, also in the state file, that a child could not work because something is away."""
        if not child.note.startswith(WAITS):
            why = tail(child.log, num_bytes=300).rpartition("\n")[2]
            child.note = f"{WAITS} {why}"
            logger.warning(
                "%s cannot work now and is started again until it can: %s", child.spec.name, why
            )
            self._save_state()

    def _waited_pids(self, forks: ForkServer) -> set[int]:
        """The pids of child processes that something in this process waits for."""
        server = self._server.process.pid if self._server else None
        pids = (server, forks.pid, *(child.state.pid for child in self._children))
        return {pid for pid in pids if pid is not None}

    def _expire(self, child: Child) -> None:
        """End the dead child's lease. If the database is not available, the lease expires by itself."""
        try:
            asyncio.run(_expire(self._url, child.worker))
        except (HeadraceError, OSError) as error:
            logger.warning(
                "the lease of %s could not be ended, it expires by itself: %s", child.worker, error
            )

    def _fail_early(self, child: Child) -> None:
        if self._ready or child is not self._children[0] or child.starts < EARLY_DEATHS:
            return
        raise Refused(
            f"the {child.spec.name} process does not start; see the end of {child.log}:\n"
            f"{tail(child.log)}"
        )

    def _is_ready(self) -> bool:
        """Whether the control process answers /readyz. Raises TransientError after READY_S."""
        if time.monotonic() > self._ready_by:
            raise TransientError(
                f"the server did not answer within {READY_S:.0f} s; see its log, "
                f"{self._children[0].log}"
            )
        connection = http.client.HTTPConnection(self._settings.host, self._settings.port, timeout=2)
        try:
            connection.request("GET", "/readyz")
            return connection.getresponse().status == 200
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()

    def _save_state(self) -> None:
        """Write the state file. Only `headrace status` reads it, so an error such as a full disk is only
        logged."""
        state = home.SupervisorState(
            pid=os.getpid(),
            url=self._settings.url,
            ready=self._ready,
            started_at=self._started_at,
            postgres_pid=self._server.process.pid if self._server else None,
            children=tuple(child.state for child in self._children),
        )
        try:
            home.write_state(self._settings.home, state)
        except OSError as error:
            logger.warning("the state file of the supervisor cannot be written: %s", error)


async def _expire(url: str, worker: str) -> None:
    async with connect(url, size=1) as database:
        await PostgresEffects(database).expire(WorkerId(worker))


def tail(path: Path, *, num_bytes: int = 2000) -> str:
    """The last `num_bytes` bytes of a log, as text."""
    if not path.exists():
        return "(no log)"
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - num_bytes))
        return file.read().decode(errors="replace").strip()
