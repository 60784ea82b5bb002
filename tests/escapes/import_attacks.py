"""An entry point that attacks while it is imported, which is also while it is discovered. It is copied
into the rollout's tree as main.py, beside the attacks."""

import importlib
import json
import os
from pathlib import Path

from headrace import AgentWorkflow
from tests.escapes.attacks.attack import ATTACKS, CLAIM, Targets

HERE = Path(__file__).parent
NAMES = (
    "loopback",
    "double_fork",
    "new_session",
    "write_everywhere",
    "read_secret_files",
    "overwrite_files",
    "change_tree",
    "change_sdk",
    "kill_victim",
    "read_segment",
    "environment_of_parent",
    "new_posix",
)
for file in sorted((HERE / "tests" / "escapes" / "attacks").glob("*.py")):
    if file.stem not in ("__init__", "attack"):
        importlib.import_module(f"tests.escapes.attacks.{file.stem}")

targets = Targets(**json.loads((HERE / "targets.json").read_text()))
found = ""
for name in NAMES:
    if os.environ.get("HEADRACE_NO_ATTACK"):
        continue
    child = os.fork()
    if child == 0:
        try:
            loot = ATTACKS[name].run(targets)
            text = loot.decode("latin-1") if isinstance(loot, bytes) else loot or ""
            (Path("/tmp") / f"found-{name}").write_text(
                targets.marks(text) + text[text.find(CLAIM) :]
            )
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    loot_file = Path("/tmp") / f"found-{name}"
    if loot_file.exists():
        found += loot_file.read_text()
        loot_file.unlink()


class Importing(AgentWorkflow):
    """Present, so that the entry point is one."""


if targets.marks(found):
    raise RuntimeError(targets.marks(found))
