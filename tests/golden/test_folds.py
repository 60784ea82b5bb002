"""A fold that changes must raise its consumer's `fold_version`, because snapshots of the old fold
are stored under the old number."""

from dataclasses import replace
from typing import Any

import pytest

from consumers.registry import REGISTRY, load
from infra.spine.runtime.consumer import AnyConsumer
from tests.kit.folds import fingerprints, read_fingerprints, streams


def unchanged(consumer: AnyConsumer) -> None:
    """Raises AssertionError when the fold differs from the one that was recorded under its
    version."""
    known = read_fingerprints().get(consumer.name, {}).get(str(consumer.fold_version), {})
    found = fingerprints(consumer)
    changed = sorted(name for name in known if name in found and found[name] != known[name])
    module = REGISTRY[consumer.name].replace(".", "/") + ".py"
    assert not changed, (
        f"what {consumer.name} folds from {', '.join(changed)} has changed: raise fold_version in "
        f"{module}, then record it with `python -m tests.kit.folds`"
    )
    missing = sorted(set(found) - set(known))
    assert not missing, (
        f"what {consumer.name} folds at fold_version {consumer.fold_version} from "
        f"{', '.join(missing)} is not recorded: `python -m tests.kit.folds` does it"
    )


@pytest.mark.parametrize("name", REGISTRY)
def test_a_fold_changes_only_with_its_version(name: str) -> None:
    unchanged(load(name))


@pytest.mark.parametrize("name", REGISTRY)
def test_the_history_holds_streams_of_every_consumer(name: str) -> None:
    found = {stream.partition("-")[0] for stream in streams()}
    assert load(name).category in found | {
        "verify",
        "regrade",
        "gradients",
        "trigger",
        "status",
        "model",
        "hub",
    }


def test_twin_a_changed_fold_is_noticed() -> None:
    learn = load("learn")

    def counts_twice(state: Any, event: Any) -> Any:
        folded = learn.evolve(state, event)
        return replace(folded, taken=folded.taken + 1)

    with pytest.raises(AssertionError, match=r"raise fold_version in consumers/learn/consumer.py"):
        unchanged(replace(learn, evolve=counts_twice))


def test_a_version_that_is_not_recorded_is_asked_for() -> None:
    sync = load("sync")
    with pytest.raises(AssertionError, match="is not recorded"):
        unchanged(replace(sync, fold_version=sync.fold_version + 1))
