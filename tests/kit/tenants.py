"""Two workspaces with a run, an evaluation and a dataset each, and API keys for them."""

from dataclasses import dataclass
from typing import Any

import httpx

from schemas.events import EvaluationRequested
from tests.kit.application import Application, rows
from tests.kit.history import ended_run
from tests.kit.specs import template


@dataclass(frozen=True)
class Tenant:
    """A workspace and what belongs to it. `api_key` has all rights in it."""

    workspace: str
    name: str
    run: str
    run_name: str
    evaluation: str
    dataset: str
    verification: str
    regrade: str
    api_key: str
    organisation: str = "main"

    def fill(self, text: str) -> str:
        """A path with the ids of this workspace's things, and the name of its run."""
        return text.format(
            workspace=self.workspace,
            run=self.run,
            run_name=self.run_name,
            evaluation=self.evaluation,
            dataset=self.dataset,
            verification=self.verification,
            regrade=self.regrade,
            organisation=self.organisation,
        )


async def create_api_key(app: Application, name: str, *scopes: str, **fields: Any) -> str:
    """The text of a new API key."""
    made = await app.post("/api-keys", {"name": name, "scopes": list(scopes), **fields})
    assert made.status_code == 201, made.text
    return str(made.json()["secret"])


async def ask(
    app: Application, method: str, path: str, api_key: str, **content: Any
) -> httpx.Response:
    """The response to a request with an API key."""
    headers = {**content.pop("headers", {}), "Authorization": f"Bearer {api_key}"}
    return await app.api.request(method, path, headers=headers, **content)


async def tenant(
    app: Application, name: str, url: str, *, organisation: str | None = None
) -> Tenant:
    """A workspace with a finished run, its validation (`{run}v`), its verification and a regrade, an
    evaluation that a user asked for, and a dataset. With an `organisation` (its name) the ids of the run
    and of the evaluation begin with it, and its API key is of the whole organisation."""
    home = {} if organisation is None else {"organisation": organisation}
    made = await app.post("/workspaces", {"url": url, "name": name, **home})
    assert made.status_code == 201, made.text
    workspace = made.json()["workspace"]["id"]
    prefix = name if organisation is None else f"{organisation}-{name}"
    run = f"{prefix}-r"
    await ended_run(app, run, f"{name}-run", workspace=workspace)
    place = {"workspace": name} if organisation is None else home
    api_key = await create_api_key(app, f"{name}-admin", "admin", **place)
    announced = await ask(
        app,
        "POST",
        "/api/v1/datasets",
        api_key,
        json={"name": f"{name}-data", "file_name": "r.jsonl"},
    )
    assert announced.status_code == 201, announced.text
    sent = await ask(app, "PUT", announced.json()["upload"]["path"], api_key, content=rows(4))
    assert sent.status_code == 200, sent.text
    evaluation = EvaluationRequested(
        evaluation=f"{prefix}-e",
        eval_name=f"{name}-eval",
        template=template(),
        rows=(0,),
        workspace=workspace,
    )
    names = app.services.readmodel.names
    await names.take("evaluation", f"{name}-eval", evaluation.evaluation, scope=workspace)
    await app.append([evaluation])
    verification = (await app.post(f"/runs/{run}/verify", {})).json()["verification"]["id"]
    halved = {"weights": {"grader": 0.5}}
    regrade = (await app.post(f"/runs/{run}/regrades", halved)).json()["regrade"]["id"]
    return Tenant(
        workspace=workspace,
        name=name,
        run=run,
        run_name=f"{name}-run",
        evaluation=evaluation.evaluation,
        dataset=announced.json()["dataset"]["id"],
        verification=verification,
        regrade=regrade,
        api_key=api_key,
        organisation=organisation or "main",
    )
