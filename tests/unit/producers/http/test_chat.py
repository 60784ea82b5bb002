"""A chat with a checkpoint goes through the internal endpoint of a device worker."""

from functools import partial
from typing import Any

import pytest

from infra.model_api.gateway.server import HttpGateway
from infra.readmodel import worker_chats
from schemas.errors import FailureCategory, UserCodeError
from schemas.events import Event
from schemas.ids import WorkerId
from schemas.sampling import SampleRequest, Turn
from tests.kit.application import Application
from tests.kit.fakes import FakeSampler, turn
from tests.kit.specs import ref
from tests.kit.story import beginning, checkpoint

pytestmark = pytest.mark.postgres

ASK = {"messages": [{"role": "user", "content": "Say 3"}], "temperature": 0.5, "max_tokens": 7}


def saved() -> list[Event]:
    [requested] = list(beginning("r1", "first", steps=1))[:1]
    dated = requested.model_copy(update={"date": "2026-11-22"})
    return [dated, checkpoint("r1", 1, ref("manifest"))]


def answer(request: SampleRequest) -> Turn:
    if request.messages[0].content == "too long":
        raise UserCodeError(FailureCategory.PROMPT_TOO_LONG, "the prompt has 99 tokens")
    return turn("three")


async def test_a_worker_answers_with_the_checkpoint(app: Application) -> None:
    await app.append(saved())
    nobody = await app.post("/checkpoints/r1@1/chat", ASK)
    assert nobody.status_code == 503
    assert "no device worker" in nobody.json()["detail"]
    sampler = FakeSampler(answer)
    worker, chats = WorkerId("w"), app.services.readmodel.chats
    gateway = HttpGateway(sampler, redeem=partial(chats.redeem, worker=worker))
    await gateway.start()
    await app.services.effects.register(worker, host="h", pid=1, lease_s=60)
    await chats.announce(worker, gateway.internal_url)
    answered = await app.post("/checkpoints/r1@last/chat", ASK)
    assert answered.status_code == 200, answered.text
    assert answered.json()["message"] == {"role": "assistant", "content": "three"}
    assert answered.json()["usage"]["completion_tokens"] == 5
    [asked] = sampler.requests
    assert (asked.model.kind, asked.model.name) == ("checkpoint", "r1@1")
    assert "adapter_model.safetensors" in asked.model.files
    assert (asked.params.temperature, asked.params.max_new_tokens) == (0.5, 7)
    assert asked.params.date == "2026-11-22", "the run's day, whatever day it is here"
    long = await app.post(
        "/checkpoints/r1@last/chat", {"messages": [{"role": "user", "content": "too long"}]}
    )
    assert long.status_code == 400
    assert "99 tokens" in long.json()["detail"]
    await gateway.aclose()
    away = await app.post("/checkpoints/r1@last/chat", ASK)
    assert away.status_code == 503


async def test_a_grant_is_for_one_chat_with_one_worker(
    app: Application, monkeypatch: pytest.MonkeyPatch
) -> None:
    chats = app.services.readmodel.chats
    ours, other = WorkerId("w"), WorkerId("v")
    key = await chats.grant(ours)
    assert not await chats.redeem(key, worker=other)
    assert not await chats.redeem(key + "x", worker=ours)
    assert await chats.redeem(key, worker=ours)
    assert not await chats.redeem(key, worker=ours), "it is used up"
    stored = await app.services.database.durable.fetch("select * from worker_doors, chat_grants")
    assert stored == []
    monkeypatch.setattr(worker_chats, "GRANT_S", -1.0)
    assert not await chats.redeem(await chats.grant(ours), worker=ours), "it has expired"


async def test_the_database_holds_no_key(app: Application) -> None:
    chats = app.services.readmodel.chats
    worker = WorkerId("w")
    await chats.announce(worker, "http://127.0.0.1:1/internal/sample")
    key = await chats.grant(worker)
    pool = app.services.database.durable
    rows = [
        *await pool.fetch("select d::text as row from worker_doors d"),
        *await pool.fetch("select encode(sha256, 'escape') || g::text as row from chat_grants g"),
    ]
    assert len(rows) == 2
    assert not [row["row"] for row in rows if key in row["row"] or key[4:] in row["row"]]


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({}, "messages"),
        ({"messages": []}, "empty"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "role"),
        ({**ASK, "temperature": 3}, "temperature"),
        ({**ASK, "max_tokens": 0}, "max_tokens"),
        ({**ASK, "maxtokens": 1}, "maxtokens"),
    ],
)
async def test_a_bad_chat_is_refused(app: Application, body: dict[str, Any], says: str) -> None:
    await app.append(saved())
    refused = await app.post("/checkpoints/r1@1/chat", body)
    assert refused.status_code == 400
    assert says in refused.text
