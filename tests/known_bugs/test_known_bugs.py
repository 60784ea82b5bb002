"""Every known bug is killed by its test: the test fails with the bug inserted, and passes without
it."""

import inspect

import pytest

from tests.known_bugs.known_bug import KnownBug, killer_of, mutant, put_in
from tests.known_bugs.page import KNOWN_BUGS, PAGE, markdown
from tests.unit.trainer.support import Shelf
from trainer.engine import Engine

LEAST = 40


async def run(known_bug: KnownBug, request: pytest.FixtureRequest) -> None:
    """Call the test with its arguments; those that are not given are fixtures. The engine is always a
    new one: what another holds would hide the bug."""
    test, shelf = killer_of(known_bug), Shelf()
    with pytest.MonkeyPatch.context() as monkeypatch:
        engine = Engine(fetch=shelf.fetch, threads=1)
        own = {"engine": engine, "shelf": shelf, "monkeypatch": monkeypatch}
        wanted = [n for n in inspect.signature(test).parameters if n not in known_bug.given]
        fixtures = {n: own[n] if n in own else request.getfixturevalue(n) for n in wanted}
        try:
            result = test(**known_bug.given, **fixtures)
            if inspect.isawaitable(result):
                await result
        finally:
            await engine.aclose()


@pytest.mark.parametrize("known_bug", KNOWN_BUGS, ids=lambda e: e.bug.replace(" ", "-"))
async def test_a_test_kills_it(
    known_bug: KnownBug, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    await run(known_bug, request)
    # Pytest would explain how megabytes of weights differ, which took 200 s of one bug.
    monkeypatch.setattr("_pytest.assertion.util._reprcompare", None)
    with put_in(known_bug), pytest.raises((AssertionError, pytest.fail.Exception)):
        await run(known_bug, request)


def test_the_list_is_long_and_each_bug_is_there_once() -> None:
    assert len(KNOWN_BUGS) >= LEAST
    assert len({known_bug.bug for known_bug in KNOWN_BUGS}) == len(KNOWN_BUGS)
    assert len({(known_bug.code, known_bug.new) for known_bug in KNOWN_BUGS}) == len(KNOWN_BUGS)


def test_a_mutation_that_no_longer_fits_says_so() -> None:
    lost = KnownBug(bug="gone", seen="a/b#1", code="trainer.grpo:loss", old="?", new="!", test="")
    with pytest.raises(AssertionError, match="has changed"):
        mutant(lost)


def test_the_page_is_fresh() -> None:
    assert PAGE.read_text() == markdown(), "stale: run `python -m tests.known_bugs.page`"
