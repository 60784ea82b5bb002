"""A run whose code shows its secrets in every way that it can: none of them is anywhere afterwards."""

import base64
import json
import secrets
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.leaks.needles import Needles
from tests.e2e.leaks.places import Looked, places, stored_places, waiting_effects
from tests.e2e.leaks.ways import MAIN, OFF, ROWS, WAYS
from tests.kit.otlp import collector
from tests.kit.platform import ROOT, Platform, eventually, make_workspace, platform, run_config

pytestmark = [
    pytest.mark.processes,
    pytest.mark.torch,
    pytest.mark.postgres,
    pytest.mark.attacks,
]

FEWEST = 40
UNSEEN = {
    "printed",
    "printed_to_stderr",
    "warned",
    "logged",
    "in_a_thread",
    "in_a_task",
    "grader_printed",
    "raised_from",
    "died_with_output",
    "grader_died",
    "stop_string",
    "bad_path",
    "bad_key",
    "raised_with_note",
}
"""Ways whose text reaches no sample, so that no mask shows that they were tried."""

CORES = (secrets.token_hex(12), secrets.token_hex(24))
KEY = f"sk-{CORES[0]}/+\"&'<é %"
PEM = f"-----BEGIN TEST KEY-----\n{CORES[1]}\nMIIBOgIBAAJBAK\n-----END TEST KEY-----\n"
NEEDLES = Needles.of(*CORES)


def store_secrets(started: Platform, root: Path) -> None:
    """One by the API for the workspace, one by the command line for its owner."""
    made = started.api.put("/secrets/KEY", json={"value": KEY, "workspace": "w"})
    assert made.status_code == 201, made.text
    assert NEEDLES.find(made.content) is None
    done = subprocess.run(
        [sys.executable, "-m", "producers.cli.main", "secret", "set", "PEM", "--scope", "personal"],
        env=started.environment,
        input=PEM.encode(),
        capture_output=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert NEEDLES.find(done.stdout + done.stderr) is None


@contextmanager
def looked_at(root: Path, **environment: str) -> Iterator[Looked]:
    """A platform after the run, with an evaluation of the same code."""
    workspace = make_workspace(root / "workspace", {"rollouts/leaky/main.py": MAIN})
    with tempfile.TemporaryDirectory() as temporary, collector() as held:
        Path(temporary).chmod(0o755)  # the user of user code enters it
        settings = {
            "OTEL_EXPORTER_OTLP_ENDPOINT": held.endpoint,
            "OTEL_BSP_SCHEDULE_DELAY": "200",
            "TMPDIR": temporary,
            **environment,
        }
        with platform(root / "home", environment=settings) as started:
            assert started.post("/workspaces", {"url": str(workspace), "name": "w"}).is_success
            started.upload("rows", ROWS)
            store_secrets(started, root)
            run = started.submit(_config(), workspace="w")
            effects = watch_effects(started, run)
            evaluation = _evaluate(started)
            yield Looked(started, root, Path(temporary), run, evaluation, held, effects)


def watch_effects(started: Platform, run: str) -> frozenset[str]:
    """Wait until the run is finished. Returns every effect that was seen meanwhile."""
    seen: frozenset[str] = frozenset()

    def look() -> bool | None:
        nonlocal seen
        seen |= waiting_effects(started.home)
        status = started.info(run)["run"]["status"]
        assert status not in ("failed", "crashed"), started.info(run)["run"]["error"]
        return True if status == "finished" else None

    eventually(look, within_s=240, what="the run is finished")
    return seen


def _config() -> dict[str, Any]:
    return run_config(
        experiment={"rollout": "leaky", "dataset": "rows"},
        training={
            "rollout_batch_size": len(WAYS),
            "n_samples_per_prompt": 1,
            "max_prompt_length": 900,
            "max_response_length": 4,
            "max_answer_length": 2,
        },
        checkpoints={"checkpoint_save_freq": 1},
        advanced={"algorithm": "ppo", "max_steps": 1, "deterministic": False},
        secrets={"required": ["KEY", "PEM"]},
    )


def _evaluate(started: Platform) -> str:
    config = {
        "experiment": _config()["experiment"],
        "evaluation": {"limit": 3},
        "advanced": {"max_response_length": 4, "max_answer_length": 2},
        "secrets": {"required": ["KEY", "PEM"]},
    }
    made = started.post("/evals", {"config": config, "workspace": "w"})
    assert made.status_code == 201, made.text
    name = str(made.json()["eval"]["id"])
    eventually(
        lambda: started.get(f"/evals/{name}")["eval"]["status"] in ("finished", "failed") or None,
        within_s=60,
        what="the evaluation ends",
    )
    return name


def leaks(places: Mapping[str, Callable[[], bytes | Path]]) -> dict[str, str]:
    """Place -> what was found there."""
    found = {}
    for name, look in places.items():
        seen = look()
        leak = NEEDLES.find_in_files(seen) if isinstance(seen, Path) else NEEDLES.find(seen)
        if leak is not None:
            found[name] = leak
    return found


def samples_by_way(looked: Looked) -> dict[str, str]:
    """Way -> the samples that tried it, as JSON."""
    samples = looked.platform.get(f"/runs/{looked.run}/samples", step=1, limit=200)["samples"]
    found = dict.fromkeys(WAYS, "")
    for sample in samples:
        found[WAYS[sample["row"]]] += json.dumps(sample)
    return found


def test_no_secret_leaks_in_any_way_to_any_place(tmp_path: Path) -> None:
    assert len(WAYS) >= FEWEST
    with looked_at(tmp_path) as looked:
        tried = samples_by_way(looked)
        assert {name for name, text in tried.items() if not text} == set()
        unmasked = {name for name, text in tried.items() if "***KEY***" not in text} - UNSEEN
        assert {name for name in unmasked if "***PEM***" not in tried[name]} == set()
        assert any("GenerateSample" in effect for effect in looked.effects)
        found = places(looked)
        assert len(found) >= FEWEST
        assert leaks(found) == {}


def test_the_twin_without_masks_leaks(tmp_path: Path) -> None:
    (tmp_path / "off").mkdir()
    (tmp_path / "off" / "sitecustomize.py").write_text(OFF)
    with looked_at(tmp_path, PYTHONPATH=f"{tmp_path / 'off'}:{ROOT}") as looked:
        tried = samples_by_way(looked)
        shown = {name for name, text in tried.items() if NEEDLES.find(text.encode())}
        assert set(WAYS) - shown <= UNSEEN
        found = leaks(stored_places(looked))
    assert {
        "table public.events",
        "table public.artifacts",
        "table public.graded_groups",
        "GET /runs/{ref}/samples",
        "GET /runs/{ref}/events",
    } <= set(found)


def test_twin_the_needles_are_found_in_every_form() -> None:
    for text in (KEY, PEM, KEY.encode().hex(), KEY[3 : 3 + 12]):
        assert NEEDLES.find(f"x{text}y".encode())
    for offset in range(3):
        assert NEEDLES.find(base64.b64encode(b"u" * offset + KEY.encode() + b"v"))
    assert NEEDLES.find(b"nothing here") is None
