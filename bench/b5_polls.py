"""B5, polls: the CPU time of one poll of 1,000 unchanged repositories, all processes of git included.

The repositories have 20 branches and tags each. `local`: as directories of this machine, so that the
serving side counts too. `http`: one server of this machine, whose own CPU time is left out.
"""

import argparse
import asyncio
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from infra.git import mirrors, process
from infra.git.mirrors import GitRepositories
from infra.memory.event_log import MemoryLog, World
from infra.ports.clock import SystemClock
from infra.readmodel.deliveries import KnownRefs
from producers.core.polling import Ages, Poller, RefSources

NUM_REFS = 20
MOST_CPU_S = 10.0

SERVER = """
import sys
from pathlib import Path
from tests.kit.git_server import GitServer
server = GitServer(Path(sys.argv[1]))
print(server.port, flush=True)
server._server.serve_forever()
"""


@dataclass(frozen=True)
class Repository:
    """A connected repository."""

    workspace: str
    url: str


def make_repositories(root: Path, *, count: int) -> list[Path]:
    """Copies of one bare repository."""
    first = root / "r0.git"
    user = {"GIT_AUTHOR_NAME": "b", "GIT_AUTHOR_EMAIL": "b@example.org"}
    user |= {name.replace("AUTHOR", "COMMITTER"): value for name, value in user.items()}
    environment = {**os.environ, **user}

    def git(*arguments: str, send: str = "") -> str:
        done = subprocess.run(
            ["git", "-C", str(first), *arguments],
            env=environment, input=send.encode(), check=True, capture_output=True,
        )  # fmt: skip
        return done.stdout.decode().strip()

    subprocess.run(["git", "init", "-q", "--bare", "-b", "main", str(first)], check=True)
    sha = git("commit-tree", "-m", "x", git("mktree"))
    names = [f"heads/b{n}" for n in range(NUM_REFS - 2)] + ["heads/main", "tags/v1"]
    git("update-ref", "--stdin", send="".join(f"create refs/{name} {sha}\n" for name in names))
    git("pack-refs", "--all")
    shutil.rmtree(first / "hooks", ignore_errors=True)
    copies = [root / f"r{number}.git" for number in range(1, count)]
    for copy in copies:
        shutil.copytree(first, copy)
    return [first, *copies]


@contextmanager
def serving(root: Path) -> Iterator[str]:
    """A git server in a process of its own. Yields its address."""
    command = [sys.executable, "-c", SERVER, str(root)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as server:
        assert server.stdout is not None
        try:
            yield f"http://127.0.0.1:{int(server.stdout.readline())}"
        finally:
            server.kill()


def cpu_s() -> float:
    """The CPU time of this process and of its children that have ended."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


async def measure(home: Path, urls: Sequence[str]) -> tuple[float, float]:
    """One poll of repositories whose refs sync knows. Returns its seconds of CPU time and of time."""
    git = GitRepositories(home)
    digest = (await git.list_refs("warm", urls[0])).digest
    connected = [Repository(f"w{number}", url) for number, url in enumerate(urls)]
    log = MemoryLog(World())

    async def connections() -> Sequence[Repository]:
        return connected

    async def known(workspaces: Sequence[str]) -> Mapping[str, KnownRefs]:
        return {name: KnownRefs(digest, None) for name in workspaces}

    sources = RefSources(connections, partial(git.list_refs, background=True), known)
    clock = SystemClock()
    ages = Ages(clock)
    poller = Poller(log, sources, clock, ages, every_s=60.0)
    used, began = cpu_s(), time.perf_counter()
    await poller.poll_all()
    spent = cpu_s() - used, time.perf_counter() - began
    if len(ages.seconds()) != len(urls):
        raise SystemExit("not every repository answered")
    return spent


def main() -> None:
    """Measure and print. Ends with an error when the poll costs more than MOST_CPU_S."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repositories", type=int, default=1000)
    count: int = parser.parse_args().repositories
    mirrors.SCHEMES = (*mirrors.SCHEMES, "http")  # a server of this machine has no certificate
    process.PROTOCOLS = (*process.PROTOCOLS, "http")
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "served"
        root.mkdir()
        paths = make_repositories(root, count=count)
        local = asyncio.run(measure(Path(folder) / "local", [str(path) for path in paths]))
        with serving(root) as address:
            urls = [f"{address}/{path.name}" for path in paths]
            http = asyncio.run(measure(Path(folder) / "http", urls))
    for name, (cpu, seconds) in (("local", local), ("http", http)):
        print(f"{name:6} {count} repositories: {cpu:6.2f} s of CPU, {seconds:6.2f} s in all")
    if max(local[0], http[0]) > MOST_CPU_S * count / 1000:
        raise SystemExit(f"a poll of {count} repositories costs more than {MOST_CPU_S:g} s of CPU")


if __name__ == "__main__":
    main()
