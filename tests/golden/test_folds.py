"""A fold that changes must raise its consumer's `fold_version`, for snapshots of the old fold lie under
the old number."""

from dataclasses import make_dataclass, replace
from typing import Any

import pytest

from consumers.__main__ import REGISTRY, load
from infra.consumer import Consumer
from tests.kit.folds import fingerprint, recorded, streams


def unchanged(consumer: Consumer[Any]) -> None:
    """Raises AssertionError when the fold is not the one that was recorded under its version."""
    known = recorded().get(consumer.name, {}).get(str(consumer.fold_version))
    assert known is not None, (
        f"fold_version {consumer.fold_version} of {consumer.name} is not recorded: "
        "`python -m tests.kit.folds` does it"
    )
    assert fingerprint(consumer) == known, (
        f"what {consumer.name} folds, or its state's type, has changed: raise fold_version in "
        f"consumers/{consumer.name}.py, then record it with `python -m tests.kit.folds`"
    )


@pytest.mark.parametrize("name", REGISTRY)
def test_a_fold_changes_only_with_its_version(name: str) -> None:
    unchanged(load(name))


@pytest.mark.parametrize("name", REGISTRY)
def test_the_history_holds_streams_of_every_consumer(name: str) -> None:
    found = {stream.partition("-")[0] for stream in streams()}
    assert load(name).category in found | {"verify"}


def test_twin_a_changed_fold_is_noticed() -> None:
    learn = load("learn")

    def counts_twice(state: Any, event: Any) -> Any:
        folded = learn.evolve(state, event)
        return replace(folded, taken=folded.taken + 1)

    with pytest.raises(AssertionError, match=r"raise fold_version in consumers/learn.py"):
        unchanged(replace(learn, evolve=counts_twice))


def test_twin_a_changed_state_is_noticed() -> None:
    run = load("run")
    wider = make_dataclass("wider", [("more", int, 0)], bases=(type(run.initial),), frozen=True)
    assert type(run.initial) is not wider
    with pytest.raises(AssertionError, match=r"raise fold_version in consumers/run.py"):
        unchanged(replace(run, initial=wider(), snapshots=wider))


def test_a_version_that_is_not_recorded_is_asked_for() -> None:
    sync = load("sync")
    with pytest.raises(AssertionError, match="is not recorded"):
        unchanged(replace(sync, fold_version=sync.fold_version + 1))
