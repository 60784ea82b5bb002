"""The list of runs as JSON and as CSV."""

import csv
import io
from datetime import UTC, datetime
from typing import cast

import httpx
import pytest

from infra.readmodel.runs import RunJson
from producers.dashboard.pages.runs import COLUMNS, _cell, finite_run
from schemas.events import RunPaused
from tests.kit.application import Application
from tests.kit.pushes import origin
from tests.kit.story import beginning
from tests.kit.tenants import Tenant, tenant


@pytest.fixture
async def owner(app: Application) -> Tenant:
    return await tenant(app, "first", "/repo")


@pytest.mark.postgres
async def test_json_and_csv_have_the_runs_of_the_page(
    owner: Tenant, browser: httpx.AsyncClient
) -> None:
    for filters, shown in (({}, True), ({"dataset": "no such name"}, False)):
        listed = (await browser.get("/runs.json", params=filters)).json()
        names = [run["name"] for run in listed["runs"]]
        assert (owner.fill("{run_name}") in names) == shown
        assert listed["total_count"] == len(names)
        answer = await browser.get("/runs.csv", params=filters)
        assert answer.headers["content-type"].startswith("text/csv")
        lines = csv.DictReader(io.StringIO(answer.text))
        assert tuple(lines.fieldnames or ()) == COLUMNS
        assert [line["name"] for line in lines] == names


@pytest.mark.postgres
async def test_a_wrong_filter_is_refused(browser: httpx.AsyncClient) -> None:
    for address in ("/runs.json?sort=size", "/runs.csv?status=lost"):
        assert (await browser.get(address)).status_code == 400


@pytest.mark.parametrize("text", ["=1+1", "+1", "-1", "@SUM(A1)", "\t=1", "\r=1"])
def test_a_text_does_not_become_a_formula(text: str) -> None:
    assert _cell(text) == f"'{text}"


def test_other_values_stay_as_they_are() -> None:
    assert [_cell(value) for value in ("a-b", -1.5, None)] == ["a-b", -1.5, None]
    assert _cell(datetime(2026, 1, 2, tzinfo=UTC)) == "2026-01-02T00:00:00+00:00"


@pytest.mark.parametrize("reward", [float("nan"), float("inf"), None])
def test_a_reward_that_is_no_number_is_null(reward: float | None) -> None:
    run = cast(RunJson, {**dict.fromkeys(COLUMNS), "name": "mine", "reward": reward})
    assert (finite_run(run)["name"], finite_run(run)["reward"]) == ("mine", None)


@pytest.mark.postgres
async def test_runs_name_who_or_what_started_them(
    app: Application, browser: httpx.AsyncClient
) -> None:
    for run, fields in (
        ("by-ada", {"submitter": "ada"}),
        ("by-push", {"submitter": "bob", "origin": origin()}),
        ("by-nobody", {}),
    ):
        requested = next(iter(beginning(run, run, steps=1)))
        await app.append([requested.model_copy(update=fields)])
    listed = (await browser.get("/runs.json")).json()["runs"]
    assert {run["name"]: run["creator"] for run in listed} == {
        "by-ada": "ada",
        "by-push": "push to main",
        "by-nobody": None,
    }
    for creator, names in (("ada", ["by-ada"]), ("push to main", ["by-push"]), ("eve", [])):
        found = (await browser.get("/runs.json", params={"creator": creator})).json()
        assert [run["name"] for run in found["runs"]] == names


@pytest.mark.postgres
async def test_paused_runs_are_found_by_the_status_that_pages_show(
    app: Application, browser: httpx.AsyncClient
) -> None:
    for run in ("going", "resting"):
        for event in beginning(run, run, steps=2):
            await app.append([event])
    await app.append([RunPaused(run="resting", step=0, reason="by ada")])
    for status, names in (("paused", {"resting"}), ("running", {"going", "resting"})):
        found = (await browser.get("/runs.json", params={"status": status})).json()
        assert {run["name"] for run in found["runs"]} == names
        assert found["total_count"] == len(names)
    assert "<option selected>paused</option>" in (await browser.get("/?status=paused")).text
