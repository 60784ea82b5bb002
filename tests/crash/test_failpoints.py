"""kill -9 at every failpoint there is, a process for each consumer: same bits, nothing lost or doubled.

On the embedded default all of them; on real components one of every consumer and of the relay, for what
a commit is does not depend on who brings the message.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from consumers.registry import CONTROL_ONLY
from infra.failpoints import CONSUMERS
from tests.chaos.plan import Trial, batches, points, trial
from tests.chaos.scene import SettingsFactory
from tests.chaos.trials import Chaos
from tests.kit.stacks import RealStack

pytestmark = [pytest.mark.kills, pytest.mark.processes, pytest.mark.torch, pytest.mark.postgres]

ON_REAL = {
    **{
        f"{consumer}.intake.tx_after_commit": 1
        for consumer in CONSUMERS
        if consumer not in (*CONTROL_ONLY, "deploy", "publish", "regrade", "compare")
    },
    "relay.after_ack": 2,
    "relay.before_send": 3,
}


@contextmanager
def calmed(root: Path, fresh_settings: SettingsFactory) -> Iterator[Chaos]:
    """With the undisturbed runs done."""
    chaos = Chaos(root, seed=0, fresh_settings=fresh_settings)
    with chaos.platform("home") as started:
        chaos.twins(started)
    yield chaos


@pytest.fixture(scope="module")
def embedded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chaos]:
    with calmed(tmp_path_factory.mktemp("embedded"), dict) as chaos:
        yield chaos


@pytest.mark.parametrize("index", range(len(batches(points("embedded")))))
def test_a_kill_at_every_failpoint_changes_nothing(embedded: Chaos, index: int) -> None:
    line = embedded.armed(trial(0, index, stack="embedded"))
    assert "wrong" not in line, line


@pytest.mark.kafka
@pytest.mark.s3
def test_a_kill_of_every_consumer_on_real_components_changes_nothing(
    real_stack: RealStack, tmp_path: Path
) -> None:
    with calmed(tmp_path, real_stack.fresh_settings) as chaos:
        line = chaos.armed(Trial(0, "workflow", ON_REAL, ()))
    assert "wrong" not in line, line
