"""kill -9 of the worker at every step of an upload to a model hub: each upload is one commit on the
hub, and no log holds the token."""

from pathlib import Path

from infra.failpoints import CONSUMERS, runtime_points
from tests.kit.kills import Stage, once
from tests.kit.model_hub import TOKEN, Hub, HubFault, model_hub
from tests.kit.platform import Platform, eventually, run_config

POINTS = once(*runtime_points("publish", CONSUMERS["publish"]), "hub.prepared", "hub.committed")
CONFIG = run_config(advanced={"max_steps": 2})


def upload(running: Platform, ref: str, repository: str) -> None:
    answer = running.post(f"/checkpoints/{ref}/uploads", {"repository": repository})
    assert answer.status_code == 202, answer.text
    upload_id = answer.json()["upload"]["id"]

    def is_there() -> bool | None:
        rows = running.get(f"/checkpoints/{ref}/uploads")["uploads"]
        [row] = [row for row in rows if row["id"] == upload_id]
        assert row["status"] != "failed", row["error"]
        return row["status"] == "uploaded" or None

    eventually(is_there, within_s=180, what=f"{ref} is on {repository}")


def act(stage: Stage) -> None:
    with model_hub() as hub:
        with stage.platform({"HF_ENDPOINT": hub.url}) as running:
            run = running.submit(CONFIG, workspace="w")
            running.wait(run, "finished")
            set_token(running)
            hub.faults.append(HubFault("PUT", "/storage/", 500, "try again"))
            for number in range(2):
                upload(running, f"{run}@last", f"org/sums-{number}")
        check(hub, stage.home)


def set_token(running: Platform) -> None:
    value = {"value": TOKEN, "scope": "personal"}
    answer = running.api.put("/secrets/HF_TOKEN", json=value)
    assert answer.is_success, answer.text


def check(hub: Hub, home: Path) -> None:
    """One commit for each upload, and the token in no file of the platform's logs."""
    assert hub.problems == []
    for number in range(2):
        assert len(hub.commits_of(f"org/sums-{number}")) == 1
    for log in (home / "logs").iterdir():
        assert TOKEN not in log.read_text(errors="replace"), log.name
