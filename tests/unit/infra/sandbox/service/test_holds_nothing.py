"""A sandbox service has nothing of the process that started it, and does not outlive it."""

import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pydantic
import pytest

from infra.sandbox.service import self_protection
from tests.kit.ordinary_users import may_be_reached_by_all
from tests.kit.platform import eventually

pytestmark = pytest.mark.processes

ROOT = Path(__file__).resolve().parents[5]
HOLDER = "tests.unit.infra.sandbox.service.holder"
CANARIES = {
    "HEADRACE_DATABASE_URL": "postgresql://headrace:canary-database-fa83@127.0.0.1:1/headrace",
    "AWS_SECRET_ACCESS_KEY": "canary-s3-secret-9b1d",
    "HEADRACE_API_KEY": "canary-api-key-41d0",
    "HEADRACE_TOKEN": "canary-api-token-77ae",
    "HEADRACE_SECRET_KEY": "c0ffee" * 10 + "0bad",
}
SYSTEM_PYTHON = Path("/usr/bin/python3")
NOBODY = 65534
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="reads the memory of other processes")


@contextmanager
def holder(
    mode: str, tmp_path: Path, *, user: int | None = None, level: str = "bwrap"
) -> Iterator[dict[str, int]]:
    """A process that holds the canaries and has started a service: the ids of both."""
    short = Path(tempfile.mkdtemp(prefix="h-"))  # the path of a socket is short
    short.chmod(0o777)
    environ = {"PATH": os.environ["PATH"], "TMPDIR": str(short), **CANARIES}
    environ |= {"HEADRACE_HOME": str(tmp_path / "home"), "HEADRACE_SANDBOX": level}
    python = sys.executable
    if user is not None:  # ours may be in a directory of root
        python = str(SYSTEM_PYTHON)
        environ["PYTHONPATH"] = str(Path(pydantic.__file__).parents[1])
    process = subprocess.Popen(
        [python, "-m", HOLDER, mode],
        cwd=ROOT,
        env=environ,
        user=user,
        group=user,
        extra_groups=[] if user is not None else None,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    assert process.stdout is not None
    pids: dict[str, int] = {}
    try:
        pids = {"holder": process.pid, **json.loads(process.stdout.readline())}
        yield pids
    finally:
        if pids.get("fork"):
            os.kill(pids["fork"], signal.SIGKILL)
        process.kill()
        process.communicate()
        shutil.rmtree(short)


def find_canaries(pid: int) -> set[str]:
    """The names of the canaries in the environment and the memory of a process."""
    found = set(_canaries_in(Path(f"/proc/{pid}/environ").read_bytes()))
    with Path(f"/proc/{pid}/mem").open("rb", buffering=0) as memory:
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
            found_area = re.match(r"(\w+)-(\w+) r", line)
            if not found_area or "[vvar" in line or "[vsyscall" in line:
                continue
            first, last = found_area.groups()
            memory.seek(int(first, 16))
            try:
                found |= set(_canaries_in(memory.read(int(last, 16) - int(first, 16))))
            except OSError:
                continue
    return found


def _canaries_in(data: bytes) -> Iterator[str]:
    for name, value in CANARIES.items():
        if value.encode() in data:
            yield name


def exists(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@needs_root
def test_a_service_holds_no_credentials_but_a_fork_would(tmp_path: Path) -> None:
    with holder("fork", tmp_path) as pids:
        assert find_canaries(pids["service"]) == set()
        assert find_canaries(pids["fork"]) == set(CANARIES), "the twin: a plain fork"


@needs_root
@pytest.mark.skipif(
    not may_be_reached_by_all(ROOT), reason="needs a clone that every user can read"
)
@pytest.mark.skipif(
    not SYSTEM_PYTHON.exists()
    or subprocess.run(
        [SYSTEM_PYTHON, "-c", "import sys; print(*sys.version_info[:2])"],
        capture_output=True,
        check=False,
    ).stdout.split()
    != [str(n).encode() for n in sys.version_info[:2]],
    reason="needs a Python of this version that every user can run",
)
def test_a_service_of_a_platform_without_root_holds_no_credentials(tmp_path: Path) -> None:
    with holder("fork", tmp_path, user=NOBODY) as pids:
        assert Path(f"/proc/{pids['fork']}").stat().st_uid == NOBODY
        assert find_canaries(pids["service"]) == set()
        assert find_canaries(pids["fork"]) == set(CANARIES)


@needs_root
def test_a_service_has_four_variables_and_no_descriptors_of_its_parent(tmp_path: Path) -> None:
    with holder("fork", tmp_path) as pids:
        environ = Path(f"/proc/{pids['service']}/environ").read_bytes().rstrip(b"\0").split(b"\0")
        assert {one.split(b"=")[0].decode() for one in environ} == {
            *("PATH", "LANG", "TMPDIR", "HEADRACE_SANDBOX")
        }
        assert not [name for name in files_of(pids["service"]) if name.endswith("holder.py")]
        assert [name for name in files_of(pids["fork"]) if name.endswith("holder.py")], "the twin"
        assert os.getsid(pids["service"]) == pids["service"], "a session of its own"


def files_of(pid: int) -> list[str]:
    return [str(one.readlink()) for one in Path(f"/proc/{pid}/fd").iterdir()]


def await_end(pid: int) -> None:
    eventually(lambda: None if exists(pid) else True, within_s=10, what=f"the end of {pid}")


def descendants_of(pid: int) -> set[int]:
    """The processes that a process has started, with theirs."""
    found: set[int] = set()
    for thread in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in map(int, thread.read_text().split()):
            found |= {child} | descendants_of(child)
    return found


@pytest.mark.parametrize("level", ["bwrap", "process-trusted"])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_nothing_survives_a_worker(tmp_path: Path, number: int, level: str) -> None:
    with holder("run", tmp_path, level=level) as pids:
        code = descendants_of(pids["service"])
        assert code
        os.kill(pids["holder"], number)
        for pid in (pids["service"], *code):
            await_end(pid)


@pytest.mark.parametrize("level", ["bwrap", "process-trusted"])
def test_nothing_survives_a_killed_service(tmp_path: Path, level: str) -> None:
    with holder("run", tmp_path, level=level) as pids:
        code = descendants_of(pids["service"])
        assert code
        os.kill(pids["service"], signal.SIGKILL)
        for pid in code:
            await_end(pid)
        assert exists(pids["holder"])


def test_a_service_imports_nothing_heavy_and_starts_in_a_moment() -> None:
    program = (
        "import sys, resource, infra.sandbox.service.__main__\n"
        "print(*sorted({name.split('.')[0] for name in sys.modules}))\n"
    )
    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True
    )
    spent_s = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before
    assert spent_s < 3.0, "0.2 s of processor time on an idle machine"
    heavy = "asyncpg boto3 botocore torch numpy httpx uvicorn starlette opentelemetry cryptography"
    assert not set(heavy.split()) & set(done.stdout.split())


READ_THE_OTHER = """
import os, sys, time
{hide}
if pid := os.fork():
    time.sleep(0.2)
    os._exit(os.waitpid(pid, 0)[1] >> 8)
for name in ("environ", "mem"):
    try:
        open(f"/proc/{{os.getppid()}}/{{name}}", "rb").close()
        os._exit(1)
    except PermissionError:
        pass
os._exit(0)
"""


@needs_root
@pytest.mark.parametrize("is_hidden", [True, False])
def test_a_hidden_process_cannot_be_read_by_its_own_user(is_hidden: bool) -> None:
    source = Path(self_protection.__file__).read_text()
    program = READ_THE_OTHER.format(hide=source + "\nhide_memory()\n" if is_hidden else "")
    done = subprocess.run(
        [SYSTEM_PYTHON, "-c", program],
        user=NOBODY,
        group=NOBODY,
        extra_groups=[],
        cwd="/",
        check=False,
    )
    assert (done.returncode == 0) is is_hidden


MAINS = {
    "a worker": """
import consumers.process.worker as worker
async def work(*_, **__):
    return show()
worker.work = work
from consumers.process.command import main
main(["rollout"])
""",
    "the control process": """
import producers.serve as control
async def serve(_):
    return show()
control.serve = serve
control.main()
""",
    "the fork server": """
import consumers.process.fork_server as server
server._serve_forks = show
server.IMPORTED, server.REGISTRY = (), {}
server.serve()
""",
}


@pytest.mark.parametrize("name", MAINS)
def test_processes_with_credentials_hide_their_memory(name: str, tmp_path: Path) -> None:
    show = (
        "import ctypes\n"
        "def show():\n"
        "    print('dumpable', ctypes.CDLL(None).prctl(3, 0, 0, 0, 0))\n"
        "    return None\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", show + MAINS[name]],
        cwd=ROOT,
        env={**os.environ, "HEADRACE_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "dumpable 0" in done.stdout, done.stderr
