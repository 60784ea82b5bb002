"""The page of a run: where its time goes, its provenance, and the same as JSON."""

import html
import json
import math
import re

import httpx
import pytest

from producers.core.history.metric_titles import VALIDATION
from producers.core.history.provenance import provenance_of
from producers.dashboard import formats
from producers.dashboard.formats import number
from producers.dashboard.pages.run import LOG_LINES, SHOWN_CHECKPOINTS
from producers.dashboard.pages.runs import REWARD
from schemas.events import EvaluationSettled, RunStarted
from schemas.ids import GroupKey, Purpose
from schemas.models.reward_model import RewardModelSpec
from schemas.models.teacher import TeacherRef
from schemas.sampling import ModelRef
from tests.kit.application import Application
from tests.kit.showcase import FIRST, PAUSED, PENDING, SECOND, SECONDS
from tests.kit.showcase_answers import NUM_SAMPLES
from tests.kit.specs import ref
from tests.kit.story import beginning

pytestmark = pytest.mark.postgres
FIGURES = [
    *("Duration", "Reward", "Improvement", "Samples", "Training Reward", "Validation Reward"),
    *("Model Entropy", "Response Length", "Total Length", "Truncation Ratio", "KL Divergence"),
    *("Gradient Norm", "Lag (versions)"),
]


@pytest.fixture
def showcase_steps() -> int:
    return 3


async def test_the_time_of_a_step_is_split(browser: httpx.AsyncClient) -> None:
    shown = (await browser.get(f"/runs/{FIRST}/run.json")).json()
    assert shown["time_split_s"] == pytest.approx(SECONDS)
    page = (await browser.get(f"/runs/{FIRST}")).text
    assert "2.4 s" in page
    assert f'value="{2.4 / sum(SECONDS.values()):.3f}" aria-label="generate"' in page
    assert (await browser.get(f"/runs/{PENDING}/run.json")).json()["time_split_s"] == {}


async def test_the_provenance_is_what_the_events_recorded(browser: httpx.AsyncClient) -> None:
    shown = (await browser.get(f"/runs/{FIRST}/run.json")).json()["provenance"]
    assert shown["learner: torch"] == "2"
    assert " rows, " in shown["dataset"]
    assert "learner: torch" in (await browser.get(f"/runs/{FIRST}")).text
    pending = await browser.get(f"/runs/{PENDING}")
    assert 'id="provenance"' not in pending.text


async def test_the_provenance_names_the_teacher_and_the_reward_models(app: Application) -> None:
    teacher = TeacherRef(name="big@3", model=ModelRef(kind="scratch", name="qwen3-tiny"))
    judge = RewardModelSpec(
        name="nice", checkpoint="judge@2", base=teacher.model, weights=ref("w"), lora_alpha=1.0
    )
    for event in beginning("r1", "taught", steps=1):
        if isinstance(event, RunStarted):
            spec = event.spec.model_copy(update={"teacher": teacher})
            assert event.template is not None
            assert event.template.rollout is not None
            rollout = event.template.rollout.model_copy(update={"reward_models": (judge,)})
            template = event.template.model_copy(update={"rollout": rollout})
            event = event.model_copy(update={"spec": spec, "template": template})
        await app.append([event])
    past, log = app.services.readmodel.state_at_event, app.services.log
    found = await provenance_of(past, log, "r1")
    assert found["teacher"] == "big@3"
    assert found["reward model: nice"] == "judge@2"


async def test_the_log_is_json_with_a_severity(browser: httpx.AsyncClient) -> None:
    lines = (await browser.get(f"/runs/{FIRST}/log.json?limit=2")).json()
    assert len(lines["lines"]) == 2
    assert lines["older"] is True
    warned = (await browser.get(f"/runs/{FIRST}/log.json?level=warning")).json()["lines"]
    assert {one["level"].lower() for one in warned} == {"warning"}
    for wrong in ("level=loud", "limit=0", "limit=x"):
        assert (await browser.get(f"/runs/{FIRST}/log.json?{wrong}")).status_code == 400


async def test_the_overview_counts_samples_and_says_how_far_the_run_has_come(
    browser: httpx.AsyncClient,
) -> None:
    shown = (await browser.get(f"/runs/{FIRST}/run.json")).json()
    figures = shown["figures"]
    assert list(figures) == FIGURES
    assert figures["Samples"] == 3 * 2 * NUM_SAMPLES
    assert figures["Lag (versions)"] == 1
    points = (await browser.get(f"/runs/{FIRST}/curves.json")).json()["curves"][REWARD]
    assert figures["Improvement"] == pytest.approx(points[-1][1] - points[0][1])
    page = (await browser.get(f"/runs/{FIRST}?first=3")).text  # a range changes no figure
    assert re.findall(r"<dt>([^<]*)</dt><dd>", page)[: len(FIGURES)] == FIGURES
    assert f"<dt>Samples</dt><dd>{6 * NUM_SAMPLES}</dd>" in page


async def test_a_run_with_one_step_or_none_has_no_improvement(
    app: Application, browser: httpx.AsyncClient
) -> None:
    sql = "delete from metric_points where run = $1 and step > 1"
    await app.database.durable.execute(sql, FIRST)
    for run in (FIRST, PENDING):
        figures = (await browser.get(f"/runs/{run}/run.json")).json()["figures"]
        assert figures["Improvement"] is None
        assert (await browser.get(f"/runs/{run}")).status_code == 200


async def test_values_that_are_no_numbers_are_shown(
    app: Application, browser: httpx.AsyncClient
) -> None:
    sql = "update metric_points set value = $3 where run = $1 and key = any ($2) and step = 3"
    for key, value in ((REWARD, math.nan), ("train/kl", math.inf), ("time/learn_s", -math.inf)):
        await app.database.durable.execute(sql, FIRST, [key], value)
    answer = await browser.get(f"/runs/{FIRST}/run.json")
    assert answer.status_code == 200, answer.text
    figures = answer.json()["figures"]
    assert (figures["Training Reward"], figures["KL Divergence"]) == (None, None)
    page = (await browser.get(f"/runs/{FIRST}")).text
    assert "<dt>Training Reward</dt><dd>nan</dd>" in page
    assert (await browser.get("/")).status_code == 200
    curves = (await browser.get(f"/runs/{FIRST}/curves.json?keys=train/kl")).json()["curves"]
    assert curves["train/kl"][-1] == [3, None]
    answer = await app.api.get(f"/api/v1/runs/{FIRST}")
    assert answer.status_code == 200, answer.text
    metrics = answer.json()["metrics"]
    assert [point["step"] for point in metrics["train/kl"]] == [1, 2]
    assert (await app.api.get("/api/v1/cost")).status_code == 200


async def test_a_range_is_a_form_and_a_part_of_the_address(browser: httpx.AsyncClient) -> None:
    """Without JavaScript too: the server draws the curves."""
    whole = (await browser.get(f"/runs/{FIRST}")).text
    assert "<option selected>all</option>" in whole
    assert re.search(r'<input name="first"[^>]* form="view">', whole)
    part = (await browser.get(f"/runs/{FIRST}?range=custom&first=2&last=3&level=info")).text
    assert "<option selected>custom</option>" in part
    assert re.search(r'<input name="last"[^>]* value="3"', part)
    assert "<option selected>info</option>" in part  # one form, so neither choice drops the other
    points = (await browser.get(f"/runs/{FIRST}/curves.json")).json()["curves"][REWARD]
    least = min(value for step, value in points if step > 1)
    assert f'aria-label="Training Reward from {number(least)} to' in part
    for wrong in ("range=1y", "first=x", "first=3&last=2"):
        assert (await browser.get(f"/runs/{FIRST}?{wrong}")).status_code == 400


async def test_the_last_hour_of_a_run_that_has_ended_is_that_before_its_end(
    app: Application, browser: httpx.AsyncClient
) -> None:
    for table, column in (("runs", "completed_at"), ("metric_points", "at")):
        sql = f"update {table} set {column} = {column} - interval '3 days' where run = $1"
        await app.database.durable.execute(sql, FIRST)
    found = (await browser.get(f"/runs/{FIRST}/curves.json?range=1h")).json()
    assert len(found["curves"][REWARD]) == 3
    assert found["has_ended"] is True


async def test_a_range_without_points_keeps_the_places_of_its_curves(
    browser: httpx.AsyncClient,
) -> None:
    page = (await browser.get(f"/runs/{FIRST}?first=1000")).text
    assert f'data-line="{REWARD}"' in page
    assert "Fewer than two points here" in page


async def test_only_a_run_that_goes_on_says_how_long_it_still_takes(
    browser: httpx.AsyncClient,
) -> None:
    for run, has_time_left in ((SECOND, True), (PAUSED, False), (FIRST, False), (PENDING, False)):
        assert (" left</span>" in (await browser.get(f"/runs/{run}")).text) == has_time_left
        left = (await browser.get(f"/runs/{run}/run.json")).json()["eta_s"]
        assert (left is not None) == has_time_left


async def test_checkpoints_say_where_they_are_served_and_who_uploaded_them(
    app: Application, browser: httpx.AsyncClient
) -> None:
    """Of many there are the newest, the best, and those that are deployed."""
    copy = """insert into checkpoints select run, n, $2, uri, manifest_sha256, adapter_sha256, created_at
    from checkpoints, generate_series(100, 400) n where run = $1 and step = 3"""
    await app.database.durable.execute(copy, FIRST, math.nan)
    await app.database.durable.execute(
        "update deployments set served = replace(served, '\"step\":40', '\"step\":120')"
    )
    await app.database.durable.execute(
        """insert into hub_uploads (upload, run, step, repository, form, visibility, status,
        requested_by, created_at) values ('p', $1, 400, 'org/<b>', 'adapter', 'private', 'uploaded',
        '<i>ada', now())""",
        FIRST,
    )
    shown = (await browser.get(f"/runs/{FIRST}/run.json")).json()
    steps = [one["step"] for one in shown["checkpoints"]]
    assert steps == [*range(400, 400 - SHOWN_CHECKPOINTS, -1), 120, 3]
    assert (shown["best_step"], shown["num_checkpoints"]) == (3, 302)
    assert shown["deployments"] == {"120": [{"name": "sums", "ref": "-/sums", "status": "active"}]}
    assert shown["checkpoints"][0]["hub_requested_by"] == "<i>ada"
    page = (await browser.get(f"/runs/{FIRST}")).text
    assert '<a href="/deployments/-/sums">sums</a> <span class="dim">active</span>' in page
    assert "uploaded by <bdi>&lt;i&gt;ada</bdi>" in page
    assert "42 of 302 checkpoints" in page


async def test_a_log_of_long_lines_keeps_the_page_small(
    app: Application, browser: httpx.AsyncClient
) -> None:
    await app.database.durable.execute(
        """insert into log_lines select $1, 1, n, 0, now(), 'error', 1, repeat('no reward ', 200)
        from generate_series(1, 400) n""",
        FIRST,
    )
    page = await browser.get(f"/runs/{FIRST}?level=error")
    assert page.text.count('<p class="error">') == LOG_LINES
    assert "(1900 more characters)" in page.text
    assert len(page.content) < 75_000  # its files have as much


async def test_the_time_left_is_that_of_the_newest_steps_without_a_pause(
    app: Application, browser: httpx.AsyncClient
) -> None:
    """Steps took 100 s at first, then 2 s each, and before step 45 the run was paused for a day."""
    db = app.database.durable
    await db.execute("delete from metric_points where run = $1", SECOND)
    await db.execute(
        """insert into metric_points select $1, $2, n, 0.5, '2026-01-01Z'::timestamptz
        + interval '1 s' * (case when n <= 20 then n * 100 else 2000 + (n - 20) * 2 end)
        + case when n >= 45 then interval '1 day' else interval '0' end
        from generate_series(1, 50) n""",
        SECOND,
        REWARD,
    )
    await db.execute("update runs set current_step = 50, total_steps = 150 where run = $1", SECOND)
    left = (await browser.get(f"/runs/{SECOND}/run.json")).json()["eta_s"]
    assert left == pytest.approx(100 * (2 * 19 + 20) / 20)
    text = formats.duration(left)
    assert f"step 50 of 150, about {text} left" in (await browser.get(f"/runs/{SECOND}")).text
    assert f"{text} left" in (await browser.get("/")).text
    await db.execute("delete from metric_points where run = $1", SECOND)
    await db.execute("update runs set parent = $1, parent_step = 50 where run = $2", FIRST, SECOND)
    left = (await browser.get(f"/runs/{SECOND}/run.json")).json()["eta_s"]
    assert left is None, "a fork has not taken a step yet"


async def test_metrics_without_a_curve_are_listed(
    app: Application, browser: httpx.AsyncClient
) -> None:
    row = "insert into metric_points values ($1, 'reward/<b>x', 3, 0.25, now())"
    await app.database.durable.execute(row, FIRST)
    page = (await browser.get(f"/runs/{FIRST}")).text
    assert '<th scope="row">reward/&lt;b&gt;x</th><td class="figure">0.25</td>' in page
    address = re.search(r'href="([^"]*key=reward[^"]*)"', page)
    assert address is not None
    assert (await browser.get(html.unescape(address[1]))).text == "step,value\n3,0.25\n"
    assert '<th scope="row">train/loss</th>' in page
    assert '<th scope="row">train/kl</th>' not in page  # it has a curve


async def validate(app: Application, step: int, *ends: float) -> None:
    """A validation with the mean reward 0.5, and an interval with these ends."""
    names = ("eval/reward", "eval/reward/low", "eval/reward/high")
    metrics = dict(zip(names, (0.5, *ends), strict=False))
    settled = EvaluationSettled(run=FIRST, step=step, reward=0.5, metrics=metrics)
    await app.append([settled])


async def test_the_held_out_reward_is_drawn_with_its_interval(
    app: Application, browser: httpx.AsyncClient
) -> None:
    assert 'class="whiskers' not in (await browser.get(f"/runs/{FIRST}")).text
    await validate(app, 0, 0.25, 0.75)
    await validate(app, 1)  # all rows have the same reward
    await validate(app, 2, -1.0, 2.0)
    page = (await browser.get(f"/runs/{FIRST}")).text
    assert '<path class="whiskers line-1" d="M0.0,87.5L0.0,62.5M400.0,150.0L400.0,0.0"/>' in page
    legend = f'<small class="dim" data-interval="{VALIDATION}">bars: 95 % interval</small>'
    assert legend in page
    assert "Validation Reward, with 95 % intervals, from -1 to 2" in page
    keys = f"keys={VALIDATION},{VALIDATION}/low,{VALIDATION}/high"
    curves = (await browser.get(f"/runs/{FIRST}/curves.json?{keys}")).json()["curves"]
    assert curves[VALIDATION] == [[0, 0.5], [1, 0.5], [2, 0.5]]
    assert curves[f"{VALIDATION}/low"] == [[0, 0.25], [2, -1.0]]
    assert curves[f"{VALIDATION}/high"] == [[0, 0.75], [2, 2.0]]


async def test_the_newest_held_out_reward_has_its_own_interval_or_none(
    app: Application, browser: httpx.AsyncClient
) -> None:
    ends = '0.5 <small class="dim" title="95 % interval">0.25 to 0.75</small>'
    await validate(app, 0, 0.25, 0.75)
    page = (await browser.get(f"/runs/{FIRST}")).text
    assert f"<dt>Validation Reward</dt><dd>{ends}</dd>" in page
    assert f'<th scope="row">eval/reward</th><td class="figure">{ends}</td>' in page
    shown = (await browser.get(f"/runs/{FIRST}/run.json")).json()["intervals"]
    assert shown == {"Validation Reward": [0.25, 0.75]}
    await validate(app, 2)
    assert "<dt>Validation Reward</dt><dd>0.5</dd>" in (await browser.get(f"/runs/{FIRST}")).text
    assert (await browser.get(f"/runs/{FIRST}/run.json")).json()["intervals"] == {}


async def test_four_numbers_and_the_reward_come_first_and_the_rest_is_folded(
    app: Application, browser: httpx.AsyncClient
) -> None:
    page = (await browser.get(f"/runs/{FIRST}")).text
    first, _, folded = page.partition("<summary>More numbers</summary>")
    assert re.findall(r"<div><dt>([^<]*)</dt>", first) == FIGURES[:4]
    assert "<dt>KL Divergence</dt>" in folded
    (large,) = re.findall(r'<figure data-keys="([^"]*)" class="large">', page)
    assert large.split(",")[0] == REWARD
    shown, _, more = page.partition("<summary>More curves</summary>")
    assert 'data-line="train/kl"' in more.split("</section>")[0]
    assert 'data-line="train/kl"' not in shown
    empty = (await browser.get(f"/runs/{PENDING}")).text
    assert "<div hidden><dt>Reward</dt>" in empty
    assert "<div><dt>" not in empty.partition('id="figures"')[2].partition("</section>")[0]
    assert not re.search(r'<figure data-keys="[^"]*"( class="large")?>', empty), "no empty card"


async def test_the_current_work_of_a_run_is_not_a_warning(
    app: Application, browser: httpx.AsyncClient
) -> None:
    await app.database.durable.execute(
        "insert into workers (id, host, pid, lanes, expires_at) values "
        "('w1', 'here', 77, '{generate}', clock_timestamp() + interval '1 hour')"
    )
    group = GroupKey(SECOND, Purpose.TRAIN, 2, 1)
    sql = """insert into effects (id, consumer, stream, lane, run_id, type, data, correlation, worker,
      attempts) values (gen_random_uuid(), 'rollout', 's', 'generate', $1, 'GenerateSample', $2,
      gen_random_uuid(), $3, $4)"""
    data = json.dumps({"spec": {"group": str(group)}})
    for worker in ("w1", None):
        await app.database.durable.execute(sql, SECOND, data, worker, 0)
    page = (await browser.get(f"/runs/{SECOND}")).text
    assert "sampling step 2: 8 of 128" in page, page.partition('id="progress"')[2][:400]
    assert "pid 77" not in page
    assert "Waiting:" not in page
    await app.database.durable.execute("update effects set attempts = 1 where worker = 'w1'")
    late = (await browser.get(f"/runs/{SECOND}")).text
    assert "pid 77 on here" in late


async def test_a_run_that_samples_nothing_shows_its_losses(
    browser: httpx.AsyncClient, app: Application
) -> None:
    rewards = f'data-keys="{REWARD},{VALIDATION}" class="large"'
    losses = 'data-keys="train/loss,eval/validation/loss" class="large"'
    sampled = (await browser.get(f"/runs/{FIRST}")).text
    assert rewards in sampled
    assert "<dt>Samples</dt>" in sampled
    await app.database.durable.execute("update runs set algorithm = 'dpo' where run = $1", FIRST)
    page = (await browser.get(f"/runs/{FIRST}")).text
    assert losses in page
    assert rewards not in page
    assert "No step has ended yet" not in page
    assert "<dt>Samples</dt>" not in page
    assert "<dt>Validation Loss</dt>" in page
