"""The triggers of a pushed commit: read from git, matched, and submitted with the commit's own TOML."""

import json
from collections.abc import Mapping
from pathlib import Path

import pytest

from consumers.trigger.examine import MOST_MATCHES, NO_FILE, NO_MATCH, examine, labels_of, submit
from schemas.effects import ExaminePush, PushRead, SubmitRun
from schemas.errors import NotFound, RepositoryAway
from schemas.specs import CommitSpec, Push, PushOrigin, TriggerMatch
from schemas.toml.triggers import parse_triggers
from tests.kit.fakes import Bench, FakeRepositories, bench

SHA = "c" * 40
CONFIG = "configs/training/x.toml"


def push(ref: str = "refs/heads/main") -> Push:
    return Push(
        workspace="w1",
        workspace_name="sums",
        url="/srv/sums.git",
        number=7,
        ref=ref,
        before="a" * 40,
        after=SHA,
    )


def triggers(*tables: str) -> Mapping[str, bytes]:
    text = "\n".join(f'[[trigger]]\nconfig = "{CONFIG}"\n{table}' for table in tables)
    return {"headrace.toml": text.encode()}


async def found(
    tmp_path: Path,
    files: Mapping[str, bytes],
    *,
    ref: str = "refs/heads/main",
    message: str = "a commit",
    changed: tuple[str, ...] | None = (),
) -> PushRead:
    repositories = FakeRepositories(files=files, message=message, changed=changed)
    return await examine(
        ExaminePush(push=push(ref)), bench(tmp_path, repositories=repositories).ports
    )


async def test_a_trigger_without_conditions_matches_every_branch(tmp_path: Path) -> None:
    outcome = await found(tmp_path, triggers("", 'set = { "training.lr" = 1e-4 }'))
    assert (outcome.reason, outcome.error) == (None, None)
    first, second = outcome.matches
    assert (first.trigger, first.config, first.run_name) == (1, CONFIG, "x-ccccccc")
    assert (second.trigger, json.loads(second.overrides)) == (2, {"training": {"lr": 1e-4}})
    assert outcome.day


@pytest.mark.parametrize(
    ("table", "ref", "matches"),
    [
        ('branches = ["main"]', "refs/heads/main", True),
        ('branches = ["main"]', "refs/heads/dev", False),
        ('branches = ["**", "!wip/**"]', "refs/heads/wip/x", False),
        ('branches = ["main"]', "refs/tags/main", False),
        ('tags = ["v*"]', "refs/tags/v1", True),
        ('tags = ["v*"]', "refs/heads/v1", False),
        ("", "refs/tags/v1", False),
        ("", "refs/heads/any/thing", True),
    ],
)
async def test_a_trigger_matches_refs_by_its_patterns(
    tmp_path: Path, table: str, ref: str, *, matches: bool
) -> None:
    outcome = await found(tmp_path, triggers(table), ref=ref)
    assert bool(outcome.matches) is matches
    assert outcome.reason == (None if matches else NO_MATCH)


@pytest.mark.parametrize(
    ("changed", "matches"),
    [
        (("rollouts/a/main.py",), True),
        (("README.md",), False),
        (("rollouts/a/README.md",), False),
        ((), False),
        (None, True),
    ],
)
async def test_paths_are_those_that_git_found(
    tmp_path: Path, changed: tuple[str, ...] | None, *, matches: bool
) -> None:
    table = 'paths = ["rollouts/**", "!**/*.md"]'
    outcome = await found(tmp_path, triggers(table), changed=changed)
    assert bool(outcome.matches) is matches


async def test_a_commit_says_that_it_is_not_to_train(tmp_path: Path) -> None:
    outcome = await found(tmp_path, triggers(""), message="Mend a comment\n\n[skip train]")
    assert outcome.matches == ()
    assert outcome.reason == "the commit's message has [skip train]"


async def test_no_file_is_no_error_and_a_wrong_file_is_one(tmp_path: Path) -> None:
    assert (await found(tmp_path, {})).reason == NO_FILE
    wrong = await found(tmp_path, triggers('branchs = ["main"]'))
    assert wrong.error is not None
    assert "trigger[0].branchs" in wrong.error
    assert "did you mean branches" in wrong.error


async def test_too_many_matches_are_an_error(tmp_path: Path) -> None:
    outcome = await found(tmp_path, triggers(*[""] * (MOST_MATCHES + 1)))
    assert outcome.matches == ()
    assert outcome.error is not None
    assert "33 triggers" in outcome.error


class Away(FakeRepositories):
    async def fetch(self, workspace: str, commit: CommitSpec) -> str:
        raise RepositoryAway("no answer")


async def test_a_repository_that_is_away_is_left_to_the_retry(tmp_path: Path) -> None:
    with pytest.raises(RepositoryAway):
        await examine(ExaminePush(push=push()), bench(tmp_path, repositories=Away()).ports)


class Submitted:
    """A door that records what goes through it."""

    def __init__(self) -> None:
        self.seen: list[tuple[PushOrigin, bytes]] = []

    async def submit(self, origin: PushOrigin, config: bytes) -> str:
        self.seen.append((origin, config))
        return "x-1"


def submission(tmp_path: Path, files: Mapping[str, bytes]) -> tuple[SubmitRun, Bench, Submitted]:
    match = TriggerMatch(trigger=2, config=CONFIG)
    origin = PushOrigin(push=push(), match=match, context="headrace/sums/x")
    door = Submitted()
    made = bench(tmp_path, repositories=FakeRepositories(files=files), submissions=door)
    return SubmitRun(origin=origin), made, door


async def test_a_run_is_submitted_with_the_toml_of_its_commit(tmp_path: Path) -> None:
    effect, made, door = submission(tmp_path, {CONFIG: b"[experiment]"})
    outcome = await submit(effect, made.ports)
    assert outcome.run_name == "x-1"
    assert door.seen == [(effect.origin, b"[experiment]")]


async def test_a_missing_toml_is_refused_with_the_trigger_that_names_it(tmp_path: Path) -> None:
    effect, made, _ = submission(tmp_path, {})
    with pytest.raises(NotFound, match=r"trigger 2 of headrace.toml names configs/training/x.toml"):
        await submit(effect, made.ports)


def test_a_label_is_that_of_the_whole_file() -> None:
    file = "".join(
        f'[[trigger]]\nconfig = "{path}"\n'
        for path in ("a/x.toml", "b/x.toml", "a/y.toml", "a/x.toml")
    )
    assert labels_of(parse_triggers(file.encode())) == ("x", "x#2", "y", "x#3")


async def test_a_message_that_skips_is_read_before_the_triggers(tmp_path: Path) -> None:
    broken = {"headrace.toml": b"["}
    assert (await found(tmp_path, broken, message="x [train skip]")).error is None
    assert (await found(tmp_path, broken)).error is not None
