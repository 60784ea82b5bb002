"""The page of a workspace: its triggers, and its deliveries with a filter."""

import httpx
import pytest

from tests.kit.application import Application
from tests.kit.showcase import FIRST, WORKSPACE

pytestmark = pytest.mark.postgres


@pytest.fixture
def showcase_steps() -> int:
    return 2


async def test_triggers_show_what_became_of_the_last_push(browser: httpx.AsyncClient) -> None:
    shown = (await browser.get("/workspaces/sums/deliveries.json")).json()
    first, second = sorted(shown["triggers"], key=lambda one: one["trigger"])
    assert (first["matched"], first["submitted"], first["run"]) == (1, 1, FIRST)
    assert (first["commit_state"], first["commit_text"]) == (
        "success",
        "held-out reward 0.2 -> 0.9",
    )
    assert (second["submitted"], second["outcome"]) == (0, "refused")
    assert second["detail"] == "no dataset tools"
    page = (await browser.get(f"/workspaces/{WORKSPACE}")).text
    assert f'<a href="/runs/{FIRST}">gsm8k-grpo-3e-6</a>' in page
    assert "configs/training/tools.toml refused: no dataset tools" in page
    assert "success: held-out reward 0.2 -&gt; 0.9" in page


async def test_deliveries_are_filtered_by_event_and_ref(
    app: Application, browser: httpx.AsyncClient
) -> None:
    async def kinds(query: str) -> list[str]:
        found = (await browser.get(f"/workspaces/sums/deliveries.json?{query}")).json()
        assert found["total"] == len(found["deliveries"])
        return [one["event"] for one in found["deliveries"]]

    assert sorted(await kinds("")) == ["ping", "push"]
    assert await kinds("event=ping") == ["ping"]
    assert await kinds("ref=heads/MAIN") == ["push"]
    assert await kinds("ref=heads_main") == []
    assert "No delivery matches" in (await browser.get("/workspaces/sums?event=found")).text
    assert (await browser.get("/workspaces/sums?event=other")).status_code == 400
    [one] = (await app.get(f"/workspaces/{WORKSPACE}/deliveries", event="ping"))["deliveries"]
    assert one["event"] == "ping"


async def test_the_list_of_workspaces_is_json_too(browser: httpx.AsyncClient) -> None:
    found = (await browser.get("/workspaces.json")).json()["workspaces"]
    assert [one["name"] for one in found] == ["sums"]
