"""The metrics that an operator watches: the parts of a step's time, tokens per second, staleness,
waiting work, dead letters. The test knows every figure beforehand."""

from uuid import uuid4

import pytest

from schemas.events import StepSettled
from schemas.ids import WorkerId
from tests.kit.application import Application
from tests.kit.prometheus import samples
from tests.kit.story import beginning, step, whole_run

pytestmark = pytest.mark.postgres

TIMES = {"generate": 0.5, "grade": 0.25, "wait": 0.1, "learn": 0.125, "publish": 0.0625}


async def trained(app: Application, *, tokens: dict[int, float]) -> None:
    """A run `first` that is in progress, with these tokens at its steps, which took two seconds
    each; and a run that has finished."""
    await app.append(whole_run("r0", "over", steps=1))
    await app.append(beginning("r1", "first", steps=9))
    for number, count in tokens.items():
        for event in step("r1", number):
            if isinstance(event, StepSettled):
                parts = {f"time/{name}_s": value * number for name, value in TIMES.items()}
                figures = {"train/lag": number - 1.0, "rollout/tokens": count, **parts}
                event = event.model_copy(update={"metrics": figures})
            await app.append([event])
    await app.database.durable.execute(
        "update metric_points set at = '2026-01-01Z'::timestamptz + step * interval '2 seconds'"
    )


async def told(app: Application) -> dict[str, dict[tuple[str, ...], float]]:
    answer = await app.api.get("/metrics")
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    return samples(answer.text)


async def test_the_last_step_of_each_running_run_is_told_and_where_its_time_went(
    app: Application,
) -> None:
    await trained(app, tokens={1: 30.0, 2: 100.0, 3: 60.0})
    metrics = await told(app)
    times = {("first", f"time/{name}_s"): value * 3 for name, value in TIMES.items()}
    assert metrics["headrace_last_step"] == {**times, ("first", "train/lag"): 2.0}
    assert metrics["headrace_tokens_per_second"] == {("first",): 160.0 / 4}
    assert metrics["headrace_runs"] == {("finished",): 1.0, ("running",): 1.0}


async def test_a_rate_needs_two_steps(app: Application) -> None:
    await trained(app, tokens={1: 30.0})
    assert "headrace_tokens_per_second" not in await told(app)


async def test_waiting_effects_are_measured_with_the_oldest_age(app: Application) -> None:
    await app.services.effects.register(WorkerId("w"), host="h", pid=1, lease_s=60)
    calm = await told(app)
    assert calm["headrace_oldest_waiting_seconds"] == {(): 0.0}
    assert calm["headrace_dead_letters"] == {(): 0.0}
    assert "headrace_effects" not in calm
    for age_s, worker in ((100, None), (40, None), (1000, "w")):
        await app.database.durable.execute(
            "insert into effects (id, consumer, stream, lane, run_id, type, data, correlation,"
            " due_at, worker) values ($1, 'learn', 'policy-r1', 'train', 'r1', 'TrainStep', '{}',"
            " $1, clock_timestamp() - $2 * interval '1 second', $3)",
            uuid4(),
            float(age_s),
            worker,
        )
    metrics = await told(app)
    assert metrics["headrace_effects"] == {("train", "waiting"): 2.0, ("train", "claimed"): 1.0}
    assert 100 <= metrics["headrace_oldest_waiting_seconds"][()] < 200
    assert metrics["headrace_workers"] == {(): 1.0}
    assert metrics["headrace_stalled_effects"] == {(): 0.0}


async def test_work_without_progress_is_told_and_shown(app: Application) -> None:
    await app.services.effects.register(WorkerId("w"), host="h", pid=1, lease_s=60)
    await app.database.durable.execute(
        "insert into effects (id, consumer, stream, lane, run_id, type, data, correlation, worker,"
        " progressed_at) values ($1, 'learn', 'policy-r1', 'train', 'r1', 'TrainStep', '{}', $1,"
        " 'w', clock_timestamp() - interval '4 hours')",
        uuid4(),
    )
    assert (await told(app))["headrace_stalled_effects"] == {("train",): 1.0}
    [wait, *_] = (await app.get("/status"))["waiting_for"]
    assert wait["what"] == "stalled"
    assert "TrainStep shows no progress: w claimed it 4 h ago" in wait["message"]
