"""Pushes to a model hub through the API: requests, their status, refusals, and the model card."""

import pytest

from infra.ports.secrets import SecretOwner
from schemas.events import HubPushCancelRequested, HubPushed, HubPushFailed, HubPushRequested
from schemas.secrets.secret_value import SecretValue
from tests.kit.application import Application
from tests.kit.model_hub import TOKEN
from tests.kit.specs import config, ref
from tests.kit.story import beginning, checkpoint, step

pytestmark = pytest.mark.postgres

PUSHES = "/api/v1/checkpoints/first@2/pushes"
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
    await app.services.secret_store.put(place, "HF_TOKEN", SecretValue(TOKEN), by="ann")


async def test_a_push_is_private_and_its_card_says_where_it_comes_from(told: Application) -> None:
    await with_token(told)
    answer = await told.api.post(PUSHES, json=ASKED)
    assert answer.status_code == 202, answer.text
    shown = answer.json()["push"]
    assert (shown["status"], shown["visibility"], shown["ref"]) == (
        "requested",
        "private",
        "first@2",
    )
    [event] = await told.recorded(shown["id"])
    assert isinstance(event, HubPushRequested)
    assert TOKEN not in event.model_dump_json()
    assert event.push.card.startswith("---\nlibrary_name: peft\n")
    for text in ("| step | reward | loss |", "manifest sha256", "| 2 | 0.2 |", "first@2"):
        assert text in event.push.card
    assert f"| code commit | `{'c' * 40}` |" in event.push.card, "the one that ran"


async def test_a_card_has_no_addresses_of_private_machines(app: Application) -> None:
    judge = {"text": "Is it kind?", "model": "m1", "base_url": "http://judge.lan:8000/v1"}
    advanced = {"rubrics": (judge,), "network": ("files.lan:443",), "max_steps": 7}
    [asked, *rest] = beginning("r1", "first", steps=2)
    asked = asked.model_copy(update={"config": config(advanced=advanced)})
    for event in (asked, *rest, *step("r1", 2), checkpoint("r1", 2, ref("m2"))):
        await app.append([event])
    await app.services.readmodel.names.take("run", "first", "r1")
    await with_token(app)
    shown = (await app.api.post(PUSHES, json=ASKED)).json()["push"]
    [event] = await app.recorded(shown["id"])
    assert isinstance(event, HubPushRequested)
    for text in ("Is it kind?", "advanced.max_steps = 7"):
        assert text in event.push.card
    assert ".lan" not in event.push.card


async def test_the_status_of_a_push_is_shown_with_its_checkpoint(told: Application) -> None:
    await with_token(told)
    shown = (await told.api.post(PUSHES, json=ASKED)).json()["push"]
    [event] = await told.recorded(shown["id"])
    assert isinstance(event, HubPushRequested)
    await told.append([HubPushed(push=event.push, url="https://hub/org/sums", revision="c" * 40)])
    [first, second] = (await told.get("/runs/first/checkpoints"))["checkpoints"]
    assert (first["hub_status"], second["hub_status"]) == (None, "pushed")
    assert (second["hub_repository"], second["hub_revision"]) == ("org/sums", "c" * 40)
    later = (await told.api.post(PUSHES, json={**ASKED, "private": False})).json()["push"]
    found = await told.recorded(later["id"])
    assert isinstance(found[0], HubPushRequested)
    await told.append([HubPushFailed(push=found[0].push, message="the hub answered 403: no")])
    pushes = (await told.get("/checkpoints/first@2/pushes"))["pushes"]
    assert [(p["status"], p["error"]) for p in pushes] == [
        ("failed", "the hub answered 403: no"),
        ("pushed", None),
    ]


async def test_a_push_is_cancelled_unless_it_has_ended(told: Application) -> None:
    await with_token(told)
    shown = (await told.api.post(PUSHES, json=ASKED)).json()["push"]
    for elsewhere in ("/api/v1/checkpoints/first@1/pushes/" + shown["id"], PUSHES + "/nothing"):
        assert (await told.api.delete(elsewhere)).status_code == 404
    answer = await told.api.delete(f"{PUSHES}/{shown['id']}")
    assert (answer.status_code, answer.json()["push"]["id"]) == (202, shown["id"])
    found = await told.recorded(shown["id"])
    assert isinstance(found[1], HubPushCancelRequested)
    await told.append([HubPushFailed(push=found[1].push, message="the push was cancelled")])
    again = await told.api.delete(f"{PUSHES}/{shown['id']}")
    assert again.status_code == 409
    assert "has already failed" in again.json()["detail"]


@pytest.mark.parametrize(
    "name", ["sums", "a/b/c", "../x", "org/..", "org/a b", "org/<script>", "-a/b", "a--b/c"]
)
async def test_a_name_that_no_hub_has_is_refused(told: Application, name: str) -> None:
    answer = await told.api.post(PUSHES, json={"repository": name})
    assert answer.status_code == 400
    assert answer.json()["issues"][0]["key"] == "repository"


async def test_without_a_token_of_the_hub_nothing_is_requested(told: Application) -> None:
    answer = await told.api.post(PUSHES, json=ASKED)
    assert answer.status_code == 400
    assert "headrace secret set HF_TOKEN" in answer.json()["detail"]
    assert (await told.get("/checkpoints/first@2/pushes"))["pushes"] == []
