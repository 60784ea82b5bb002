"""The workspaces of an organisation are never older than the question, and questions share queries."""

import asyncio

import pytest

from infra.identity.recent_workspaces import STALE_S, RecentWorkspaces
from infra.spine.ports.clock import ManualClock
from infra.spine.postgres.errors import DatabaseUnavailable
from schemas.errors import TransientError


class Source:
    """A table of homes, whose queries wait until they are let go."""

    def __init__(self) -> None:
        self.homes: dict[str, frozenset[str]] = {"rivers": frozenset({"a"})}
        self.reads = 0
        self.is_away = False
        self.go = asyncio.Event()
        self.go.set()

    async def read(self, organisation: str) -> frozenset[str]:
        if self.is_away:
            raise DatabaseUnavailable("away")
        self.reads += 1
        found = self.homes.get(organisation, frozenset())
        await self.go.wait()
        return found


async def test_an_answer_is_never_older_than_its_question() -> None:
    source = Source()
    recent = RecentWorkspaces(source.read, ManualClock())
    assert await recent.workspaces_of("rivers") == {"a"}
    source.go.clear()
    early = asyncio.ensure_future(recent.workspaces_of("rivers"))
    await asyncio.sleep(0.01)
    source.homes["rivers"] = frozenset({"a", "b"})
    late = asyncio.ensure_future(recent.workspaces_of("rivers"))
    await asyncio.sleep(0.01)
    assert not late.done()
    source.go.set()
    assert await late == {"a", "b"}, "it does not share the query that had begun"
    assert await early in ({"a"}, {"a", "b"})


async def test_questions_share_the_query_that_begins_after_them() -> None:
    source = Source()
    recent = RecentWorkspaces(source.read, ManualClock())
    source.go.clear()
    asked = [asyncio.ensure_future(recent.workspaces_of("rivers")) for _ in range(2)]
    await asyncio.sleep(0.01)
    asked += [asyncio.ensure_future(recent.workspaces_of("rivers")) for _ in range(30)]
    await asyncio.sleep(0.01)
    source.go.set()
    assert await asyncio.gather(*asked) == [{"a"}] * 32
    assert source.reads == 2


async def test_a_question_that_is_given_up_leaves_the_others_their_answer() -> None:
    source = Source()
    recent = RecentWorkspaces(source.read, ManualClock())
    source.go.clear()
    asked = [asyncio.ensure_future(recent.workspaces_of("rivers")) for _ in range(4)]
    await asyncio.sleep(0.01)
    asked[0].cancel()
    asked[2].cancel()
    await asyncio.sleep(0.01)
    source.go.set()
    assert [await asked[1], await asked[3]] == [{"a"}, {"a"}]


async def test_the_last_answer_stays_valid_for_a_while_without_the_database() -> None:
    source, clock = Source(), ManualClock()
    recent = RecentWorkspaces(source.read, clock)
    assert await recent.workspaces_of("rivers") == {"a"}
    source.is_away = True
    clock.advance(STALE_S - 0.1)
    assert await recent.workspaces_of("rivers") == {"a"}
    clock.advance(0.2)
    with pytest.raises(TransientError, match="try again"):
        await recent.workspaces_of("rivers")
    source.is_away = False
    assert await recent.workspaces_of("rivers") == {"a"}


async def test_an_organisation_that_was_never_read_is_not_empty_but_away() -> None:
    source = Source()
    source.is_away = True
    with pytest.raises(TransientError):
        await RecentWorkspaces(source.read, ManualClock()).workspaces_of("rivers")
