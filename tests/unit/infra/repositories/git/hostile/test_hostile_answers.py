"""Every hostile repository gets the answer that its user waits for: its commit is accepted, or rejected
with a sentence, and its refs are listed, or cannot be for a reason that is told."""

import asyncio
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from uuid import UUID, uuid4

import pytest

from consumers.sync.consumer import CONSUMER
from infra.repositories.git.confinement import find_confinement
from infra.repositories.git.mirrors import GitRepositories
from infra.settings.git import LAPTOP
from infra.spine.postgres.event_log import PostgresLog
from schemas.events import (
    CommitRequested,
    Event,
    RefsCheckRequested,
    RefsListed,
    WorkspaceRejected,
    WorkspaceSynced,
)
from schemas.ids import workspace_stream
from schemas.specs import CommitSpec
from tests.kit.fakes import FakeUserCode
from tests.kit.on_postgres import working
from tests.kit.postgres import fresh_database, open_database
from tests.kit.raw_repository import RawRepository
from tests.unit.infra.repositories.git.hostile.test_hostile_repositories import KINDS
from tests.unit.infra.repositories.git.hostile.trees import Kind

pytestmark = pytest.mark.postgres

WAYS = ("its branch", "its default branch", "a pushed commit", "a missing commit", "its refs")
"""What a user or a forge asks for."""

SAMPLE = (
    "a symbolic link",
    "refs like options",
    "a default branch like an option",
    "a default branch without a commit",
    "a branch that is a file",
    "a branch that is a tree",
)
"""The kinds that `make test` asks for. None of them is tried again, which takes 20 s."""

PATIENCE_S = 120.0
"""How long to wait for all answers. An attempt that fails is repeated four times, within 20 s."""

Answers = Mapping[tuple[str, str], Event]
"""The answer to each kind and way."""


def pushed_id(source: Path) -> str:
    """The id in the file of `main`, or one that no repository has."""
    main = source / "refs" / "heads" / "main"
    text = main.read_text().strip() if main.is_file() else ""
    return text if re.fullmatch("[0-9a-f]{40}", text) else "7" * 40


def spec_of(source: Path, way: str) -> CommitSpec:
    """The commit that is asked for in this way."""
    url = str(source)
    match way:
        case "its branch":
            return CommitSpec(url=url, branch="main")
        case "a pushed commit":
            return CommitSpec(url=url, sha=pushed_id(source), ref="refs/heads/main")
        case "a missing commit":
            return CommitSpec(url=url, sha="6" * 40)
        case _:
            return CommitSpec(url=url)


async def ask(log: PostgresLog, kind: str, source: Path) -> dict[UUID, tuple[str, str]]:
    """Ask for a repository in all ways. Returns the events that ask for commits."""
    workspace, asked = source.parent.name, dict[UUID, tuple[str, str]]()
    for way in WAYS[:-1]:
        pushed = CommitRequested(
            workspace=workspace, workspace_name=workspace, commit=spec_of(source, way)
        )
        [recorded] = await log.append([pushed], cause=uuid4())
        asked[recorded.id] = kind, way
    check = RefsCheckRequested(workspace=workspace, reason="manual")
    await log.append([check], cause=uuid4())
    return asked


async def await_answers(
    log: PostgresLog, asked: Mapping[UUID, tuple[str, str]], kinds: Mapping[str, str]
) -> Answers:
    """Wait for the answers to everything that was asked. `kinds` are those of the workspaces."""
    found: dict[tuple[str, str], Event] = {}
    streams = {workspace_stream(workspace): 0 for workspace in kinds}
    left = asyncio.get_running_loop().time() + PATIENCE_S
    while len(found) < len(asked) + len(kinds) and asyncio.get_running_loop().time() < left:
        await asyncio.sleep(0.1)
        for stream, events in (await log.load(streams)).items():
            for recorded in events:
                streams[stream] = recorded.version
                match recorded.event:
                    case (
                        WorkspaceSynced(request=request)
                        | WorkspaceRejected(request=request) as answer
                    ):
                        found[asked[request]] = answer
                    case RefsListed(workspace=workspace) as answer:
                        found[kinds[workspace], "its refs"] = answer
    return found


async def collect_answers(root: Path, url: str, kinds: Mapping[str, Kind]) -> Answers:
    """Ask one process for repositories of these kinds in all ways, and wait for the answers."""
    repositories = GitRepositories(
        root / "mirrors", settings=LAPTOP, confinement=find_confinement("bwrap")
    )
    user, named, asked = FakeUserCode(), dict[str, str](), dict[UUID, tuple[str, str]]()
    async with (
        open_database(url) as database,
        working(CONSUMER, database, root, repositories=repositories, user=user) as (log, _),
    ):
        for number, (name, kind) in enumerate(kinds.items()):
            source = root / f"w{number}" / "source"
            await asyncio.to_thread(kind.make, RawRepository(source))
            named[source.parent.name] = name
            asked |= await ask(log, name, source)
        return await await_answers(log, asked, named)


def given_answers(
    postgres_url: str, factory: pytest.TempPathFactory, kinds: Iterable[str]
) -> Iterator[Answers]:
    chosen = {name: KINDS[name] for name in kinds}
    with fresh_database(postgres_url) as url:
        yield asyncio.run(collect_answers(factory.mktemp("hostile"), url, chosen))


@pytest.fixture(scope="module")
def few_answers(postgres_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Answers]:
    yield from given_answers(postgres_url, tmp_path_factory, SAMPLE)


@pytest.fixture(scope="module")
def answers(postgres_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Answers]:
    yield from given_answers(postgres_url, tmp_path_factory, KINDS)


def check_answer(answers: Answers, name: str, way: str) -> None:
    """Check that there is an answer that a user can read, and that it is the right one."""
    answer, kind = answers.get((name, way)), KINDS[name]
    assert answer is not None, f"no answer within {PATIENCE_S:g} s"
    said = getattr(answer, "message", None) or getattr(answer, "error", None) or ""
    assert said.isprintable()
    assert len(said) < 2000
    match answer:
        case WorkspaceRejected():
            assert len(said.split()) > 3
            assert way != "its branch" or kind.holds is None, said
        case WorkspaceSynced():
            assert way != "a missing commit"
            assert way != "its branch" or kind.holds is not None


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", SAMPLE)
def test_a_hostile_repository_gets_an_answer(name: str, way: str, few_answers: Answers) -> None:
    check_answer(few_answers, name, way)


@pytest.mark.attacks
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", KINDS)
def test_every_hostile_repository_gets_an_answer(name: str, way: str, answers: Answers) -> None:
    check_answer(answers, name, way)
