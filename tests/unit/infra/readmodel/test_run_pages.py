"""Pages of runs by key: each run is seen once and in order, whatever arrives in between."""

import asyncio
import base64
import contextlib
import json
import string
from collections.abc import Callable, Coroutine, Iterator, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import uuid4

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infra.ports.actor import Actor, acting_as
from infra.readmodel.run_pages import (
    ALL_RUNS,
    DIRECTIONS,
    LONGEST_CURSOR,
    ORDERS,
    SQL,
    RunFilter,
    RunKind,
    RunOrder,
    RunPage,
    RunPages,
    RunPlace,
    _selection,
)
from infra.readmodel.runs import PageRange
from infra.spine.postgres.pool import Database, connect
from tests.kit.postgres import execute
from tests.kit.property_examples import examples

AT = datetime(2026, 1, 1, tzinfo=UTC)
INSERT = """insert into runs (run, name, algorithm, execution_mode, model, dataset, config, dataset_ref,
created_at, reward)
select run, name, 'grpo', 'sync', 'm', $1, '{}', '{}',
$2::timestamptz + second * interval '1 microsecond', reward
from unnest($3::text[], $4::text[], $5::int[], $6::float8[]) as r (run, name, second, reward)"""

MANY = """insert into runs (run, name, algorithm, execution_mode, model, dataset, workspace, config,
dataset_ref, created_at, reward)
select 'r' || n, 'name-' || n, 'grpo', 'sync', 'm', 'd', 'w' || n % 2, '{}', '{}',
$1::timestamptz + n / 3 * interval '1 second', (n % 100) / 100.0 from generate_series(1, 10000) n"""

SORTED = {
    "newest": "created_at desc, run",
    "oldest": "created_at, run desc",
    "reward": "reward desc nulls last, created_at desc, run",
    "name": "name, created_at desc, run",
}
LETTERS = string.ascii_letters + string.digits + "-_"

InDatabase = Callable[[Callable[[Database], Coroutine[Any, Any, None]]], None]

Added = tuple[str, int, float | None]
"""A run that a test adds: its name, its start in microseconds, its reward."""

# Few values, so that many runs share them.
runs = st.lists(
    st.tuples(
        st.sampled_from(["a", "b", "B", "a-1", "\N{LATIN SMALL LETTER A WITH DIAERESIS}"]),
        st.integers(0, 3),
        st.sampled_from([None, float("nan"), float("-inf"), float("inf"), -0.0, 0.0, 0.1, 5e-324]),
    ),
    max_size=12,
)


@pytest.fixture
def in_database(database_url: str) -> Iterator[InDatabase]:
    """Runs a coroutine over a database that all examples of a test share."""
    with asyncio.Runner() as runner:
        opened = connect(database_url)
        database = runner.run(opened.__aenter__())
        yield lambda scenario: runner.run(scenario(database))
        runner.run(opened.__aexit__(None, None, None))


class Listed:
    """A list of runs of its own, to which runs are added."""

    def __init__(self, database: Database, order: RunOrder, limit: int) -> None:
        self._database, self._order, self._limit = database, order, limit
        self._dataset = uuid4().hex

    async def add(self, added: Sequence[Added]) -> None:
        ids = [uuid4().hex for _ in added]
        columns = [[run[n] for run in added] for n in range(3)]
        await self._database.durable.execute(INSERT, self._dataset, AT, ids, *columns)

    async def page(self, **place: RunPlace | None) -> RunPage:
        found = RunFilter(kind=RunKind(dataset=self._dataset))
        pages = RunPages(self._database)
        return await pages.at_place(self._order, limit=self._limit, found=found, **place)

    async def all(self) -> list[str]:
        """The ids of all runs in order."""
        query = f"select run from runs where dataset = $1 order by {SORTED[self._order]}"
        return [row["run"] for row in await self._database.durable.fetch(query, self._dataset)]

    async def walk(self, arrivals: Sequence[Sequence[Added]], *, is_backward: bool) -> list[str]:
        """Follow the links to the last page or, from there, to the first one. After each page runs
        arrive, and the next page must show the runs right beyond the last one. Returns all ids."""
        waiting = [] if is_backward else list(arrivals)
        page, seen, whole = await self.page(), list[str](), await self.all()
        expected = whole[: self._limit]
        while True:
            shown = [run["id"] for run in page.runs]
            assert shown == expected
            assert page.total == len(whole)
            assert page.first == (whole.index(shown[0]) + 1 if shown else 1)
            assert (page.previous is None) == (not shown or shown[0] == whole[0])
            assert (page.following is None) == (not shown or shown[-1] == whole[-1])
            seen += shown
            await self.add(waiting.pop(0) if waiting else [])
            whole = await self.all()
            if page.following is None:
                break
            place = RunPlace.parse(page.following.cursor, order=self._order)
            page, end = await self.page(after=place), whole.index(place.run) + 1
            expected = whole[end : end + self._limit]
        return await self._walk_back(page, arrivals) if is_backward else seen

    async def _walk_back(self, page: RunPage, arrivals: Sequence[Sequence[Added]]) -> list[str]:
        waiting, seen = list(arrivals), [run["id"] for run in page.runs]
        while page.previous is not None:
            await self.add(waiting.pop(0) if waiting else [])
            whole = await self.all()
            place = RunPlace.parse(page.previous.cursor, order=self._order)
            page, end = await self.page(before=place), whole.index(place.run)
            shown = [run["id"] for run in page.runs]
            assert shown == whole[max(0, end - self._limit) : end]
            assert page.first == max(0, end - self._limit) + 1
            assert (page.previous is None) == (shown[0] == whole[0])
            assert page.following is not None
            seen = shown + seen
        return seen


@pytest.mark.postgres
@pytest.mark.hypothesis
@pytest.mark.parametrize("is_backward", [False, True])
@pytest.mark.parametrize("order", ORDERS)
def test_each_run_is_seen_once_and_in_order(
    in_database: InDatabase, order: RunOrder, *, is_backward: bool
) -> None:
    @examples(40)
    @given(first=runs, arrivals=st.lists(runs, max_size=6), limit=st.integers(1, 5))
    def check(first: list[Added], arrivals: list[list[Added]], limit: int) -> None:
        async def scenario(database: Database) -> None:
            listed = Listed(database, order, limit)
            await listed.add(first)
            before = await listed.all()
            seen = await listed.walk(arrivals, is_backward=is_backward)
            assert len(set(seen)) == len(seen)
            assert set(before) <= set(seen)
            assert seen == [run for run in await listed.all() if run in set(seen)]

        in_database(scenario)

    check()


@pytest.mark.postgres
async def test_an_offset_would_show_a_run_twice(database: Database) -> None:
    """The twin: the same walk by offset, while a run arrives."""
    listed = Listed(database, "newest", 2)
    await listed.add([("a", n, None) for n in range(4)])
    pages = RunPages(database)
    first, _ = await pages.at_offset(PageRange(limit=2))
    await listed.add([("a", 9, None)])
    second, _ = await pages.at_offset(PageRange(limit=2, offset=2))
    assert first[-1]["id"] == second[0]["id"]


@pytest.mark.postgres
@pytest.mark.parametrize("order", ORDERS)
async def test_a_place_stays_when_its_run_changes_or_is_deleted(
    database: Database, order: RunOrder
) -> None:
    listed = Listed(database, order, 2)
    await listed.add([(f"n{n}", n, n / 10) for n in range(6)])
    whole = await listed.all()
    place = (await listed.page()).following
    assert place is not None
    for change in ("update runs set reward = null, name = 'zz'", "delete from runs"):
        await database.durable.execute(f"{change} where run = $1", place.run)
        page = await listed.page(after=place)
        assert [run["id"] for run in page.runs] == whole[2:4]
        page = await listed.page(before=place)
        assert [run["id"] for run in page.runs] == whole[:1]


@pytest.mark.postgres
@pytest.mark.parametrize("order", ["newest", "oldest"])
@pytest.mark.parametrize("workspace", [None, "w1"])
async def test_the_last_of_ten_thousand_runs_are_found_by_an_index(
    database: Database, order: RunOrder, workspace: str | None
) -> None:
    """A page reads about as many rows as it shows. The reads of a page by offset show the difference."""
    await database.durable.execute(MANY, AT)
    await execute(database.url, "analyze runs")  # its owner may
    actor = Actor("t", "ada", frozenset({"read"}), workspace=workspace)
    with acting_as(actor):
        parts, values = _selection(ALL_RUNS)
        late, end = AT + timedelta(seconds=10 if order == "newest" else 3300), "r"
        for direction in DIRECTIONS[order]:
            key = (late, end, None, None, 51)
            parts["place"] = direction.beyond
            query = SQL.variant("runs_beyond", **parts, order=direction.order)
            assert await _rows_read(database, query, *values, *key) < 200
        parts, values = _selection(ALL_RUNS)
        query = SQL.variant("page_of_runs", **parts)
        assert await _rows_read(database, query, *values, 51, 4900) > 4000


async def _rows_read(database: Database, query: str, *values: object) -> int:
    """How many rows of the table a query reads, also those that it leaves out."""
    text = await database.durable.fetchval(f"explain (analyze, format json) {query}", *values)
    nodes, read = [json.loads(text)[0]["Plan"]], 0
    while nodes:
        node = nodes.pop()
        nodes += node.get("Plans", ())
        if node.get("Relation Name") == "runs":
            read += node["Actual Rows"] + node.get("Rows Removed by Filter", 0)
    return int(read)


def test_a_cursor_is_read_back() -> None:
    name = "\N{SNOWMAN} a\nb=&"
    for place in (
        RunPlace("newest", AT, "r1"),
        RunPlace("oldest", datetime(1, 1, 1, tzinfo=UTC), "r1"),
        RunPlace("reward", AT, "r1", reward=0.1),
        RunPlace("reward", AT, "r1", reward=float("-inf")),
        RunPlace("reward", AT, "r1"),
        RunPlace("name", AT, "r1", name=name),
        RunPlace("name", AT, "r1", name=""),
    ):
        assert RunPlace.parse(place.cursor, order=place.order) == place
        assert set(place.cursor) <= set(LETTERS)
        for other in set(ORDERS) - {place.order}:
            with pytest.raises(ValueError, match="another order"):
                RunPlace.parse(place.cursor, order=other)


def _encode(*parts: str) -> str:
    return base64.urlsafe_b64encode("\0".join(parts).encode()).decode().rstrip("=")


@pytest.mark.parametrize(
    "cursor",
    [
        "x",
        "\N{SNOWMAN}",
        "a b",
        "====",
        "_" * (LONGEST_CURSOR + 1),
        "_" * LONGEST_CURSOR,
        base64.urlsafe_b64encode(b"\xff\xfe").decode(),
        RunPlace("newest", AT, "r1").cursor + "=",
        RunPlace("newest", AT, "r1").cursor + "\n",
        _encode("newest"),
        _encode("newest", "1"),
        _encode("newest", "one", "r1"),
        _encode("newest", "01", "r1"),
        _encode("newest", "1_0", "r1"),
        _encode("newest", "1" * 30, "r1"),
        _encode("newest", "9" * 3000, "r1"),
        _encode("newest", "1", "r1", "x"),
        _encode("reward", "1", "r1", "much"),
        _encode("reward", "1", "r1", "1e999"),
        _encode("reward", "1", "r1", "0.10"),
        _encode("reward", "1", "r1", "0.1", "x"),
        _encode("name", "1", "r1"),
        _encode("name", "1", "r1", "a", "b"),
        _encode("lost", "1", "r1"),
    ],
)
def test_a_bad_cursor_is_refused(cursor: str) -> None:
    for order in ORDERS:
        with pytest.raises(ValueError, match=r".+"):
            RunPlace.parse(cursor, order=order)


@given(st.one_of(st.text(), st.text(LETTERS), st.binary().map(base64.urlsafe_b64encode)))
def test_every_other_text_is_refused_or_means_one_place(text: str | bytes) -> None:
    cursor = text.decode() if isinstance(text, bytes) else text
    for order in ORDERS:
        with contextlib.suppress(ValueError):
            assert RunPlace.parse(cursor, order=order).cursor == cursor
