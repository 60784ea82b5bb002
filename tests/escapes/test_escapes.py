"""The corpus of escapes: scripts that attack what is outside of their sandbox, at each level, as root
and as a user without rights. Nothing outside may change or be read.

The twin is level `process-trusted`, at which the same scripts do reach out. So the canaries see them.
"""

import os

import pytest

from tests.escapes.attacks.attack import ATTACKS
from tests.escapes.harness import TRUSTED, load_attacks
from tests.escapes.run_corpus import run_corpus
from tests.kit.runsc import runsc

pytestmark = [pytest.mark.processes, pytest.mark.attacks]
load_attacks()

USERS = ("root", "unprivileged")
BITING = {
    "daemons",
    "descriptors",
    "devices",
    "disk",
    "kernel",
    "memory",
    "privileges",
    "shm",
    "signals",
    "sockets",
    "timebombs",
}
"""The families that reach out without a sandbox, also as another user than the platform's. Those not
named here are held by limits and by the checks of messages at every level."""

BITING_AS_PLATFORM = BITING | {"poison"}
"""Those that do where user code has the platform's user, as on a laptop."""


def users() -> list[str]:
    return [u for u in USERS if u != "root" or os.geteuid() == 0]


def test_the_corpus_is_large_and_each_attack_says_what_it_tries() -> None:
    assert len(ATTACKS) >= 80
    assert all(attack.tries.strip() for attack in ATTACKS.values())


@pytest.mark.slow
@pytest.mark.parametrize("user", users())
def test_without_a_sandbox_the_attacks_reach_out(user: str) -> None:
    outcome = run_corpus(TRUSTED, is_root=user == "root")
    families = {outcome.attacks[name] for name in outcome.effects if name in outcome.attacks}
    assert families >= (BITING if user == "root" else BITING_AS_PLATFORM), outcome.effects
    assert len(outcome.effects) >= 60
    assert outcome.effects.keys() >= {"import (discovery)", "own_port", "own_abstract_socket"}


@pytest.mark.slow
@pytest.mark.parametrize("user", users())
def test_in_namespaces_nothing_outside_is_reached(user: str) -> None:
    outcome = run_corpus("bwrap", is_root=user == "root")
    assert outcome.effects == {}
    assert set(outcome.attacks) == set(ATTACKS)


@pytest.mark.slow
@pytest.mark.gvisor
@pytest.mark.parametrize("user", users())
def test_on_a_kernel_of_its_own_nothing_outside_is_reached(user: str) -> None:
    outcome = run_corpus("gvisor", is_root=user == "root", runsc=runsc())
    assert outcome.effects == {}
    assert set(outcome.attacks) == set(ATTACKS)
