"""B5, polls: the CPU time of one poll of 1,000 unchanged repositories, all processes of git included.

The repositories have 20 branches and tags each. `directories`: of this machine, so that the serving side
counts too. `https`: one server of this machine, whose own CPU time is left out. `https by git`: the same
with a git process for each question, as for a server that has only an older protocol.
"""

import argparse
import asyncio
import os
import resource
import shutil
import ssl
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from infra.readmodel.deliveries import KnownRefs
from infra.repositories.git.mirrors import GitRepositories
from infra.repositories.git.smart_http import SmartHttp
from infra.settings.git import LAPTOP
from infra.spine.memory.event_log import MemoryLog, World
from infra.spine.ports.clock import SystemClock
from producers.core.repositories.polling import Ages, Poller, RefSources

NUM_REFS = 20
MOST_CPU_S = 10.0

SERVER = """
import ssl, sys
from pathlib import Path
from infra.settings.git import LAPTOP
from tests.kit.git_server import GitServer
server = GitServer(Path(sys.argv[1]))
context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
context.load_cert_chain(*sys.argv[2:4])
server._server.socket = context.wrap_socket(server._server.socket, server_side=True)
print(server.port, flush=True)
server._server.serve_forever()
"""
CERTIFICATE = (
    "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=localhost"
    " -addext subjectAltName=DNS:localhost"
)


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
def serving(root: Path, folder: Path) -> Iterator[str]:
    """A git server in a process of its own, with a certificate that this process trusts too. Yields its
    address."""
    certificate, key = folder / "certificate.pem", folder / "key.pem"
    make = [*CERTIFICATE.split(), "-out", str(certificate), "-keyout", str(key)]
    subprocess.run(make, check=True, capture_output=True)
    trusted = ssl.get_default_verify_paths().cafile or "/etc/ssl/certs/ca-certificates.crt"
    both = folder / "trusted.pem"
    both.write_text(Path(trusted).read_text() + certificate.read_text())
    os.environ["SSL_CERT_FILE"] = os.environ["GIT_SSL_CAINFO"] = str(both)
    command = [sys.executable, "-c", SERVER, str(root), str(certificate), str(key)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as server:
        assert server.stdout is not None
        try:
            yield f"https://localhost:{int(server.stdout.readline())}"
        finally:
            server.kill()


def cpu_s() -> float:
    """The CPU time of this process and of its children that have ended."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


async def measure(home: Path, urls: Sequence[str], *, is_smart: bool = True) -> tuple[float, float]:
    """One poll of repositories whose refs sync knows. Returns its seconds of CPU time and of time."""
    async with SmartHttp(LAPTOP.addresses) as smart:
        return await _measure(
            GitRepositories(home, smart_http=smart if is_smart else None, settings=LAPTOP), urls
        )


async def _measure(git: GitRepositories, urls: Sequence[str]) -> tuple[float, float]:
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
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "served"
        root.mkdir()
        paths = make_repositories(root, count=count)
        home = Path(folder) / "home"
        spent = {"directories": asyncio.run(measure(home, [str(path) for path in paths]))}
        with serving(root, Path(folder)) as address:
            urls = [f"{address}/{path.name}" for path in paths]
            spent["https"] = asyncio.run(measure(home, urls))
            few = urls[: max(1, count // 10)]
            by_git = asyncio.run(measure(home, few, is_smart=False))
    for name, (cpu, seconds) in spent.items():
        print(f"{name:14} {count:5} repositories: {cpu:6.2f} s of CPU, {seconds:6.2f} s in all")
    print(f"{'https by git':14} {len(few):5} repositories: {by_git[0]:6.2f} s of CPU")
    if max(cpu for cpu, _ in spent.values()) > MOST_CPU_S * count / 1000:
        raise SystemExit(f"a poll of {count} repositories costs more than {MOST_CPU_S:g} s of CPU")


if __name__ == "__main__":
    main()
