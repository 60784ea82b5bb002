"""Which keys reach personal secrets: every kind of key tries to list, set, delete and use those of the
person who created it. A key that is bound to a workspace reaches none."""

from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from infra.identity.api_key_format import api_key_id, digest
from infra.identity.sessions import Bearer, form_key
from infra.ports.actor import CONTAINED, SCOPES
from infra.ports.secrets import SecretOwner
from producers.http.browsers import COOKIE
from schemas.secrets.secret_value import SecretValue
from tests.kit.application import Application, application, rows
from tests.kit.people import member
from tests.kit.specs import ref
from tests.kit.story import beginning, checkpoint, step
from tests.kit.tenants import ask, create_api_key

pytestmark = pytest.mark.postgres

MINE = "MY_OWN_KEY"
VALUE = "hush-hush-1"
EXPERIMENT = {
    "rollout": "say",
    "entrypoint": "main.py",
    "model_path": "scratch:qwen3-tiny",
    "dataset": "numbers",
}
NEEDS = {"experiment": EXPERIMENT, "secrets": {"required": [MINE]}}
RUN = {**NEEDS, "training": {"rollout_batch_size": 2, "n_samples_per_prompt": 2}}
JUDGE = {"text": "Is it kind?", "model": "openai/m", "api_key_secret": MINE}
ASKED = {**EXPERIMENT, "model_path": "provider:openai/m"}
FORM = f"""
[experiment]
rollout = "say"
entrypoint = "main.py"
model_path = "scratch:qwen3-tiny"
dataset = "numbers"
[training]
rollout_batch_size = 2
n_samples_per_prompt = 2
[secrets]
required = ["{MINE}"]
"""


@dataclass(frozen=True)
class Use:
    """A request that would use a personal secret, and the scope that it needs."""

    path: str
    body: dict[str, Any]
    scope: str = "submit"


USES = [
    Use("/runs", {"config": RUN, "workspace": "w"}),
    Use("/runs", {"config": RUN, "workspace": "w", "dry_run": True}),
    Use("/runs", {"config": {**RUN, "secrets": {}, "advanced": {"rubrics": [JUDGE]}}}),
    Use("/evals", {"config": {**NEEDS, "evaluation": {"n": 2}}}),
    Use(
        "/evals",
        {
            "config": {
                "experiment": ASKED,
                "evaluation": {"n": 2},
                "advanced": {"api_key_secret": MINE},
            }
        },
    ),
    Use("/checkpoints/first@2/uploads", {"repository": "org/sums", "secret": MINE}, "control"),
]


@pytest.fixture
async def app(database_url: str, tmp_path: Path) -> AsyncIterator[Application]:
    """A workspace `w` with a checkpoint, and a personal secret of the administrator."""
    async with application(database_url, tmp_path / "home") as served:
        assert (await served.upload("numbers", rows(8))).status_code == 200
        made = await served.post("/workspaces", {"url": "/repo", "name": "w"})
        workspace = made.json()["workspace"]["id"]
        [asked, *rest] = beginning("r1", "first", steps=2)
        asked = asked.model_copy(update={"workspace": workspace})
        for event in (asked, *rest, *step("r1", 2), checkpoint("r1", 2, ref("m2"))):
            await served.append([event])
        await served.services.readmodel.names.take("run", "first", "r1")
        put = await served.api.put(
            f"/api/v1/secrets/{MINE}", json={"value": VALUE, "scope": "personal"}
        )
        assert put.status_code == 201
        yield served


async def bound_keys(app: Application) -> dict[str, str]:
    """A bound key of each scope from the administrator, and one of each that a bound key created."""
    keys: dict[str, str] = {
        scope: await create_api_key(app, scope, scope, workspace="w") for scope in SCOPES[:4]
    }
    keys["inference"] = await create_api_key(app, "inference", "inference", workspace="w")
    for scope in SCOPES[:4]:
        made = await ask(
            app,
            "POST",
            "/api/v1/api-keys",
            keys["admin"],
            json={"name": f"{scope}-2", "scopes": [scope]},
        )
        assert made.status_code == 201, made.text
        keys[f"{scope}-2"] = made.json()["secret"]
    return keys


async def is_kept(app: Application) -> bool:
    """Whether the administrator's secret is there, as it was."""
    [stored] = await app.services.secret_store.all_secrets([SecretOwner("personal", "admin")])
    return stored.updated_by == "admin/root" and stored.used_at is None


def may(scope: str, needed: str) -> bool:
    contained = {name: set(scopes) for name, scopes in CONTAINED.items()}
    return needed in next(s for name, s in contained.items() if name == scope.removesuffix("-2"))


async def test_no_key_of_a_workspace_reaches_a_personal_secret(app: Application) -> None:
    path = f"/api/v1/secrets/{MINE}"
    for scope, key in (await bound_keys(app)).items():
        listed = await ask(app, "GET", "/api/v1/secrets", key)
        assert MINE not in listed.text, scope
        personal = {"value": "hush-hush-2", "scope": "personal"}
        put = await ask(app, "PUT", path, key, json=personal)
        deleted = await ask(app, "DELETE", path, key, params={"scope": "personal"})
        assert (put.status_code, deleted.status_code) == (403, 403), (scope, put.text)
        if may(scope, "control"):
            assert "has no personal secrets" in put.text
        for use in USES:
            answer = await ask(app, "POST", f"/api/v1{use.path}", key, json=use.body)
            wanted = 400 if may(scope, use.scope) else 403
            assert answer.status_code == wanted, (scope, use, answer.text)
            assert wanted == 403 or "not set" in answer.text, (scope, use, answer.text)
        form = await send_form(app, key)
        assert form.status_code == (400 if may(scope, "submit") else 403), (scope, form.text)
    assert await is_kept(app)


async def test_the_twin_a_key_of_the_person_does(app: Application) -> None:
    key = await create_api_key(app, "own", "submit", "control")
    assert MINE in (await ask(app, "GET", "/api/v1/secrets", key)).text
    for use in USES:
        answer = await ask(app, "POST", f"/api/v1{use.path}", key, json=use.body)
        assert answer.is_success, (use, answer.text)
    assert (await send_form(app, key)).status_code == 303
    assert (await submitters(app)) == {"admin"}
    deleted = await ask(app, "DELETE", f"/api/v1/secrets/{MINE}", key, params={"scope": "personal"})
    assert deleted.is_success


async def test_a_workspaces_key_uses_the_workspaces_secret(app: Application) -> None:
    """Also when the creator of the key has a personal one with the same name, which would come first."""
    key = await create_api_key(app, "ci", "submit", "control", workspace="w", owner="admin")
    put = await ask(app, "PUT", f"/api/v1/secrets/{MINE}", key, json={"value": "hush-hush-3"})
    assert put.status_code == 201
    assert put.json()["secret"]["created_by"] == f"admin/{api_key_id(key)}"
    for use in USES:
        answer = await ask(app, "POST", f"/api/v1{use.path}", key, json=use.body)
        assert answer.is_success, (use, answer.text)
    assert (await send_form(app, key)).status_code == 303
    assert (await submitters(app)) == {None}
    runs = (await app.get("/runs"))["runs"]
    assert {run["creator"] for run in runs if run["name"] != "first"} == {"admin"}
    resolved = await app.services.secret_store.resolve(
        [MINE], workspace=(await app.services.workspaces.find_workspace("w")).id, submitter=None
    )
    assert resolved == {MINE: SecretValue("hush-hush-3")}


async def test_audit_entries_name_the_api_key(app: Application) -> None:
    key = await create_api_key(app, "ci", "read", workspace="w")
    await ask(app, "PUT", f"/api/v1/secrets/{MINE}", key, json={"value": VALUE})
    found = (await app.get("/audit", api_key="ci"))["audit"]
    assert [(one["api_key"], one["api_key_name"], one["status"]) for one in found] == [
        (api_key_id(key), "ci", 403)
    ]
    assert key not in str(found)


async def submitters(app: Application) -> set[str | None]:
    """The owners of the personal secrets that what was requested may use."""
    found = await app.database.durable.fetch(
        "select data ->> 'submitter' as submitter from events"
        " where type in ('rl.run.requested', 'rl.evaluation.requested') and stream != 'run-r1'"
        " union all select data -> 'upload' ->> 'submitter' from events"
        " where type = 'rl.hub-upload.requested'"
    )
    assert len(found) == len(USES), "a dry run requests nothing, and the form one more"
    return {row["submitter"] for row in found}


async def send_form(app: Application, key: str) -> httpx.Response:
    """Submit a run through the page for new runs, in a session that the key opened."""
    identity = api_key_id(key)
    assert identity is not None
    bearer = Bearer(identity, digest(key))
    cookie = await app.services.sessions.open(bearer)
    transport = httpx.ASGITransport(app.app, raise_app_exceptions=False)
    here = str(app.api.base_url)
    fields = {"form_key": form_key(bearer), "toml": FORM, "workspace": "w", "action": "submit"}
    async with httpx.AsyncClient(transport=transport, base_url=here) as browser:
        headers = {"Cookie": f"{COOKIE}={cookie}", "Origin": here}
        return await browser.post("/new", data={**fields, "once": key[-9:]}, headers=headers)


async def test_a_run_of_a_removed_person_goes_on_with_the_persons_secrets(app: Application) -> None:
    """And nobody else reaches them, a new person with the same address included."""
    await member(app, "owner", "owner")
    ada = await member(app, "ada", "member")
    secret = {"value": "hush-hush-2", "scope": "personal"}
    put = await ask(app, "PUT", f"/api/v1/secrets/{MINE}", ada.api_key, json=secret)
    assert put.status_code == 201, put.text
    body = {"config": RUN, "workspace": "w"}
    submitted = await ask(app, "POST", "/api/v1/runs", ada.api_key, json=body)
    assert submitted.status_code == 201, submitted.text
    run = submitted.json()["run"]["id"]
    before = await app.recorded(run)
    await app.services.members.remove_person(ada.id)
    assert (await ask(app, "GET", "/api/v1/runs", ada.api_key)).status_code == 401
    assert (await app.get(f"/runs/{run}"))["run"]["status"] == "pending"
    assert await app.recorded(run) == before
    values = await app.services.secret_store.resolve([MINE], workspace=None, submitter=ada.id)
    assert values[MINE].reveal() == "hush-hush-2", "the run still has it"
    again = await member(app, "ada", "member")
    listed = await ask(app, "GET", "/api/v1/secrets", again.api_key)
    assert listed.json()["secrets"] == []
