"""The forms that begin with a checkpoint: a run that starts from it, and an evaluation of it."""

import httpx
import pytest

from tests.kit.application import Application
from tests.kit.showcase import STEPS
from tests.kit.signed_in import form_key_in, signed_in
from tests.kit.specs import ref
from tests.kit.story import checkpoint

pytestmark = pytest.mark.postgres

BEST = "gsm8k-grpo-3e-6@best"


@pytest.fixture
def showcase_steps() -> int:
    return STEPS


async def test_a_fork_has_the_config_of_the_run_and_starts_from_the_checkpoint(
    browser: httpx.AsyncClient,
) -> None:
    page = (await browser.get(f"/new?from={BEST}")).text
    assert "model_path = &#34;gsm8k-grpo-3e-6@40&#34;" in page
    assert "n_samples_per_prompt" in page


async def test_an_evaluation_is_filled_in_and_a_mistake_keeps_the_text(
    browser: httpx.AsyncClient,
) -> None:
    page = await browser.get(f"/new-evaluation?checkpoint={BEST}")
    assert "model_path = &#34;gsm8k-grpo-3e-6@40&#34;" in page.text
    fields = {"form_key": form_key_in(page.text), "once": "1", "name": "mine"}
    for toml, status, said in (
        ("[experiment", 400, "not valid TOML"),
        ("[experiment]\nmodel_pth = 'x'\n", 400, "model_pth"),
    ):
        refused = await browser.post("/new-evaluation", data={**fields, "toml": toml})
        assert (refused.status_code, said in refused.text) == (status, True)
        assert 'value="mine"' in refused.text
        assert toml.split("\n")[0].replace("'", "&#39;") in refused.text


async def test_a_checkpoint_that_does_not_exist_is_a_page_that_says_so(
    browser: httpx.AsyncClient,
) -> None:
    for address in ("/new?from=gsm8k-grpo-3e-6@7", "/new-evaluation?checkpoint=no-such-run@1"):
        page = await browser.get(address)
        assert page.status_code == 404
        assert "</html>" in page.text


async def test_a_run_shows_what_its_checkpoints_are_used_for(browser: httpx.AsyncClient) -> None:
    page = (await browser.get("/runs/gsm8k-grpo-3e-6")).text
    assert '<a href="/deployments/-/sums">sums</a>' in page
    assert '<a href="/new?from=gsm8k-grpo-3e-6%4040">Start a run</a>' in page
    assert "<code>training.lr</code>" in page


async def test_a_reward_model_is_offered_to_other_runs_alone(app: Application) -> None:
    pair = '{"prompt": "a", "chosen": "b", "rejected": "c"}'
    assert (await app.upload("pairs", f"{pair}\n" * 4)).status_code == 200
    config = {
        "experiment": {"model_path": "scratch:qwen3-tiny", "dataset": "pairs"},
        "advanced": {"algorithm": "reward_model", "batch_size": 4},
    }
    made = await app.post("/runs", {"config": config, "name": "judge"})
    await app.append([checkpoint(made.json()["run"]["id"], 3, ref("manifest"))])
    async with signed_in(app) as client:
        page = (await client.get("/runs/judge")).text
    assert "<code>judge@3</code>" in page
    assert "<code>[[advanced.reward_models]]</code>" in page
    assert not [word for word in ("Deploy", "Evaluate", "Start a run") if f">{word}</a>" in page]
