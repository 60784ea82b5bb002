"""Deployments that an installation had before migration 0068, live and ended ones, are those of the
workspaces of their runs after it: they are found, asked and ended, and their use is that of their
owner."""

import json
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
import pytest_asyncio

from consumers.deploy.consumer import CONSUMER, DeploymentsState
from consumers.project.consumer import Projector
from infra.readmodel.store import ReadModel
from infra.spine.postgres.event_log import PostgresLog
from infra.spine.postgres.migrate import TABLE, apply, migrate, migrations
from infra.spine.postgres.notify import Notifier
from infra.spine.postgres.pool import Database, administering, connect
from producers.core.models.deployments import find_deployment
from schemas.deployments import ServedModel
from schemas.events import ModelUndeployed, ModelUndeployRequested
from schemas.ids import model_stream
from schemas.sampling import ModelRef, PolicyRef
from tests.kit.decider import given
from tests.kit.postgres import bare_database

pytestmark = pytest.mark.postgres

MIGRATION = "0068_deployment_names"
INSERT_EVENT = (
    "insert into events (id, stream, version, type, schema_version, run_id, data, correlation, actor)"
    " values (gen_random_uuid(), 'model-deployments', $1, $2, 1, 'd', $3::json, gen_random_uuid(), $4)"
)
INSERT_ROW = (
    "insert into deployments (deployment, workspace, status, number, served, pending, error,"
    " requested_by, created_at) values ($1, $2, $3, $4, $5, $6, $7, 'ada/k', now())"
)
INSERT_USE = "insert into inference_usage (api_key, model, requests) values ($1, $2, $3)"
INSERT_KEY = (
    "insert into api_keys (id, name, owner, prefix, sha256, scopes, workspace, organisation,"
    " created_by) values ($1, $1, 'ada', $1, $2, '{inference}', $3, $4, 'root')"
)


def served(name: str, workspace: str | None, step: int) -> ServedModel:
    return ServedModel(
        name=name,
        base_name="scratch:tiny",
        model=ModelRef(kind="scratch", name="tiny"),
        policy=PolicyRef(version=step),
        lora_alpha=32,
        run="r1",
        run_name="calm-otter",
        step=step,
        workspace=workspace,
    )


LIVE, FREE = served("live", "w1", 2), served("free", None, 4)
FORMER, REUSED = served("reused", "w1", 6), served("reused", "w2", 8)
NEXT, GONE = served("reused", "w2", 9), served("gone", "w1", 1)


def asked(request: str, model: ServedModel) -> tuple[str, dict[str, Any]]:
    data = {"deployment": model.name, "request": request, "served": model.model_dump(mode="json")}
    return "rl.model.deploy-requested", data


def deployed(request: str, model: ServedModel, number: int) -> tuple[str, dict[str, Any]]:
    return "rl.model.deployed", {**asked(request, model)[1], "number": number}


def named(kind: str, name: str, request: str, **more: str) -> tuple[str, dict[str, Any]]:
    return f"rl.model.{kind}", {"deployment": name, "request": request, **more}


HISTORY = (
    asked("q1", LIVE),
    deployed("q1", LIVE, 1),
    asked("q2", FREE),
    deployed("q2", FREE, 2),
    asked("q3", FORMER),
    deployed("q3", FORMER, 3),
    asked("q4", REUSED),
    named("deploy-failed", "reused", "q4", message="in use by another workspace"),
    named("undeploy-requested", "reused", "e1"),
    named("undeployed", "reused", "e1"),
    asked("q5", REUSED),
    deployed("q5", REUSED, 4),
    asked("q6", GONE),
    deployed("q6", GONE, 5),
    named("undeployed", "gone", "e2"),
    asked("q7", NEXT),
)
ROWS = (
    ("live", "w1", "active", 1, LIVE, "", ""),
    ("free", None, "active", 2, FREE, "", ""),
    ("reused", "w1", "active", 4, REUSED, NEXT.ref, ""),
    ("gone", "w1", "inactive", 5, GONE, "", ""),
)
"""As an earlier release projected that history: a row keeps the workspace that had its name first."""

STATE = (
    "select key, workspace, status, number, served::json ->> 'step' as step, pending, error, request"
    " from deployments order by key"
)


@pytest.fixture
def bare_url(postgres_url: str) -> Iterator[str]:
    with bare_database(postgres_url) as url:
        yield url


@pytest_asyncio.fixture
async def old(bare_url: str) -> AsyncIterator[Database]:
    """The installation after the migration."""
    async with administering(bare_url) as connection, connection.transaction():
        await connection.execute(TABLE)
        for migration in migrations():
            if migration.name < MIGRATION:
                await apply(connection, migration)
        for version, (kind, data) in enumerate(HISTORY, 1):
            actor = "ada/k" if kind == "rl.model.deploy-requested" else None
            await connection.execute(INSERT_EVENT, version, kind, json.dumps(data), actor)
        await connection.execute(
            "insert into streams (stream, version) values ('model-deployments', $1)", len(HISTORY)
        )
        for *row, model, pending, error in ROWS:
            await connection.execute(INSERT_ROW, *row, model.model_dump_json(), pending, error)
        await connection.execute("insert into workspace_homes values ('w2', 'south')")
        for key, place, organisation in (
            ("k1", "w1", None),
            ("k3", None, "south"),
            ("k4", None, None),
        ):
            await connection.execute(INSERT_KEY, key, key.encode(), place, organisation)
        for key, name, requests in (
            ("k1", "reused", 3),
            ("k3", "reused", 5),
            ("root", "reused", 7),
            ("k3", "live", 9),
            ("k4", "live", 11),
            ("root", "free", 13),
        ):
            await connection.execute(INSERT_USE, key, f"scratch:tiny:{name}", requests)
        await connection.execute(INSERT_USE, "root", "scratch:tiny", 17)
    assert MIGRATION in await migrate(bare_url)
    async with connect(bare_url, size=2) as database:
        yield database


async def test_each_deployment_is_that_of_the_workspace_of_its_run(old: Database) -> None:
    rows = [tuple(row) for row in await old.durable.fetch(STATE)]
    assert rows == [
        ("free", None, "active", 2, "4", "", "", ""),
        ("w1/gone", "w1", "inactive", 5, "1", "", "", ""),
        ("w1/live", "w1", "active", 1, "2", "", "", ""),
        ("w1/reused", "w1", "inactive", 3, "6", "", "", ""),
        ("w2/reused", "w2", "active", 4, "8", NEXT.ref, "", "q7"),
    ]


async def test_a_rebuilt_read_model_has_the_rows_of_the_migration(old: Database) -> None:
    before = [tuple(row) for row in await old.durable.fetch(STATE)]
    readmodel = ReadModel(old)
    await Projector(PostgresLog(old, Notifier(old)), readmodel).rebuild()
    assert [tuple(row) for row in await old.durable.fetch(STATE)] == before
    assert {one.requested_by for one in await readmodel.deployments.all_deployments()} == {"ada/k"}


async def test_use_belongs_to_who_used_it_and_not_to_the_name(old: Database) -> None:
    found = await old.durable.fetch("select api_key, model, requests from inference_usage")
    assert {(row["api_key"], row["model"]): row["requests"] for row in found} == {
        ("k1", "scratch:tiny:w1/reused"): 3,
        ("k3", "scratch:tiny:w2/reused"): 5,
        ("root", "scratch:tiny:w2/reused"): 7,
        ("k3", "scratch:tiny:live"): 9,
        ("k4", "scratch:tiny:w1/live"): 11,
        ("root", "scratch:tiny:free"): 13,
        ("root", "scratch:tiny"): 17,
    }
    deployments = ReadModel(old).deployments
    shown = {one.ref: one.usage.requests for one in await deployments.all_deployments()}
    assert (shown["w1/reused"], shown["w2/reused"], shown["-/free"]) == (3, 12, 13)


async def test_a_deployment_from_before_is_found_and_ended(old: Database) -> None:
    found = await find_deployment(ReadModel(old).deployments, "live")
    assert (found.ref, found.is_active) == ("w1/live", True)
    active = await ReadModel(old).deployments.active_with_workspaces()
    assert [one.served for one in active] == [LIVE, FREE, REUSED]
    log = PostgresLog(old, Notifier(old))
    recorded = (await log.load({model_stream(): 0}))[model_stream()]
    events = [one.event for one in recorded]
    state: DeploymentsState = given(CONSUMER, *events).state(model_stream())
    assert set(state.active) == {"free", "w1/live", "w2/reused"}
    end = ModelUndeployRequested(deployment="live", scope="w1", request="e9")
    [ended] = given(CONSUMER, *events).when(end).events
    assert ended == ModelUndeployed(deployment="live", scope="w1", request="e9")
