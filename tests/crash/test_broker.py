"""Kafka is emptied, or cut off in silence, or brings everything ten times in any order, in the middle of
a run in which every hop passes it: the run goes on by itself and ends with the same bits, and Kafka
carries what comes after.

HEADRACE_CUT_S says for how long it is cut off; without it a little longer than a request may take, and
only in the harder of two ways.
"""

import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from infra.operations.local.free_port import free_port
from infra.settings.kafka import KafkaSettings
from infra.spine.bus.kafka.connect import REQUEST_MS
from tests.kit.duplicator import duplicator
from tests.kit.kafka import environment, need_kafka
from tests.kit.ledger import check
from tests.kit.partition_proxy import PartitionProxy, partition_proxy
from tests.kit.platform import (
    Platform,
    eventually,
    final_adapter,
    make_workspace,
    platform,
    run_config,
)
from tests.kit.stacks import RealStack
from tests.stack.kafka import KafkaServer, kafka_server

pytestmark = [
    pytest.mark.kills,
    pytest.mark.processes,
    pytest.mark.torch,
    pytest.mark.postgres,
    pytest.mark.kafka,
    pytest.mark.s3,
]

LONG = os.environ.get("HEADRACE_CUT_S")
CUT_S = float(LONG or REQUEST_MS / 1000 + 1)
CUTS = {"connections-die": True} | ({"connections-come-back": False} if LONG else {})
STEPS = 12
CONFIG = run_config(advanced={"max_steps": STEPS})


@dataclass(frozen=True, slots=True)
class Disturbable:
    """A platform whose broker, and the network before it, are the test's to disturb. `undisturbed`: the
    weights that CONFIG ends in when nobody does."""

    platform: Platform
    broker: KafkaServer
    network: PartitionProxy
    undisturbed: str

    def through(self, disturb: Callable[[], None]) -> str:
        """The id of a run that was disturbed after its second step and has ended as it should."""
        run = self.platform.submit(CONFIG, workspace="w")
        eventually(lambda: self._step(run) >= 2 or None, within_s=60, what="step 2")
        disturb()
        assert self._step(run) < STEPS, "it was over before it was disturbed"
        info = self.platform.wait(run, "finished", within_s=180)
        assert final_adapter(info) == self.undisturbed
        check(self.platform.events(run), steps=STEPS, groups=2, samples=4)
        return run

    def carries(self) -> None:
        """Kafka is used again: everything is published to it, and every group has read it."""

        def well() -> bool | None:
            bus = self.platform.get("/status")["bus"]
            fresh = bus["seen_s"] is not None and bus["seen_s"] < 10
            return (fresh and not bus["relay_behind"] and not any(bus["lag"].values())) or None

        eventually(well, within_s=60, what="Kafka carries everything again")

    def _step(self, run: str) -> int:
        info: Any = self.platform.info(run)
        return int(info["run"]["current_step"] or 0)


@pytest.fixture(scope="module")
def here(real_stack: RealStack, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Disturbable]:
    need_kafka()
    root = tmp_path_factory.mktemp("broker")
    workspace = make_workspace(root / "workspace")
    port = free_port()
    with (
        partition_proxy("127.0.0.1", port) as network,
        kafka_server(root / "kafka", before=(network.port, port)) as broker,
    ):
        settings = {
            **real_stack.fresh_settings(),
            **environment(broker.bootstrap),
            "HEADRACE_WORKERS": "each",
        }
        with platform(root / "home", environment=settings) as started:
            started.post("/workspaces", {"url": str(workspace), "name": "w"}, key="workspace")
            started.upload("numbers")
            calm = started.wait(started.submit(CONFIG, workspace="w"), "finished")
            yield Disturbable(started, broker, network, final_adapter(calm))


def test_a_run_through_a_broker_that_lost_everything_ends_with_the_same_bits(
    here: Disturbable,
) -> None:
    known = here.broker.cluster_id

    def lose_everything() -> None:
        here.broker.stop()
        here.broker.wipe()
        here.broker.start()

    here.through(lose_everything)
    assert here.broker.cluster_id != known
    here.carries()


@pytest.mark.parametrize("forget", CUTS.values(), ids=CUTS)
def test_a_run_goes_on_after_the_bus_was_cut_off(here: Disturbable, forget: bool) -> None:
    def cut_off() -> None:
        here.network.cut(forget=forget)
        time.sleep(CUT_S)
        here.network.heal()

    here.through(cut_off)
    here.carries()


def test_a_run_whose_records_come_ten_times_in_any_order_ends_with_the_same_bits(
    here: Disturbable,
) -> None:
    kafka = KafkaSettings.load(here.platform.environment)
    assert kafka is not None
    with duplicator(kafka, times=9, seed=0) as copying:
        run = here.through(lambda: None)
    here.carries()
    assert min(copying.copies.values()) == 9
    told = {event["id"] for event in here.platform.events(run)}
    assert told <= set(copying.copies), "not all of the run was repeated"
