"""A git server that lies in 70 ways: nothing outside is reached, nothing is left, and requests to the
same process are answered all the while."""

import asyncio
import gc
import json
import resource
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from ipaddress import ip_network
from pathlib import Path

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from infra.http.limits import ConnectionLimits
from infra.http.server import HttpServer
from infra.ports.services import RefList
from infra.repositories.git import access, commits, mirrors, process, redirects, refs, smart_http
from infra.repositories.git.access import NO_PINS
from infra.repositories.git.confinement import find_confinement
from infra.repositories.git.credentials import GitCredential, TokenCredential
from infra.repositories.git.mirrors import GitRepositories
from infra.repositories.git.smart_http import SmartHttp
from infra.repositories.git.storage import size_of
from infra.settings.git import AllowedAddresses, GitSettings
from schemas.errors import HeadraceError, Refused
from schemas.specs import CommitSpec
from tests.kit.hostile_git_server import LIES
from tests.kit.raw_repository import FILE, RawRepository
from tests.stack.certificate import make_certificate
from tests.unit.infra.repositories.git.hostile.test_hostile_repositories import (
    files_of,
    outcome,
    processes_of,
)

pytestmark = pytest.mark.attacks

HOST, REBINDS = "git.example.org", "rebinds.example.org"
HELD = {"f": b"true\n"}
QUOTA = 16 << 20
WORST_S, QUIET_S = 0.2, 0.02
TOKEN = TokenCredential("bot", "a-token-that-nobody-else-gets")

PROBE = """
import http.client, sys, threading, time
ports, ended = [int(one) for one in sys.argv[1:]], threading.Event()
worst = {port: 0.0 for port in ports}
threading.Thread(target=lambda: (sys.stdin.read(), ended.set()), daemon=True).start()
while not ended.wait(0.01):
    for port in ports:
        began = time.perf_counter()
        asked = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
        asked.request("GET", "/healthz")
        assert asked.getresponse().status in (200, 204)
        asked.close()
        worst[port] = max(worst[port], time.perf_counter() - began)
print(*worst.values())
"""
"""Asks some ports in turn until its input ends, and prints the longest wait of each in seconds."""

IDLE = """
import asyncio
async def talk(reader, writer):
    await reader.readuntil(b"\\r\\n\\r\\n")
    writer.write(b"HTTP/1.1 204 No\\r\\nConnection: close\\r\\n\\r\\n")
    writer.close()
async def main():
    server = await asyncio.start_server(talk, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()
asyncio.run(main())
"""
"""A server that does nothing else. Its waits are those of the machine, not of git."""


@dataclass
class Scene:
    """The hostile server, what it was asked, and a port of this machine that nobody may reach."""

    port: int
    log: Path
    reached: list[bytes] = field(default_factory=list)

    def url(self, kind: str) -> str:
        return f"https://{HOST}:{self.port}/{kind}/source"

    def asked(self) -> list[dict[str, str | None]]:
        return [json.loads(line) for line in self.log.read_text().splitlines()]


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    root = tmp_path_factory.mktemp("hostile")
    source = RawRepository(root / "source")
    source.publish(source.tree([(FILE, b"f", source.blob(HELD["f"]))]))
    source.configure("[uploadpack]\n\tallowAnySHA1InWant = true\n")
    files = make_certificate(root, HOST, REBINDS)
    log = root / "log"
    log.touch()
    command = [sys.executable, "-m", "tests.kit.hostile_git_server"]
    arguments = [str(root), str(files.certificate), str(files.key), str(log)]
    with (
        pytest.MonkeyPatch.context() as patch,
        socket.create_server(("127.0.0.1", 0)) as canary,
        subprocess.Popen([*command, *arguments], stdout=subprocess.PIPE) as server,
    ):
        for name in ("SSL_CERT_FILE", "GIT_SSL_CAINFO"):
            patch.setenv(name, str(files.certificate))
        (root / "canary-port").write_text(str(canary.getsockname()[1]))
        assert server.stdout is not None
        found = Scene(int(server.stdout.readline()), log)
        threading.Thread(target=_watch, args=(canary, found.reached), daemon=True).start()
        try:
            yield found
        finally:
            server.kill()


def _watch(canary: socket.socket, reached: list[bytes]) -> None:
    """Note every connection."""
    while True:
        try:
            connection, _ = canary.accept()
        except OSError:
            return
        reached.append(connection.recv(100))
        connection.close()


@dataclass
class Names:
    """A resolver. One name has a public address when it is first asked for, and a loopback address ever
    after."""

    rebinds: bool = True
    asked: list[str] = field(default_factory=list)

    async def resolve(self, host: str, port: int) -> tuple[str, ...]:
        self.asked.append(host)
        is_first = self.asked.count(REBINDS) == 1
        is_public = self.rebinds and is_first and host == REBINDS
        return ("198.51.100.7",) if is_public else ("127.0.0.1",)


NOBODY = ip_network("198.51.100.0/24")
ALLOWED = AllowedAddresses(hosts=frozenset({HOST}), networks=(NOBODY,))
"""The server, and a network where nobody answers, taken for a public one."""


@pytest.fixture(autouse=True)
def short_deadlines(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same limits, sooner."""
    monkeypatch.setattr(refs, "ASK_S", 3.0)
    monkeypatch.setattr(commits, "FETCH_S", 3.0)
    monkeypatch.setattr(mirrors, "WORK_S", 8.0)
    monkeypatch.setattr(smart_http, "DEADLINE_S", 2.0)
    monkeypatch.setattr(redirects, "ASK_S", 2.0)
    monkeypatch.setattr(process, "CPU_S", 1)


@contextmanager
def probing(port: int) -> Iterator[Callable[[], tuple[float, float]]]:
    """Ask `/healthz` from another process until the function is called, which returns the longest wait
    and that of an idle server. A test that serves `/healthz` itself calls it in another thread, because
    the last request waits for an answer."""
    begin = [sys.executable, "-c"]
    with subprocess.Popen([*begin, IDLE], stdout=subprocess.PIPE) as idle:
        assert idle.stdout is not None
        command = [*begin, PROBE, str(port), idle.stdout.readline().decode().strip()]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as probe:

            def longest_waits() -> tuple[float, float]:
                ours, of_idle = probe.communicate()[0].split()
                return float(ours), float(of_idle)

            try:
                yield longest_waits
            finally:
                probe.kill()
                idle.kill()


async def healthy(_: Request) -> Response:
    return Response(status_code=204)


async def watch_loop(held: list[float]) -> None:
    """Note the longest time for which this thread worked before other tasks had their turn, in seconds
    of its CPU, which do not depend on what else the machine does."""
    while True:
        before = time.thread_time()
        await asyncio.sleep(0.002)
        held[0] = max(held[0], time.thread_time() - before)


async def login(_: str) -> GitCredential | None:
    return TOKEN


async def glance(repositories: GitRepositories, url: str) -> list[object]:
    """List the refs of a repository, and read the files of its branch."""
    listed = await outcome(repositories.list_refs("w", url))
    sha = await outcome(repositories.fetch("w", CommitSpec(url=url, branch="main")))
    files = await outcome(repositories.snapshot("w", sha)) if isinstance(sha, str) else sha
    return [listed, files]


async def tell(scene: Scene, root: Path, kinds: list[str]) -> dict[str, list[object]]:
    """Read the repository of every kind at the same time, and return all results."""
    names, found = Names(), dict[str, list[object]]()
    turns = asyncio.Semaphore(8)
    settings, confinement = GitSettings(ALLOWED, quota_bytes=QUOTA), find_confinement("bwrap")
    async with SmartHttp(ALLOWED, resolve=names.resolve) as smart:

        async def one(kind: str) -> None:
            async with turns:
                repositories = GitRepositories(
                    root / kind,
                    login,
                    settings=settings,
                    resolve=names.resolve,
                    smart_http=smart,
                    confinement=confinement,
                )
                found[kind] = await glance(repositories, scene.url(kind))

        await asyncio.gather(*map(one, kinds))
    return found


@pytest.fixture
def small_heap() -> Iterator[None]:
    """Keep what other tests left out of garbage collections, which would hold the loop. The control
    process does this when it starts."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.mark.usefixtures("small_heap")
async def test_no_lie_of_a_server_has_an_effect(
    scene: Scene, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    canary = tmp_path / "canary"
    canary.mkdir()
    monkeypatch.setenv("HOME", str(canary))
    limits = ConnectionLimits(head_s=10, body_s=60, body_rate=16 << 10)
    app = Starlette(routes=[Route("/healthz", healthy)])
    server = HttpServer(app, host="127.0.0.1", port=0, limits=limits)
    await server.listen()
    serving = asyncio.ensure_future(server.serve())
    held = [0.0]
    watching = asyncio.ensure_future(watch_loop(held))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with probing(server.port) as longest_waits:
        found = await tell(scene, tmp_path / "mirrors", sorted(LIES))
        ours, idle = await asyncio.to_thread(longest_waits)
    server.stop()
    await serving
    watching.cancel()
    wrong = {
        kind: results[1]
        for kind, results in found.items()
        if not isinstance(results[1], HeadraceError) and files_of(results[1]) != HELD
    }
    assert wrong == {}
    assert files_of(found["true"][1]) == HELD
    assert files_of(found["cookie"][1]) == HELD
    assert scene.reached == [], "a redirect led to this machine"
    assert list(canary.iterdir()) == []
    assert processes_of(tmp_path) == []
    assert size_of(tmp_path / "mirrors") < QUOTA
    told = [str(one) for results in found.values() for one in results if isinstance(one, Exception)]
    assert not any("\x1b" in text or TOKEN.token in text for text in told)
    asked = scene.asked()
    assert {one["host"] for one in asked} == {f"{HOST}:{scene.port}"}
    assert not any(one["cookie"] for one in asked)
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss << 10 < 2 << 30
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) << 10 < 256 << 20
    assert max(held) < WORST_S, f"the loop was held for {max(held):.3f} s"
    if idle < QUIET_S:  # else the machine has other work, and says nothing about ours
        assert ours < WORST_S, f"/healthz took {ours:.3f} s, and {idle:.3f} s in an idle process"


async def read(scene: Scene, root: Path, kind: str, allowed: AllowedAddresses) -> list[object]:
    names, settings = Names(rebinds=False), GitSettings(allowed, quota_bytes=QUOTA)
    repositories = GitRepositories(root, login, settings=settings, resolve=names.resolve)
    return await glance(repositories, scene.url(kind))


async def test_twin_without_the_check_a_redirect_reaches_this_machine(
    scene: Scene, tmp_path: Path
) -> None:
    await read(scene, tmp_path, "redirect-loopback", replace(ALLOWED, loopback=True))
    assert scene.reached
    scene.reached.clear()


async def test_twin_redirects_that_git_follows_itself_reach_this_machine(
    scene: Scene, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    careless = tuple(one for one in process.CONFIG if "followRedirects" not in one)
    monkeypatch.setattr(process, "CONFIG", (*careless, "http.followRedirects=true"))
    await read(scene, tmp_path, "redirect-loopback", ALLOWED)
    assert scene.reached
    scene.reached.clear()


async def test_twin_without_a_pin_git_resolves_the_name_itself(
    scene: Scene, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(access, "_curl_pins", lambda url, found: NO_PINS)
    _, files = await read(scene, tmp_path, "true", ALLOWED)
    assert "Could not resolve host" in str(files)


async def test_an_endless_pack_is_cut_while_it_arrives(scene: Scene, tmp_path: Path) -> None:
    _, files = await read(scene, tmp_path, "endless-pack", ALLOWED)
    assert isinstance(files, Refused)
    assert f"more than {QUOTA >> 21} MiB have to be transferred" in str(files)
    assert size_of(tmp_path) < QUOTA >> 1


async def test_a_repository_that_moved_is_read_at_its_new_place_without_the_login(
    scene: Scene, tmp_path: Path
) -> None:
    """The new place has another name, so it does not get the token that was given for the old one."""
    before = len(scene.asked())
    allowed = replace(ALLOWED, hosts=frozenset({HOST, REBINDS}))
    listed, files = await read(scene, tmp_path, "moved", allowed)
    assert isinstance(listed, RefList)
    assert files_of(files) == HELD
    there = [one for one in scene.asked()[before:] if str(one["host"]).startswith(REBINDS)]
    assert there
    assert not any(one["authorization"] for one in there)
