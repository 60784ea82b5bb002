"""What an actor may see, for each way in which its API key can be bound."""

import pytest

from infra.ports.actor import (
    MAIN,
    PUSH,
    Actor,
    acting_as,
    is_confined,
    may_change_shared,
    may_see,
    may_use_dataset,
    narrowed_to,
    own_organisation,
    own_workspace,
    see_added,
    visible_organisation,
    visible_workspaces,
)

NOBODY = frozenset[str]()
OPERATOR = Actor("root", "admin", frozenset())
OF_RIVERS = Actor("k", "ada", frozenset(), organisation="rivers", workspaces=frozenset({"a", "b"}))
OF_ONE = Actor("k", "ada", frozenset(), organisation="rivers", workspaces=frozenset({"a"}))
OF_NONE = Actor("k", "ada", frozenset(), organisation="rivers", workspaces=NOBODY)
UNKNOWN = Actor("k", "ada", frozenset(), organisation="rivers")
BOUND = Actor("k", "ada", frozenset(), workspace="a", organisation="rivers")
OLD = Actor("k", "ada", frozenset(), workspace="m")
PUSHED = Actor(PUSH, "push", frozenset(), workspace="a", organisation="rivers")
PUSHED_IN_MAIN = Actor(PUSH, "push", frozenset(), workspace="m", organisation=MAIN)


@pytest.mark.parametrize(
    ("actor", "seen", "own", "home"),
    [
        (OPERATOR, {"a", "b", "m", None}, None, MAIN),
        (OF_RIVERS, {"a", "b"}, None, "rivers"),
        (OF_ONE, {"a"}, "a", "rivers"),
        (OF_NONE, set(), None, "rivers"),
        (UNKNOWN, set(), None, "rivers"),
        (BOUND, {"a"}, "a", "rivers"),
        (OLD, {"m"}, "m", MAIN),
        (PUSHED, {"a"}, "a", "rivers"),
        (PUSHED_IN_MAIN, {"m", None}, "m", MAIN),
    ],
)
def test_an_actor_sees_what_its_key_is_bound_to(
    actor: Actor, seen: set[str | None], own: str | None, home: str
) -> None:
    with acting_as(actor):
        assert {one for one in ("a", "b", "m", None) if may_see(one)} == seen
        assert (own_workspace(), own_organisation()) == (own, home)
        assert is_confined() is (actor is not OPERATOR)
        shown = visible_workspaces()
        assert shown is None if actor is OPERATOR else shown == sorted(seen - {None}, key=str)


@pytest.mark.parametrize(
    ("actor", "used", "changed"),
    [
        (OPERATOR, {None, MAIN, "rivers"}, {None, MAIN, "rivers"}),
        (OF_RIVERS, {"rivers"}, {"rivers"}),
        (UNKNOWN, {"rivers"}, {"rivers"}),
        (BOUND, {"rivers"}, set()),
        (OLD, {None, MAIN}, set()),
        (PUSHED, {"rivers"}, set()),
    ],
)
def test_a_shared_dataset_is_of_its_organisation(
    actor: Actor, used: set[str | None], changed: set[str | None]
) -> None:
    with acting_as(actor):
        homes = (None, MAIN, "rivers")
        assert {home for home in homes if may_use_dataset(None, home)} == used
        assert {home for home in homes if may_change_shared(home)} == changed
        assert may_use_dataset("b", "rivers") is may_see("b")


def test_nobody_acting_sees_everything() -> None:
    assert may_see(None)
    assert may_use_dataset(None, "rivers")
    assert (visible_workspaces(), visible_organisation()) == (None, None)


def test_an_actor_can_be_narrowed_to_a_workspace_of_an_organisation() -> None:
    with acting_as(OPERATOR):
        with narrowed_to("a", "rivers"):
            assert (may_see("a"), may_see("b"), own_organisation()) == (True, False, "rivers")
        assert may_see("b")


def test_an_added_workspace_is_seen_until_the_request_ends() -> None:
    with acting_as(OF_ONE):
        see_added("b")
        assert may_see("b")
    with acting_as(OF_ONE):
        assert not may_see("b")
    with acting_as(BOUND):
        see_added("b")
        assert not may_see("b"), "a key of one workspace adds none"
