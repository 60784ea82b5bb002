"""kill -9 while a run is given a secret for itself alone, and while it ends: the run gets the secret,
and afterwards nobody has it."""

import asyncio

import asyncpg

from infra.operations.local import embedded_postgres
from tests.kit.kills import Stage, once
from tests.kit.ledger import check
from tests.kit.platform import MAIN, final_adapter, run_config

POINTS = once(
    "submit.secrets_given",
    "submit.before_commit",
    "submit.after_commit",
    "rollout.perform.GenerateSample.effect_done",
    "run.intake.tx_after_commit",
)
VALUE = "hush-hush-1"
STEPS = 3
FILES = {
    "rollouts/say/main.py": "import os\n"
    + MAIN.replace(
        "reply = await", 'assert os.environ["KEY"][:5] == "hush-"\n        reply = await'
    )
}
"""A workflow that fails without its secret."""


def act(stage: Stage) -> str:
    """A run that is given a secret. Returns the hash of its weights."""
    config = run_config(advanced={"max_steps": STEPS}, secrets={"required": ["KEY"]})
    with stage.platform(files=FILES) as running:
        run = running.submit(config, workspace="w", secrets={"KEY": VALUE})
        info = running.wait(run, "finished", within_s=300)
        check(running.events(run), steps=STEPS, groups=2, samples=4)
        assert all(point["value"] == 0 for point in info["metrics"]["rollout/failed_ratio"])
        assert asyncio.run(_given(stage)) == []
        told = running.api.get(f"/runs/{run}/events", params={"limit": 500}).text
        assert VALUE not in told
        found = final_adapter(info)
    for log in (stage.home / "logs").iterdir():
        assert VALUE not in log.read_text(errors="replace"), log
    return found


async def _given(stage: Stage) -> list[str]:
    """The owners of the secrets that were given and not taken back."""
    connection = await asyncpg.connect(embedded_postgres.place_for(stage.home).url)
    try:
        rows = await connection.fetch("select owner from run_secrets")
    finally:
        await connection.close()
    return [row["owner"] for row in rows]
