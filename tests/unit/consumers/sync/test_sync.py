"""The sync consumer answers a request once, however the sync ends."""

import io
import tarfile
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import UUID, uuid5

import pytest

from consumers.sync.consumer import (
    ANSWERED_KEPT,
    CONSUMER,
    WorkspaceState,
    evolve,
    perform,
    perform_fetch,
)
from consumers.sync.snapshot import MAX_ENTRYPOINTS, find_entrypoints_in
from infra.spine.postgres.codec import encode
from schemas.effects import (
    CommitFetched,
    DiscoverRollouts,
    Failed,
    FetchCommit,
    RolloutsDiscovered,
)
from schemas.errors import FailureCategory, Refused
from schemas.events import CommitRequested, PackagesChosen, WorkspaceRejected, WorkspaceSynced
from schemas.ids import HEADRACE, StreamName
from schemas.specs import (
    CommitSpec,
    DiscoveredRollout,
    Entrypoint,
    PackageEnvironment,
    RubricSpec,
)
from tests.kit.decider import given
from tests.kit.fakes import FakeRepositories, FakeUserCode, bench
from tests.kit.specs import ref

STREAM = StreamName("workspace-w1")
REQUEST = UUID(int=1)
COMMIT = CommitSpec(url="/srv/repo", branch="main")
PUSHED = CommitRequested(
    workspace="w1", workspace_name="mine", commit=COMMIT, requester=StreamName("run-r1")
)
FETCH = FetchCommit(
    workspace="w1", request=REQUEST, commit=COMMIT, entrypoints=(), requester="run-r1"
)
FOUND = DiscoveredRollout(entrypoint=Entrypoint(rollout="say"), grader="Count")
FETCHED = CommitFetched(FETCH, commit="c" * 40, snapshot=ref("tree"), rollouts=(FOUND,))
SYNCED = WorkspaceSynced(
    workspace="w1",
    request=REQUEST,
    commit="c" * 40,
    snapshot=ref("tree"),
    rollouts=(FOUND,),
    requester=StreamName("run-r1"),
)
FAILED = Failed(FETCH, FailureCategory.VALIDATION, "no branch main; push it first")
REJECTED = WorkspaceRejected(
    workspace="w1",
    request=REQUEST,
    message="no branch main; push it first",
    requester=StreamName("run-r1"),
)


CHOSEN = PackageEnvironment(
    key="ab" * 32, lock=ref("pins"), python="3.12", platform="linux-x86_64", packages=41
)
PENDING = DiscoveredRollout(entrypoint=Entrypoint(rollout="say"), environment=CHOSEN)
BROKEN = DiscoveredRollout(entrypoint=Entrypoint(rollout="bad"), error="no such package")
INSTALLING = replace(FETCHED, rollouts=(PENDING, BROKEN), needs_packages=True)
PACKAGES = PackagesChosen(
    workspace="w1",
    request=REQUEST,
    commit="c" * 40,
    rollouts=(PENDING,),
    requester=StreamName("run-r1"),
)
DISCOVER = DiscoverRollouts(
    workspace="w1",
    request=REQUEST,
    commit=COMMIT,
    requester="run-r1",
    sha="c" * 40,
    snapshot=ref("tree"),
    rollouts=(PENDING, BROKEN),
)


def test_chosen_packages_are_recorded_before_they_are_installed() -> None:
    given(CONSUMER, PUSHED).when(INSTALLING, stream=STREAM).then(
        events=[PACKAGES], effects=[DISCOVER]
    )
    found = FOUND.model_copy(update={"environment": CHOSEN})
    discovered = RolloutsDiscovered(DISCOVER, (found, BROKEN))
    synced = SYNCED.model_copy(update={"rollouts": (found, BROKEN)})
    after = given(CONSUMER, PUSHED, PACKAGES)
    after.when(discovered, stream=STREAM).then(events=[synced])
    given(CONSUMER, PUSHED, PACKAGES, SYNCED).when(discovered, stream=STREAM).then_nothing()


def test_packages_that_cannot_be_installed_are_a_rejection_that_quotes_the_reason() -> None:
    failed = Failed(DISCOVER, FailureCategory.VALIDATION, "no branch main; push it first")
    given(CONSUMER, PUSHED, PACKAGES).when(failed, stream=STREAM).then(events=[REJECTED])
    given(CONSUMER, PUSHED, REJECTED).when(failed, stream=STREAM).then_nothing()


def test_a_push_asks_for_its_commit() -> None:
    given(CONSUMER, PUSHED).when(PUSHED, event_id=REQUEST).then(effects=[FETCH])


def test_a_push_that_was_answered_decides_nothing() -> None:
    given(CONSUMER, PUSHED, SYNCED).when(PUSHED, event_id=REQUEST).then_nothing()
    given(CONSUMER, PUSHED, REJECTED).when(PUSHED, event_id=REQUEST).then_nothing()


def test_each_push_is_its_own_fetch() -> None:
    other = UUID(int=2)
    effects = given(CONSUMER, PUSHED, SYNCED).when(PUSHED, event_id=other).effects
    assert [effect.id for effect in effects] == [FETCH.model_copy(update={"request": other}).id]
    assert effects[0].id != FETCH.id


def test_a_fetched_commit_is_synced_once() -> None:
    given(CONSUMER, PUSHED).when(FETCHED, stream=STREAM).then(events=[SYNCED])
    given(CONSUMER, PUSHED, SYNCED).when(FETCHED, stream=STREAM).then_nothing()


def test_an_outcome_before_its_push_was_seen_is_an_answer_all_the_same() -> None:
    given(CONSUMER).when(FETCHED, stream=STREAM).then(events=[SYNCED])


def test_a_failed_fetch_is_a_rejection_that_quotes_the_reason() -> None:
    given(CONSUMER, PUSHED).when(FAILED, stream=STREAM).then(events=[REJECTED])
    given(CONSUMER, PUSHED, REJECTED).when(FAILED, stream=STREAM).then_nothing()


def test_a_huge_error_fits_into_the_event() -> None:
    failed = Failed(FETCH, FailureCategory.INTERNAL, "x\x00" * 500_000)
    [rejected] = given(CONSUMER, PUSHED).when(failed, stream=STREAM).events
    assert isinstance(rejected, WorkspaceRejected)
    assert rejected.message.endswith("…")
    assert "\x00" not in rejected.message


PLAIN = SYNCED.model_copy(update={"requester": None, "commit": "a" * 40})
"""The workspace's own first look, at an older commit than the one that the run found."""

FOLLOWS = CommitSpec(url="/srv/repo")


def fetched(spec: CommitSpec) -> CommitFetched:
    return replace(
        FETCHED, effect=FETCH.model_copy(update={"commit": spec, "request": UUID(int=9)})
    )


def test_a_run_that_finds_a_new_head_has_the_workspace_look_at_all_of_it() -> None:
    found = given(CONSUMER, PUSHED, PLAIN).when(fetched(FOLLOWS), stream=STREAM)
    [look] = found.effects
    assert isinstance(look, FetchCommit)
    assert (look.commit, look.entrypoints, look.requester) == (FOLLOWS, (), None)
    again = given(CONSUMER, PUSHED, PLAIN).when(fetched(FOLLOWS), stream=STREAM)
    assert again.effects[0].id == look.id, "the runs of a sweep ask for one look"
    looked = PLAIN.model_copy(update={"request": look.request, "commit": FETCHED.commit})
    known = given(CONSUMER, PUSHED, PLAIN, looked).when(fetched(FOLLOWS), stream=STREAM)
    assert known.effects == []


@pytest.mark.parametrize(
    "spec", [CommitSpec(url="/srv/repo", sha="c" * 40), CommitSpec(url="/srv/repo", branch="dev")]
)
def test_a_run_of_another_commit_does_not_move_the_workspace(spec: CommitSpec) -> None:
    assert given(CONSUMER, PUSHED, PLAIN).when(fetched(spec), stream=STREAM).effects == []


def test_the_state_stays_small() -> None:
    state = WorkspaceState()
    for number in range(3 * ANSWERED_KEPT):
        state = evolve(state, SYNCED.model_copy(update={"request": uuid5(HEADRACE, str(number))}))
    assert len(state.answered) == ANSWERED_KEPT


def tree(*names: str, **texts: str) -> bytes:
    """A snapshot of a repository. `texts` are the `pyproject.toml` files of rollouts, by name."""
    files = dict.fromkeys(names, "\n")
    files |= {f"rollouts/{name}/pyproject.toml": text for name, text in texts.items()}
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for name, text in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(text.encode())
            tar.addfile(member, io.BytesIO(text.encode()))
    return buffer.getvalue()


def test_entry_points_are_the_main_files_of_rollouts() -> None:
    names = ("rollouts/b/main.py", "rollouts/a/main.py", "rollouts/a/other.py", "main.py")
    found = find_entrypoints_in(tree(*names, "rollouts/a/deep/main.py", "data/x/main.py"))
    assert found == (Entrypoint(rollout="a"), Entrypoint(rollout="b"))


def test_a_commit_with_too_many_rollouts_is_refused() -> None:
    names = [f"rollouts/r{number}/main.py" for number in range(MAX_ENTRYPOINTS + 1)]
    with pytest.raises(Refused, match="name the entry point"):
        find_entrypoints_in(tree(*names))


async def test_performing_stores_the_snapshot_and_looks_into_every_rollout(tmp_path: Path) -> None:
    content = tree("rollouts/b/main.py", "rollouts/a/main.py")
    user = FakeUserCode()
    ports = bench(tmp_path, repositories=FakeRepositories(content), user=user).ports
    outcome = await perform_fetch(FETCH, ports)
    assert outcome.commit == "c" * 40
    assert await ports.artifacts.get_artifact(outcome.snapshot) == content
    assert user.discovered == [(Entrypoint(rollout="a"), Entrypoint(rollout="b"))]
    given(CONSUMER).when(outcome, stream=STREAM).then_types(WorkspaceSynced)


async def test_performing_looks_into_the_entry_points_that_were_named(tmp_path: Path) -> None:
    user = FakeUserCode()
    ports = bench(tmp_path, repositories=FakeRepositories(tree("README")), user=user).ports
    named = (Entrypoint(rollout="say", path="agent.py"),)
    await perform_fetch(FETCH.model_copy(update={"entrypoints": named}), ports)
    assert user.discovered == [named]


NEEDS = '[project]\nname = "x"\nversion = "0"\ndependencies = ["numpy>=2", "headrace"]\n'


async def test_the_chosen_packages_of_a_rollout_are_stored_with_its_commit(tmp_path: Path) -> None:
    wants = NEEDS.replace("numpy>=2", "httpx")
    repositories = FakeRepositories(tree("rollouts/a/main.py", "rollouts/b/main.py", a=wants))
    ports = bench(tmp_path, repositories=repositories, user=FakeUserCode()).ports
    outcome = await perform_fetch(FETCH, ports)
    a, b = outcome.rollouts
    assert a.environment is not None
    assert a.environment.python == "3.11"
    assert await ports.artifacts.get_artifact(a.environment.lock) == b""
    assert b.environment is None
    assert outcome.needs_packages
    discover = DISCOVER.model_copy(
        update={"snapshot": outcome.snapshot, "rollouts": outcome.rollouts}
    )
    found = await perform(discover, ports)
    assert isinstance(found, RolloutsDiscovered)
    assert [one.environment for one in found.rollouts] == [a.environment, None]
    assert all(one.error for one in found.rollouts)


class Wordy(FakeUserCode):
    """Finds these rubrics in every entry point."""

    rubrics: tuple[RubricSpec, ...] = ()

    async def discover(self, *arguments: Any, **named: Any) -> tuple[DiscoveredRollout, ...]:
        found = await super().discover(*arguments, **named)
        named = {"rubrics": self.rubrics, "error": None}
        return tuple(one.model_copy(update=named) for one in found)


async def test_definitions_that_do_not_fit_into_an_event_are_told(tmp_path: Path) -> None:
    """They ended as a dead letter, and the workspace was never answered."""
    rubrics = tuple(
        RubricSpec(name=f"r{n}", text="\U0001f600" * 4000, model="m") for n in range(16)
    )
    many = [f"rollouts/r{n:02}/main.py" for n in range(64)]
    user = Wordy()
    user.rubrics = rubrics
    ports = bench(tmp_path, repositories=FakeRepositories(tree(*many)), user=user).ports
    outcome = await perform_fetch(FETCH, ports)
    synced = SYNCED.model_copy(update={"rollouts": outcome.rollouts})
    encode(synced)
    assert all((one.error or "").endswith("of a commit; shorten them") for one in outcome.rollouts)
    assert {one.rubrics for one in outcome.rollouts} == {()}
    user.rubrics = rubrics[:1]
    outcome = await perform_fetch(FETCH, ports)
    encode(SYNCED.model_copy(update={"rollouts": outcome.rollouts}))
    assert [bool(one.error) for one in outcome.rollouts] == [False] + [True] * 63


async def test_a_rollout_that_only_chooses_its_python_is_examined_at_once(tmp_path: Path) -> None:
    wants = NEEDS.replace('"numpy>=2", "headrace"', "") + 'requires-python = ">=3.11"\n'
    repositories = FakeRepositories(tree("rollouts/a/main.py", a=wants))
    user = FakeUserCode()
    outcome = await perform_fetch(
        FETCH, bench(tmp_path, repositories=repositories, user=user).ports
    )
    assert not outcome.needs_packages
    assert user.discovered == [(Entrypoint(rollout="a"),)]
    assert outcome.rollouts[0].environment is not None


async def test_a_rollout_with_dependencies_is_refused_by_name_and_its_neighbours_are_not(
    tmp_path: Path,
) -> None:
    mains = ("rollouts/a/main.py", "rollouts/b/main.py")
    plain = NEEDS.replace('"numpy>=2", ', "")
    user = FakeUserCode()
    repositories = FakeRepositories(tree(*mains, a=NEEDS, b=plain))
    outcome = await perform_fetch(
        FETCH, bench(tmp_path, repositories=repositories, user=user).ports
    )
    assert user.discovered == [(Entrypoint(rollout="b"),)]
    [refused] = [found for found in outcome.rollouts if found.entrypoint.rollout == "a"]
    assert refused.error is not None
    assert refused.error == "rollouts/a/pyproject.toml: the packages cannot be installed"
