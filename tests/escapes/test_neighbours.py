"""A deterministic run beside attacks ends with the same bits as one that is alone."""

import asyncio
import contextlib
import dataclasses
import itertools
import json
import secrets
from pathlib import Path

import pytest

from infra.ports.services import SandboxOwner
from schemas.errors import TransientError, UserCodeError
from schemas.sampling import Message
from tests.escapes.attacks.attack import ATTACKS
from tests.escapes.harness import attacking_rollout, load_attacks, snapshot
from tests.escapes.outside import Outside
from tests.kit.in_memory import InMemory, in_memory
from tests.kit.platform import ROWS, make_workspace, run_config

pytestmark = [pytest.mark.processes, pytest.mark.torch, pytest.mark.slow, pytest.mark.attacks]

ATTACKER = SandboxOwner(run="attacker")
FEWEST = 60
"""How many attacks at least have been made when the run has ended."""


async def attack_for_ever(platform: InMemory, outside: Outside, made: list[str]) -> None:
    """Make all attacks that may be made here, again and again, in the platform's own sandboxes."""
    load_attacks()
    tree = snapshot(json.dumps(dataclasses.asdict(outside.targets())))
    rollout = attacking_rollout(
        await platform.artifacts.put_artifact(tree, run="attacker", blob=True)
    )
    chosen = [a.name for a in ATTACKS.values() if a.is_safe and a.family != "floods"]
    for name in itertools.cycle(chosen):
        with contextlib.suppress(UserCodeError, TransientError):
            await platform.user.run_workflow(
                rollout,
                owner=ATTACKER,
                sample=f"{name}-{secrets.token_hex(4)}",
                prompt=[Message(role="user", content=name)],
                metadata={"targets": json.dumps(dataclasses.asdict(outside.targets()))},
                base_path="/none",
                api_key="none",
            )
        made.append(name)


async def final_adapter(home: Path, workspace: Path, *, outside: Outside | None) -> str:
    """The hash of the weights of a run, with attacks beside it if there is an `outside`."""
    home.mkdir()
    rows = home / "rows.jsonl"
    rows.write_text(ROWS)
    async with in_memory(home / "home") as started, asyncio.timeout(360):
        made: list[str] = []
        task = None
        if outside is not None:
            task = asyncio.ensure_future(attack_for_ever(started, outside, made))
        await started.workspaces.add(str(workspace), "w")
        await started.upload("numbers", rows)
        await started.run_to_end(run_config(), workspace="w")
        while task is not None and len(made) < FEWEST:
            await asyncio.sleep(0.05)
            assert not task.done(), task.exception()
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        return started.final_adapter()


async def test_the_bits_of_a_run_do_not_depend_on_attacks_beside_it(tmp_path: Path) -> None:
    workspace = make_workspace(tmp_path / "workspace")
    alone = await final_adapter(tmp_path / "alone", workspace, outside=None)
    token = secrets.token_hex(6)
    outside = Outside(token, f"mark-{token}-{secrets.token_hex(8)}")
    try:
        attacked = await final_adapter(tmp_path / "attacked", workspace, outside=outside)
        changes = [c for c in outside.changes() if not c.startswith("code changed")]
    finally:
        outside.close()
    assert attacked == alone
    assert changes == []
