"""Sync follows the refs of a repository: hints lead to listings, and each move is found once."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from uuid import UUID

import pytest
from hypothesis import given as drawn
from hypothesis import strategies as st
from pydantic import TypeAdapter

from consumers.sync import refs as refs_module
from consumers.sync.consumer import CONSUMER, WorkspaceState, perform
from schemas.effects import Failed, FetchCommit, ListRefs, RefListing
from schemas.errors import FailureCategory
from schemas.events import (
    CommitRequested,
    Event,
    PushReceived,
    RefsCheckRequested,
    RefsListed,
    RefsMoved,
    RefsRequested,
    WorkspaceConnected,
    WorkspaceDisconnected,
)
from schemas.ids import StreamName
from schemas.specs import CommitSpec, RefMove
from tests.kit.decider import Given, When, given
from tests.kit.fakes import FakeRepositories, bench

STREAM = StreamName("workspace-w1")
URL = "https://git.example.org/team/mine.git"
MAIN, DEV, TAG = "refs/heads/main", "refs/heads/dev", "refs/tags/v1"
A, B, C = "a" * 40, "b" * 40, "c" * 40
KNOWN = CommitRequested(workspace="w1", workspace_name="mine", commit=CommitSpec(url=URL))
HINT = PushReceived(workspace="w1", forge="github", delivery="1", ref=MAIN, before=None, after=A)
POLL = RefsCheckRequested(workspace="w1", reason="poll")
CONNECTED = RefsCheckRequested(workspace="w1", reason="connected", baseline=True)


def ask(number: int) -> ListRefs:
    return ListRefs(workspace="w1", url=URL, round=number)


def requested(number: int, *, baseline: bool = False) -> RefsRequested:
    return RefsRequested(workspace="w1", round=number, baseline=baseline)


def listing(number: int, refs: Mapping[str, str]) -> RefListing:
    return RefListing(ask(number), refs=refs, digest=f"d{number}", default_branch="main")


def listed(number: int, *, num_refs: int) -> RefsListed:
    return RefsListed(
        workspace="w1", round=number, digest=f"d{number}", num_refs=num_refs, default_branch="main"
    )


def moved(
    number: int, *moves: tuple[str, str | None, str | None], first: int, baseline: bool = False
) -> RefsMoved:
    return RefsMoved(
        workspace="w1",
        workspace_name="mine",
        url=URL,
        round=number,
        moves=tuple(
            RefMove(ref=ref, before=before, after=after, number=first + count)
            for count, (ref, before, after) in enumerate(moves)
        ),
        baseline=baseline,
    )


def after_baseline(refs: Mapping[str, str]) -> Given:
    """A workspace whose refs were listed once."""
    start = given(CONSUMER, KNOWN, requested(1, baseline=True))
    return start.when(listing(1, refs), stream=STREAM).after()


def listing_after(state: Given, refs: Mapping[str, str]) -> tuple[Given, list[Event]]:
    """A hint and the listing that follows it. Returns the state, and the events of the listing."""
    asked = state.when(POLL)
    [effect] = asked.effects
    assert isinstance(effect, ListRefs)
    answer = asked.after().when(listing(effect.round, refs), stream=STREAM)
    return answer.after(), answer.events


def pushes(events: Sequence[Event]) -> list[tuple[str, str | None, str]]:
    return [
        (push.ref, push.before, push.after)
        for event in events
        if isinstance(event, RefsMoved)
        for push in event.pushes()
    ]


def test_a_hint_asks_the_repository_for_its_refs() -> None:
    for hint in (HINT, POLL):
        given(CONSUMER, KNOWN).when(hint).then(events=[requested(1)], effects=[ask(1)])


def test_a_hint_about_a_workspace_that_is_not_there_decides_nothing() -> None:
    given(CONSUMER).when(HINT).then_nothing()


def test_hints_while_a_listing_is_in_flight_request_one_more_round() -> None:
    first = given(CONSUMER, KNOWN).when(HINT).after()
    second = first.when(POLL).then(events=[requested(2)]).after()
    second.when(HINT).then_nothing()
    answer = second.when(listing(1, {MAIN: A}), stream=STREAM)
    answer.then(
        events=[moved(1, (MAIN, None, A), first=1, baseline=True), listed(1, num_refs=1)],
        effects=[ask(2)],
    )
    last = answer.after().when(listing(2, {MAIN: A}), stream=STREAM)
    last.then(events=[listed(2, num_refs=1)])
    last.after().when(HINT).then(events=[requested(3)], effects=[ask(3)])


def test_the_first_listing_is_a_baseline() -> None:
    asked = given(CONSUMER, KNOWN, requested(1))
    asked.when(listing(1, {MAIN: A, DEV: B}), stream=STREAM).then(
        events=[
            moved(1, (DEV, None, B), (MAIN, None, A), first=1, baseline=True),
            listed(1, num_refs=2),
        ]
    )


def test_a_listing_counts_once_and_a_late_one_not_at_all() -> None:
    state = after_baseline({MAIN: A})
    state.when(listing(1, {MAIN: B}), stream=STREAM).then_nothing()
    newer, _ = listing_after(state, {MAIN: B})
    newer.when(listing(1, {MAIN: A}), stream=STREAM).then_nothing()
    newer.when(listing(7, {MAIN: A}), stream=STREAM).then_nothing()
    newer.when(Failed(ask(1), FailureCategory.INTERNAL, "late"), stream=STREAM).then_nothing()


def test_a_push_is_a_move_and_the_default_branch_is_fetched() -> None:
    state = given(CONSUMER, *after_baseline({MAIN: A}).events, requested(2))
    answer = state.when(listing(2, {MAIN: B, DEV: C}), stream=STREAM)
    assert answer.events == [
        moved(2, (DEV, None, C), (MAIN, A, B), first=2),
        listed(2, num_refs=2),
    ]
    [look] = answer.effects
    assert isinstance(look, FetchCommit)
    assert (look.commit, look.entrypoints, look.requester) == (CommitSpec(url=URL), (), None)


def test_a_push_to_another_branch_fetches_nothing() -> None:
    state = given(CONSUMER, *after_baseline({MAIN: A}).events, requested(2))
    answer = state.when(listing(2, {MAIN: A, DEV: C}), stream=STREAM)
    answer.then(events=[moved(2, (DEV, None, C), first=2), listed(2, num_refs=2)])


def test_forward_and_back_and_forward_are_four_pushes_with_numbers_of_their_own() -> None:
    state, found, numbers = after_baseline({MAIN: C}), [], []
    for sha in (A, B, A, B):
        state, events = listing_after(state, {MAIN: sha})
        found += pushes(events)
        numbers += [push.number for e in events if isinstance(e, RefsMoved) for push in e.pushes()]
    assert found == [(MAIN, C, A), (MAIN, A, B), (MAIN, B, A), (MAIN, A, B)]
    assert numbers == [2, 3, 4, 5]


def test_a_deleted_ref_is_a_move_and_not_a_push() -> None:
    state, events = listing_after(after_baseline({MAIN: A, DEV: B}), {MAIN: A})
    assert events[:-1] == [moved(2, (DEV, B, None), first=3)]
    assert pushes(events) == []
    _, events = listing_after(state, {MAIN: A, DEV: C})
    assert pushes(events) == [(DEV, None, C)], "it is back at another commit"


def test_a_repository_that_comes_back_empty_and_then_whole_pushes_nothing() -> None:
    state, events = listing_after(after_baseline({MAIN: A, TAG: B}), {})
    assert pushes(events) == []
    state, events = listing_after(state, {MAIN: A, TAG: B})
    assert pushes(events) == []
    assert events[0] == moved(3, (MAIN, None, A), (TAG, None, B), first=5, baseline=True)
    state, events = listing_after(state, {MAIN: A, TAG: B})
    assert [type(event) for event in events] == [RefsListed]
    state, events = listing_after(state, {MAIN: B, TAG: B})
    assert pushes(events) == [(MAIN, A, B)], "a push after that counts"


def test_of_the_refs_that_come_back_only_those_at_other_commits_are_pushes() -> None:
    state, _ = listing_after(after_baseline({MAIN: A, DEV: B}), {})
    _, events = listing_after(state, {MAIN: C, DEV: B})
    assert events[0] == moved(3, (MAIN, None, C), first=5)
    assert events[1] == moved(3, (DEV, None, B), first=6, baseline=True).model_copy(
        update={"part": 1}
    )


def test_a_baseline_is_only_remembered() -> None:
    state = after_baseline({MAIN: A})
    asked = state.when(CONNECTED).then(events=[requested(2, baseline=True)], effects=[ask(2)])
    answer = asked.after().when(listing(2, {MAIN: B}), stream=STREAM)
    assert pushes(answer.events) == []
    assert answer.effects == []
    _, events = listing_after(answer.after(), {MAIN: C})
    assert pushes(events) == [(MAIN, B, C)]


def test_a_baseline_that_comes_third_turns_the_waiting_round_into_one() -> None:
    state = given(CONSUMER, *after_baseline({MAIN: A}).events, requested(2), requested(3))
    upgraded = state.when(CONNECTED).then(events=[requested(3, baseline=True)]).after()
    upgraded.when(CONNECTED).then_nothing()
    first = upgraded.when(listing(2, {MAIN: B}), stream=STREAM)
    assert pushes(first.events) == [(MAIN, A, B)]
    last = first.after().when(listing(3, {MAIN: C}), stream=STREAM)
    assert pushes(last.events) == []


def test_a_disconnected_workspace_starts_nothing_until_it_is_connected_again() -> None:
    gone = WorkspaceDisconnected(workspace="w1")
    state = given(CONSUMER, *after_baseline({MAIN: A}).events, requested(2), gone)
    answer = state.when(listing(2, {MAIN: B}), stream=STREAM)
    assert pushes(answer.events) == []
    back = WorkspaceConnected(workspace="w1", forge="none")
    _, events = listing_after(given(CONSUMER, *answer.after().events, back), {MAIN: C})
    assert pushes(events) == [(MAIN, B, C)]


def test_a_failure_is_recorded_and_the_next_round_follows() -> None:
    state = given(CONSUMER, *after_baseline({MAIN: A}).events, requested(2), requested(3))
    failed = Failed(ask(2), FailureCategory.VALIDATION, "it is not there")
    answer = state.when(failed, stream=STREAM)
    answer.then(
        events=[RefsListed(workspace="w1", round=2, error="it is not there")], effects=[ask(3)]
    )
    back = answer.after().when(listing(3, {MAIN: B}), stream=STREAM)
    assert pushes(back.events) == [(MAIN, A, B)], "a failure does not forget the heads"


def test_a_first_listing_that_failed_leaves_the_next_one_a_baseline() -> None:
    state = given(CONSUMER, KNOWN, requested(1))
    failed = state.when(Failed(ask(1), FailureCategory.VALIDATION, "away"), stream=STREAM).after()
    _, events = listing_after(failed, {MAIN: A})
    assert pushes(events) == []


def test_250_moves_are_three_events() -> None:
    many = {f"refs/heads/b{number:03}": A for number in range(250)}
    state, events = listing_after(after_baseline({}), many)
    parts = [event for event in events if isinstance(event, RefsMoved)]
    assert [(event.part, len(event.moves)) for event in parts] == [(0, 100), (1, 100), (2, 50)]
    assert [move.number for event in parts for move in event.moves] == list(range(1, 251))
    assert state.state(STREAM).refs.heads == many


def test_a_hundred_moves_of_the_longest_names_fit_into_an_event() -> None:
    many = {f"refs/heads/{number:03}{'é' * 120}": A for number in range(100)}
    listing_after(after_baseline({}), many)  # `when` checks the size of its events


def test_the_vanished_refs_that_are_remembered_are_bounded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(refs_module, "MOST_GONE", 3)
    state = after_baseline({f"refs/heads/b{number}": A for number in range(5)})
    state, _ = listing_after(state, {})
    assert sorted(state.state(STREAM).refs.gone) == [
        "refs/heads/b2",
        "refs/heads/b3",
        "refs/heads/b4",
    ]
    _, events = listing_after(state, {"refs/heads/b0": A, "refs/heads/b4": A})
    assert pushes(events) == [("refs/heads/b0", None, A)]


def test_a_state_survives_a_snapshot() -> None:
    state, _ = listing_after(after_baseline({MAIN: A, DEV: B}), {MAIN: C})
    kind = TypeAdapter(WorkspaceState)
    folded = state.state(STREAM)
    assert kind.validate_json(kind.dump_json(folded)) == folded


async def test_performing_lists_the_refs(tmp_path: Path) -> None:
    ports = bench(tmp_path, repositories=FakeRepositories(refs={MAIN: A})).ports
    found = await perform(ask(1), ports)
    assert isinstance(found, RefListing)
    assert (found.refs, found.default_branch) == ({MAIN: A}, "main")
    given(CONSUMER, KNOWN, requested(1)).when(found, stream=STREAM).then_types(
        RefsMoved, RefsListed
    )


class Repository:
    """A repository with one branch, which a listing shows as it is at that moment."""

    def __init__(self) -> None:
        self.state = given(CONSUMER, KNOWN)
        self.flying: ListRefs | None = None
        self.head, self.seen = A, list[tuple[str | None, str]]()

    def push(self, sha: str) -> None:
        """Move the branch: forwards, by force to an older commit, or not at all."""
        self.head = sha

    def hint(self) -> None:
        self._commit(self.state.when(POLL, event_id=UUID(int=len(self.state.events))))

    def answer(self) -> None:
        if self.flying is None:
            return
        number, self.flying = self.flying.round, None
        answer = listing(number, {DEV: self.head})
        self._commit(self.state.when(answer, stream=STREAM))
        self.state.when(answer, stream=STREAM).then_nothing()  # a doubled answer

    def _commit(self, decided: When) -> None:
        if decided.effects:
            assert self.flying is None, "two listings are in flight"
            [flying] = decided.effects
            assert isinstance(flying, ListRefs)
            self.flying = flying
        self.seen += [(before, after) for _, before, after in pushes(decided.events)]
        self.state = decided.after()


@drawn(st.lists(st.sampled_from([A, B, C, "hint", "answer"]), max_size=40))
def test_any_order_and_number_of_hints_finds_the_same_heads_and_loses_no_move(
    steps: list[str],
) -> None:
    repository = Repository()
    repository.hint()
    repository.answer()  # the baseline
    for step in steps:
        if step in ("hint", "answer"):
            getattr(repository, step)()
        else:
            repository.push(step)
    repository.hint()
    while repository.flying is not None:
        repository.answer()
    assert repository.state.state(STREAM).refs.heads == {DEV: repository.head}
    places = [A, *(after for _, after in repository.seen)]
    assert places[-1] == repository.head, "the last push is found, whatever came before"
    assert [before for before, _ in repository.seen] == places[:-1], "each begins where one ended"
    assert all(one != other for one, other in pairwise(places))


@drawn(st.lists(st.sampled_from([HINT, POLL]), min_size=1, max_size=20))
def test_hints_before_an_answer_cost_two_listings_at_most(hints: list[Event]) -> None:
    state = given(CONSUMER, KNOWN)
    num_listings = 0
    for hint in hints:
        decided = state.when(hint)
        num_listings += len(decided.effects)
        state = decided.after()
    for number in (1, 2):
        decided = state.when(listing(number, {MAIN: A}), stream=STREAM)
        num_listings += len(decided.effects)
        state = decided.after()
    assert num_listings == min(2, len(hints))
