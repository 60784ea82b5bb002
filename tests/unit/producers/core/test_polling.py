"""The poll finds what no webhook told of, asks a host once at a time, and leaves one alone that is
away."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import pytest

from infra.ports.services import RefList
from infra.readmodel.deliveries import KnownRefs
from infra.spine.memory.event_log import MemoryLog
from infra.spine.memory.event_log import World as MemoryWorld
from infra.spine.ports.clock import ManualClock
from producers.core.repositories.polling import LONGEST_PAUSE_S, Ages, Poller, RefSources, host_of
from schemas.errors import NotFound, RepositoryAway
from schemas.events import RefsCheckRequested
from schemas.ids import delivery_stream

EVERY_S = 60.0


@dataclass(frozen=True)
class Repository:
    workspace: str
    url: str


@dataclass
class World:
    """Connected repositories, the digest that each has (or the error that it answers), and what sync
    knows."""

    repositories: list[Repository]
    digests: dict[str, str | Exception] = field(default_factory=dict)
    known: dict[str, KnownRefs] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)
    at_once: dict[str, int] = field(default_factory=dict)
    most_at_once: int = 0
    log: MemoryLog = field(default_factory=lambda: MemoryLog(MemoryWorld()))
    clock: ManualClock = field(default_factory=ManualClock)

    def __post_init__(self) -> None:
        self.ages = Ages(self.clock)
        sources = RefSources(self.connections, self.list_refs, self.known_refs)
        self.poller = Poller(self.log, sources, self.clock, self.ages, every_s=EVERY_S)

    async def connections(self) -> Sequence[Repository]:
        return self.repositories

    async def known_refs(self, workspaces: Sequence[str]) -> Mapping[str, KnownRefs]:
        return {name: self.known[name] for name in workspaces if name in self.known}

    async def list_refs(self, workspace: str, url: str) -> RefList:
        self.asked.append(workspace)
        host = host_of(url)
        self.at_once[host] = self.at_once.get(host, 0) + 1
        self.most_at_once = max(self.most_at_once, self.at_once[host])
        await asyncio.sleep(0)
        self.at_once[host] -= 1
        digest = self.digests.get(workspace, "d")
        if isinstance(digest, Exception):
            raise digest
        return RefList(refs={}, digest=digest, default_branch="main")

    async def requests(self, workspace: str) -> int:
        stream = delivery_stream(workspace)
        found = (await self.log.load({stream: 0}))[stream]
        assert all(isinstance(r.event, RefsCheckRequested) for r in found)
        return len(found)


def world(*urls: str) -> World:
    return World([Repository(f"w{n}", url) for n, url in enumerate(urls)])


ONE = "https://a.example.org/x.git"


async def test_only_refs_that_sync_does_not_know_are_requested() -> None:
    one = world(ONE)
    one.known["w0"] = KnownRefs("d", None)
    await one.poller.poll_all()
    assert await one.requests("w0") == 0
    one.digests["w0"] = "e"
    one.clock.advance(2 * EVERY_S)
    await one.poller.poll_all()
    assert await one.requests("w0") == 1
    assert one.ages.seconds() == {"w0": 0}
    one.clock.advance(5)
    assert one.ages.seconds() == {"w0": 5}


async def test_a_repository_that_breaks_or_recovers_is_requested_once_each() -> None:
    one = world(ONE)
    one.known["w0"] = KnownRefs("d", None)
    one.digests["w0"] = NotFound("it is not there")
    await one.poller.poll_all()
    assert await one.requests("w0") == 1
    one.known["w0"] = KnownRefs("d", "it is not there")
    one.clock.advance(2 * EVERY_S)
    await one.poller.poll_all()
    assert await one.requests("w0") == 1
    one.digests["w0"] = "d"
    one.clock.advance(2 * EVERY_S)
    await one.poller.poll_all()
    assert await one.requests("w0") == 2


async def test_all_are_asked_at_the_start_and_again_after_the_interval() -> None:
    two = world(ONE, "git@b.example.org:team/y.git", "/srv/z.git")
    await two.poller.poll_all()
    assert sorted(two.asked) == ["w0", "w1", "w2"]
    two.clock.advance(EVERY_S / 2)
    await two.poller.poll_all()
    assert len(two.asked) == 3
    two.clock.advance(EVERY_S)
    await two.poller.poll_all()
    assert len(two.asked) == 6


async def test_a_host_gets_one_question_at_a_time() -> None:
    many = world(*(f"https://a.example.org/{n}.git" for n in range(20)))
    await many.poller.poll_all()
    assert len(many.asked) == 20
    assert many.most_at_once == 1


async def test_a_host_that_is_away_is_asked_less_often_and_the_others_as_before() -> None:
    two = world(ONE, "https://a.example.org/y.git", "https://b.example.org/z.git")
    two.digests |= {name: RepositoryAway("no answer") for name in ("w0", "w1")}
    two.known["w2"] = KnownRefs("d", None)
    await two.poller.poll_all()
    assert two.asked == ["w0", "w2"], "the second repository of the host is not asked"
    for _ in range(40):
        two.clock.advance(1.2 * EVERY_S)
        await two.poller.poll_all()
    assert two.asked.count("w2") == 41
    assert 4 <= two.asked.count("w0") + two.asked.count("w1") <= 12
    two.digests.clear()
    two.clock.advance(LONGEST_PAUSE_S)
    await two.poller.poll_all()
    await two.poller.poll_all()
    assert {"w0", "w1"} <= set(two.asked[-3:])


async def test_a_repository_that_never_answers_does_not_keep_others_of_its_host_from_being_asked() -> (
    None
):
    two = world(ONE, "https://a.example.org/y.git")
    two.digests["w0"] = RepositoryAway("no answer")
    two.known["w1"] = KnownRefs("d", None)
    for _ in range(10):
        await two.poller.poll_all()
        two.clock.advance(1.2 * EVERY_S)
    assert two.asked.count("w1") == 9, "all but the first time"


async def test_a_new_connection_is_asked_by_the_running_poll() -> None:
    one = world(ONE)
    polling = asyncio.ensure_future(one.poller.run())
    while "w0" not in one.asked:
        await asyncio.sleep(0)
    one.repositories.append(Repository("w9", "https://c.example.org/x.git"))
    while "w9" not in one.asked:
        await asyncio.sleep(0)
    polling.cancel()
    with pytest.raises(asyncio.CancelledError):
        await polling


@pytest.mark.parametrize(
    ("url", "host"),
    [
        ("https://Git.Example.org:8443/a/b.git", "git.example.org"),
        ("ssh://git@host.example/a", "host.example"),
        ("git@host.example:a/b.git", "host.example"),
        ("/srv/a.git", ""),
        ("file:///srv/a.git", ""),
    ],
)
def test_the_host_is_taken_from_every_form_of_url(url: str, host: str) -> None:
    assert host_of(url) == host
