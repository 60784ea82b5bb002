"""Submitting an evaluation of a provider's model: its key must be set and its address allowed, and no
key is recorded."""

from typing import Any

import pytest

from infra.identity.secrets.sealed import Sealer
from infra.identity.secrets.store import PostgresSecrets
from infra.ports.secrets import SecretOwner
from schemas.events import EvaluationRequested
from schemas.ids import eval_stream
from schemas.secrets.secret_value import SecretValue
from tests.kit.application import Application, rows

pytestmark = pytest.mark.postgres

KEY = "sk-a-very-secret-value-4711"


def config(model: str, **advanced: Any) -> dict[str, Any]:
    experiment = {
        "rollout": "say",
        "entrypoint": "main.py",
        "model_path": model,
        "dataset": "numbers",
    }
    return {"experiment": experiment, "evaluation": {"n": 2}, "advanced": advanced}


@pytest.fixture
async def workspace(app: Application) -> str:
    assert (await app.upload("numbers", rows(8))).status_code == 200
    made = await app.post("/workspaces", {"url": "/repo", "name": "w"})
    return str(made.json()["workspace"]["id"])


async def issues(app: Application, body: dict[str, Any]) -> list[tuple[str, str]]:
    answer = await app.post("/evals", {"config": body})
    assert answer.status_code == 400, answer.text
    return [(issue["key"], issue["message"]) for issue in answer.json()["issues"]]


async def test_the_key_of_a_provider_is_refused_for_another_server(
    app: Application, workspace: str
) -> None:
    elsewhere = {"base_url": "https://evil.example/v1", "api_key_secret": "OPENAI_API_KEY"}
    found = await issues(app, config("provider:m", **elsewhere))
    assert [key for key, _ in found] == ["advanced.api_key_secret"]
    assert "OPENAI_API_KEY is a key for api.openai.com" in found[0][1]
    judge = {"text": "Is it kind?", "model": "m", **elsewhere}
    body = config("scratch:qwen3-tiny", rubrics=[judge])
    found = await issues(app, body)
    keys = [key for key, message in found if "is a key for api.openai.com" in message]
    assert keys == ["advanced.rubrics[0].api_key_secret"]


async def test_the_key_must_be_set_and_is_not_recorded(app: Application, workspace: str) -> None:
    body = config("provider:openai/gpt-5-mini", max_calls=50)
    [(key, message)] = await issues(app, body)
    assert key == "advanced.api_key_secret"
    assert "headrace secret set OPENAI_API_KEY" in message
    secrets = PostgresSecrets(app.database, Sealer.of(app.services.settings))
    owner = SecretOwner("workspace", workspace)
    await secrets.put_secret(owner, "OPENAI_API_KEY", SecretValue(KEY), by="test")
    made = await app.post("/evals", {"config": body})
    assert made.status_code == 201, made.text
    identity = made.json()["eval"]["id"]
    assert made.json()["eval"]["model"] == "provider:openai/gpt-5-mini"
    event = (await app.services.log.load({eval_stream(identity): 0}))[eval_stream(identity)][
        0
    ].event
    assert isinstance(event, EvaluationRequested)
    provider = event.template.model.provider
    assert provider is not None
    assert (provider.model, provider.secret) == ("gpt-5-mini", "OPENAI_API_KEY")
    assert (provider.workspace, provider.owner, provider.max_calls) == (workspace, identity, 50)
    assert KEY not in event.model_dump_json()


@pytest.mark.usefixtures("workspace")
async def test_names_and_addresses_are_checked(app: Application) -> None:
    [(key, _)] = await issues(app, config("provider:nobody/m"))
    assert key == "experiment.model_path"
    own = config("provider:small", base_url="http://10.0.0.5:8000/v1")
    [(key, message)] = await issues(app, own)
    assert key == "advanced.base_url"
    assert "HEADRACE_NETWORK_ALLOW=w=10.0.0.5:8000" in message
    train = config("provider:openai/m")
    del train["evaluation"]
    answer = await app.post("/runs", {"config": train})
    assert [issue["key"] for issue in answer.json()["issues"]].count("experiment.model_path") == 1
