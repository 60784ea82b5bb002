"""Uploads to a model hub through the API: requests, their status, refusals, and the model card."""

import pytest

from infra.ports.secrets import SecretOwner
from schemas.events import (
    HubUploadCancelRequested,
    HubUploaded,
    HubUploadFailed,
    HubUploadRequested,
)
from schemas.secrets.secret_value import SecretValue
from tests.kit.application import Application
from tests.kit.model_hub import TOKEN
from tests.kit.specs import config, ref
from tests.kit.story import beginning, checkpoint, step

pytestmark = pytest.mark.postgres

UPLOADS = "/api/v1/checkpoints/first@2/uploads"
ASKED = {"repository": "org/sums"}


@pytest.fixture
async def told(app: Application) -> Application:
    """A run `first` with two checkpoints."""
    events = [*beginning("r1", "first", steps=2)]
    for number in (1, 2):
        events += [*step("r1", number), checkpoint("r1", number, ref(f"m{number}"))]
    for event in events:
        await app.append([event])
    await app.services.readmodel.names.take("run", "first", "r1")
    return app


async def with_token(app: Application) -> None:
    run = await app.services.lookup.run("first")
    assert run.owner_workspace is not None
    place = SecretOwner("workspace", run.owner_workspace)
    await app.services.secret_store.put_secret(place, "HF_TOKEN", SecretValue(TOKEN), by="ann")


async def test_an_upload_is_private_and_its_card_says_where_it_comes_from(
    told: Application,
) -> None:
    await with_token(told)
    answer = await told.api.post(UPLOADS, json=ASKED)
    assert answer.status_code == 202, answer.text
    shown = answer.json()["upload"]
    assert (shown["status"], shown["visibility"], shown["ref"]) == (
        "requested",
        "private",
        "first@2",
    )
    [event] = await told.recorded(shown["id"])
    assert isinstance(event, HubUploadRequested)
    assert TOKEN not in event.model_dump_json()
    assert event.upload.card.startswith("---\nlibrary_name: peft\n")
    for text in ("| step | reward | loss |", "manifest sha256", "| 2 | 0.2 |", "first@2"):
        assert text in event.upload.card
    assert f"| code commit | `{'c' * 40}` |" in event.upload.card, "the one that ran"


async def test_a_card_has_no_addresses_of_private_machines(app: Application) -> None:
    judge = {"text": "Is it kind?", "model": "m1", "base_url": "http://judge.lan:8000/v1"}
    advanced = {"rubrics": (judge,), "network": ("files.lan:443",), "max_steps": 7}
    [asked, *rest] = beginning("r1", "first", steps=2)
    asked = asked.model_copy(update={"config": config(advanced=advanced)})
    for event in (asked, *rest, *step("r1", 2), checkpoint("r1", 2, ref("m2"))):
        await app.append([event])
    await app.services.readmodel.names.take("run", "first", "r1")
    await with_token(app)
    shown = (await app.api.post(UPLOADS, json=ASKED)).json()["upload"]
    [event] = await app.recorded(shown["id"])
    assert isinstance(event, HubUploadRequested)
    for text in ("Is it kind?", "advanced.max_steps = 7"):
        assert text in event.upload.card
    assert ".lan" not in event.upload.card


async def test_the_status_of_an_upload_is_shown_with_its_checkpoint(told: Application) -> None:
    await with_token(told)
    shown = (await told.api.post(UPLOADS, json=ASKED)).json()["upload"]
    [event] = await told.recorded(shown["id"])
    assert isinstance(event, HubUploadRequested)
    await told.append(
        [HubUploaded(upload=event.upload, url="https://hub/org/sums", revision="c" * 40)]
    )
    [first, second] = (await told.get("/runs/first/checkpoints"))["checkpoints"]
    assert (first["hub_status"], second["hub_status"]) == (None, "uploaded")
    assert (second["hub_repository"], second["hub_revision"]) == ("org/sums", "c" * 40)
    later = (await told.api.post(UPLOADS, json={**ASKED, "private": False})).json()["upload"]
    found = await told.recorded(later["id"])
    assert isinstance(found[0], HubUploadRequested)
    await told.append([HubUploadFailed(upload=found[0].upload, message="the hub answered 403: no")])
    rows = (await told.get("/checkpoints/first@2/uploads"))["uploads"]
    assert [(p["status"], p["error"]) for p in rows] == [
        ("failed", "the hub answered 403: no"),
        ("uploaded", None),
    ]


async def test_the_old_path_answers_with_the_old_names(told: Application) -> None:
    await with_token(told)
    old = UPLOADS.replace("uploads", "pushes")
    shown = (await told.api.post(old, json=ASKED)).json()["push"]
    assert shown["status"] == "requested"
    assert (await told.api.delete(f"{old}/{shown['id']}")).json()["push"]["id"] == shown["id"]
    [event, _] = await told.recorded(shown["id"])
    assert isinstance(event, HubUploadRequested)
    await told.append([HubUploaded(upload=event.upload, url="https://hub", revision="c" * 40)])
    [row] = (await told.api.get(old)).json()["pushes"]
    assert row["status"] == "pushed"
    [row] = (await told.api.get(UPLOADS)).json()["uploads"]
    assert row["status"] == "uploaded"


async def test_an_upload_is_cancelled_unless_it_has_ended(told: Application) -> None:
    await with_token(told)
    shown = (await told.api.post(UPLOADS, json=ASKED)).json()["upload"]
    for elsewhere in ("/api/v1/checkpoints/first@1/uploads/" + shown["id"], UPLOADS + "/nothing"):
        assert (await told.api.delete(elsewhere)).status_code == 404
    answer = await told.api.delete(f"{UPLOADS}/{shown['id']}")
    assert (answer.status_code, answer.json()["upload"]["id"]) == (202, shown["id"])
    found = await told.recorded(shown["id"])
    assert isinstance(found[1], HubUploadCancelRequested)
    await told.append([HubUploadFailed(upload=found[1].upload, message="the upload was cancelled")])
    again = await told.api.delete(f"{UPLOADS}/{shown['id']}")
    assert again.status_code == 409
    assert "has already failed" in again.json()["detail"]


@pytest.mark.parametrize(
    "name", ["sums", "a/b/c", "../x", "org/..", "org/a b", "org/<script>", "-a/b", "a--b/c"]
)
async def test_a_name_that_no_hub_has_is_refused(told: Application, name: str) -> None:
    answer = await told.api.post(UPLOADS, json={"repository": name})
    assert answer.status_code == 400
    assert answer.json()["issues"][0]["key"] == "repository"


async def test_without_a_token_of_the_hub_nothing_is_requested(told: Application) -> None:
    answer = await told.api.post(UPLOADS, json=ASKED)
    assert answer.status_code == 400
    assert "headrace secret set HF_TOKEN" in answer.json()["detail"]
    assert (await told.get("/checkpoints/first@2/uploads"))["uploads"] == []
