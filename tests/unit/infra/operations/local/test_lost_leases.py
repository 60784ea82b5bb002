"""A live process is ended for its missing lease only after the lease has been missing for long
enough."""

from collections.abc import Collection
from uuid import uuid4

import pytest

from infra.operations.local.lost_leases import (
    LEASELESS_S,
    LOOK_S,
    STARTING_S,
    LeaseWatch,
    live_workers,
)
from infra.spine.postgres.effects import PostgresEffects
from infra.spine.postgres.pool import Database
from schemas.ids import WorkerId

ME = "me"


class Watched:
    """A watch over one worker, with a clock that the test controls."""

    def __init__(self) -> None:
        self.now = 0.0
        self.watch = LeaseWatch(clock=lambda: self.now)

    def looks(
        self,
        seconds: float,
        live: Collection[str] | None,
        *,
        still: Collection[str] = (),
        every_s: float = LOOK_S,
    ) -> bool:
        """Watch for this long; return whether the worker was ever to be ended."""
        overdue, until = False, self.now + seconds
        while self.now < until:
            self.now += every_s
            without = self.watch.observe([ME], live, still=still)
            overdue |= any(self.watch.is_overdue(w, s) for w, s in without.items())
        return overdue


def test_a_process_without_a_lease_is_ended() -> None:
    watched = Watched()
    assert not watched.looks(20, [ME])
    assert not watched.looks(LEASELESS_S - LOOK_S, [])
    assert watched.looks(2 * LOOK_S, [])


def test_a_starting_process_has_more_time() -> None:
    watched = Watched()
    assert not watched.looks(STARTING_S - LOOK_S, [])
    assert watched.looks(2 * LOOK_S, [])


def test_a_process_is_starting_until_its_first_lease_or_until_that_is_overdue() -> None:
    watched = Watched()
    watched.looks(LOOK_S, [])
    assert watched.watch.is_starting(ME, LOOK_S)
    assert not watched.watch.is_starting(ME, STARTING_S)
    watched.looks(LOOK_S, [ME])
    assert not watched.watch.is_starting(ME, LOOK_S)


def test_a_lease_that_is_had_again_is_none_lost() -> None:
    watched = Watched()
    for _ in range(20):
        assert not watched.looks(LEASELESS_S - LOOK_S, [])
        assert not watched.looks(LOOK_S, [ME])


@pytest.mark.parametrize("unknown", ["away", "stopped", "the supervisor was stopped"])
def test_an_unknown_lease_counts_for_nothing(unknown: str) -> None:
    watched = Watched()
    watched.looks(20, [ME])
    for _ in range(5):
        assert not watched.looks(LEASELESS_S - LOOK_S, [])
        if unknown == "away":
            assert not watched.looks(300, None)
        elif unknown == "stopped":
            assert not watched.looks(300, [], still=[ME])
        else:
            assert not watched.looks(300, [], every_s=300)


@pytest.mark.postgres
async def test_the_database_says_who_has_a_live_lease(database: Database) -> None:
    effects, names = PostgresEffects(database), [WorkerId(uuid4().hex) for _ in range(3)]
    for name in names[:2]:
        await effects.register(name, host="h", pid=1, lease_s=60)
    await effects.expire(names[1])
    assert await live_workers(database.url, names) == frozenset({str(names[0])})


async def test_a_database_that_is_not_there_says_nothing() -> None:
    assert await live_workers("postgresql://postgres@127.0.0.1:1/none", [ME]) is None
    assert await live_workers("", [ME]) is None
