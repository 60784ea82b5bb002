"""A run whose samples have a row for each turn shares what these begin with, and verifies. The pass runs
in C here, where there is a compiler; `tests/crash/scenarios/prefixes.py` has the one through torch."""

from pathlib import Path

import pytest

from tests.kit.forgetful_turns import FILES, TURNS, forgetful_run, tokens_of
from tests.kit.platform import make_workspace, platform, verify

pytestmark = [
    pytest.mark.kills,
    pytest.mark.processes,
    pytest.mark.torch,
    pytest.mark.postgres,
    pytest.mark.slow,
]


def test_turns_that_forget_share_what_they_begin_with(tmp_path: Path) -> None:
    workspace = make_workspace(tmp_path / "workspace", FILES)
    with platform(tmp_path / "home") as started:
        made = started.post("/workspaces", {"url": str(workspace), "name": "w"})
        assert made.status_code == 201, made.text
        started.upload("numbers")
        config = forgetful_run(max_steps=2, deterministic=False, algorithm="gspo", kl_coef=0.1)
        run = started.submit(config, workspace="w")
        info = started.wait(run, "finished")
        of_rows, computed = tokens_of(started, run)
        assert of_rows > 3 * computed, f"{TURNS} rows of a sample begin alike"
        assert max(point["value"] for point in info["metrics"]["train/sampler_mismatch"]) < 1e-5
        assert any(point["value"] for point in info["metrics"]["train/grad_norm"])
        verified = verify(started, run)
        assert (verified["status"], verified["findings"]) == ("verified", [])
