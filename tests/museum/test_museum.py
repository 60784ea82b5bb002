"""Every exhibit is killed by its test, and only by being in: without it the test passes."""

import inspect

import pytest

from tests.museum.exhibit import Exhibit, killer_of, mutant, put_in
from tests.museum.page import EXHIBITS, PAGE, markdown
from tests.unit.trainer.support import Shelf
from trainer.engine import Engine

LEAST = 40


async def run(exhibit: Exhibit, request: pytest.FixtureRequest) -> None:
    """Call the test with its arguments; those that are not given are fixtures. The engine is always a
    new one: what another holds would hide the bug."""
    test, shelf = killer_of(exhibit), Shelf()
    with pytest.MonkeyPatch.context() as monkeypatch:
        engine = Engine(fetch=shelf.fetch, threads=1)
        own = {"engine": engine, "shelf": shelf, "monkeypatch": monkeypatch}
        wanted = [n for n in inspect.signature(test).parameters if n not in exhibit.given]
        fixtures = {n: own[n] if n in own else request.getfixturevalue(n) for n in wanted}
        try:
            result = test(**exhibit.given, **fixtures)
            if inspect.isawaitable(result):
                await result
        finally:
            await engine.aclose()


@pytest.mark.parametrize("exhibit", EXHIBITS, ids=lambda e: e.bug.replace(" ", "-"))
async def test_a_test_kills_it(exhibit: Exhibit, request: pytest.FixtureRequest) -> None:
    await run(exhibit, request)
    with put_in(exhibit), pytest.raises((AssertionError, pytest.fail.Exception)):
        await run(exhibit, request)


def test_the_museum_is_large_and_each_bug_is_there_once() -> None:
    assert len(EXHIBITS) >= LEAST
    assert len({exhibit.bug for exhibit in EXHIBITS}) == len(EXHIBITS)
    assert len({(exhibit.code, exhibit.new) for exhibit in EXHIBITS}) == len(EXHIBITS)


def test_a_mutation_that_no_longer_fits_says_so() -> None:
    lost = Exhibit(bug="gone", seen="a/b#1", code="trainer.grpo:loss", old="?", new="!", test="")
    with pytest.raises(AssertionError, match="has changed"):
        mutant(lost)


def test_the_page_is_fresh() -> None:
    assert PAGE.read_text() == markdown(), "stale: run `python -m tests.museum.page`"
