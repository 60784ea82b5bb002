"""The database is cut off for a while, and no process gets an error; then the network heals. The run
goes on by itself and ends with the same bits, whether the old connections come back or are dead for
good."""

import asyncio
import os
import threading
import time
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.crash.test_database_restarts import Watcher, _workers_started
from tests.kit.ledger import check
from tests.kit.partition_proxy import partition_proxy
from tests.kit.platform import eventually, final_adapter, make_workspace, platform, run_config
from tests.kit.postgres import database_of, execute
from tests.stack.postgres import PostgresServer

pytestmark = [pytest.mark.kills, pytest.mark.processes, pytest.mark.torch, pytest.mark.postgres]

CUT_S = float(os.environ.get("HEADRACE_CUT_S", "15"))
STEPS = 60
CONFIG = run_config(advanced={"max_steps": STEPS})


def test_a_run_goes_on_after_the_network_healed(own_server: PostgresServer, tmp_path: Path) -> None:
    asyncio.run(execute(own_server.url, "create database headrace"))
    direct = database_of(own_server.url, "headrace")
    workspace = make_workspace(tmp_path / "workspace")
    with partition_proxy("127.0.0.1", own_server.port) as network:
        parts = urlsplit(direct)
        url = direct.replace(f"{parts.hostname}:{parts.port}", f"127.0.0.1:{network.port}")
        with platform(tmp_path / "home", environment={"HEADRACE_DATABASE_URL": url}) as started:
            started.post("/workspaces", {"url": str(workspace), "name": "w"}, key="workspace")
            started.upload("numbers")
            calm = started.submit(CONFIG, workspace="w", name="calm")
            undisturbed = final_adapter(started.wait(calm, "finished", within_s=300))
            restarts = _workers_started(started)
            run = started.submit(CONFIG, workspace="w", name="cut")
            watcher = Watcher(started.api, run)
            thread = threading.Thread(target=watcher.watch)
            thread.start()
            try:
                for step, forget in ((2, False), (5, True)):
                    eventually(
                        partial(watcher.has_reached, step),
                        within_s=120,
                        what=f"step {step}; {watcher.wrong[:3]}",
                    )
                    network.cut(forget=forget)
                    time.sleep(CUT_S)
                    assert watcher.furthest < STEPS, "it was over before it was cut"
                    network.heal()
                info = started.wait(run, "finished", within_s=120)
            finally:
                watcher.stop.set()
                thread.join()
            assert final_adapter(info) == undisturbed
            check(started.events(run), steps=STEPS, groups=2, samples=4)
            assert not watcher.wrong, watcher.wrong[:5]
            assert watcher.statuses[503] > 0, "the cut was not even noticed"
            assert _workers_started(started) == restarts, "processes outlive the cut"
