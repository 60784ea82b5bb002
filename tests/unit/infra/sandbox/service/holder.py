"""A program that holds credentials, as a worker does, and starts a sandbox service.

It prints a line of JSON: the process ids of the service and of a fork of itself. Then it waits.
`holder.py fork` forks; `holder.py run` keeps a workflow running.
"""

import asyncio
import json
import os
import signal
import sys

from infra.ports.services import SandboxOwner
from infra.sandbox.service import child
from infra.sandbox.service.child import ChildService
from infra.sandbox.service.client import SandboxClient
from infra.settings.settings import Settings
from schemas.artifact_refs import ArtifactRef
from schemas.sampling import Message
from tests.kit.sockets import DeadSockets
from tests.kit.user_snapshots import rollout_of, snapshot_of

MAIN = """
import asyncio
from headrace import AgentWorkflow, Grader


class Do(AgentWorkflow):
    async def run(self, ctx):
        await asyncio.sleep(3600)


class Check(Grader):
    async def grade(self, ctx): ...
"""
SNAPSHOT = snapshot_of(MAIN)


async def fetch(ref: ArtifactRef) -> bytes:
    return SNAPSHOT


async def hold(mode: str) -> None:
    settings = Settings.load(os.environ)
    in_memory = [f"{settings.database_url} {number}" for number in range(1000)]
    if "PYTHONPATH" in os.environ:  # of a Python that does not have our libraries itself
        whole = child.make_env_vars
        path = {"PYTHONPATH": os.environ["PYTHONPATH"]}
        child.make_env_vars = lambda level, *, environments=None: {
            **whole(level, environments=environments),
            **path,
        }
    os.set_inheritable(os.open(__file__, os.O_RDONLY), True)
    service = ChildService(settings.sandbox)
    user = SandboxClient(service, fetch=fetch, sockets=DeadSockets())
    await user.start()
    await user.discover(SNAPSHOT, ())
    if mode == "run":
        call = user.run_workflow(
            rollout_of(SNAPSHOT),
            owner=SandboxOwner("run-1"),
            sample="s",
            prompt=[Message(role="user", content="?")],
            metadata={},
            base_path="/v1/samples/s",
            api_key="key",
        )
        task = asyncio.ensure_future(call)
        await asyncio.wait([task], timeout=0.5)
        assert not task.done()
    fork = os.fork() if mode == "fork" else None
    if fork == 0:
        signal.pause()
    sys.stdout.write(json.dumps({"service": service.pid, "fork": fork}) + "\n")
    sys.stdout.flush()
    await asyncio.to_thread(sys.stdin.read)
    assert in_memory


if __name__ == "__main__":
    asyncio.run(hold(sys.argv[1]))
