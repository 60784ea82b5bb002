"""Which rows of the cost ledger follow from events, and that each event counts once."""

from datetime import UTC, datetime, timedelta
from uuid import uuid4

import pytest

from consumers.project.consumer import Projector
from consumers.project.cost_rows import cost_rows
from infra.costs.ledger import COST_KEYS, CostLine, total_of
from infra.readmodel.rows import PutCost
from infra.readmodel.store import ReadModel
from infra.spine.postgres.event_log import PostgresLog
from infra.spine.postgres.notify import Notifier
from infra.spine.postgres.pool import Database
from schemas.costs.prices import Prices
from schemas.costs.work import Work
from schemas.events import (
    Event,
    GroupGenerated,
    GroupGraded,
    PolicyUpdated,
    SampleGenerated,
)
from schemas.sampling import JudgeUsage
from schemas.specs import SampleEntry
from tests.kit.specs import group_spec, ref, template
from tests.kit.story import whole_run
from tests.unit.consumers.project.test_project import everything, recorded

WORK = Work(effect="GradeGroup", device="cpu", device_s=2.0, wasted_s=0.5)


def put_of(event: Event) -> PutCost:
    [put] = cost_rows(recorded(event))
    assert isinstance(put, PutCost)
    return put


def graded(**given: object) -> GroupGraded:
    return GroupGraded.model_validate(
        {"spec": group_spec(template()), "artifact": ref("g"), "entries": (), "grades": (), **given}
    )


def test_an_event_says_its_seconds_its_waste_and_its_calls() -> None:
    put = put_of(graded(work=WORK, judged=JudgeUsage(calls=1, tokens=7, usd=0.5)))
    assert (put.effect, put.device, put.device_s, put.wasted_s) == ("GradeGroup", "cpu", 2.0, 0.5)
    assert (put.calls_usd, put.calls_tokens) == (0.5, 0)
    unpriced = put_of(graded(judged=JudgeUsage(calls=1, tokens=7)))
    assert (unpriced.calls_usd, unpriced.calls_tokens) == (0.0, 7)


def test_the_samples_of_a_group_count_once_with_their_own_event_or_with_the_group() -> None:
    entry = SampleEntry(index=0, completion_tokens=9)
    spec = group_spec(template())
    alone = GroupGenerated(spec=spec, entries=(entry,), parts=(ref("s"),), work=WORK)
    assert put_of(alone).sampled == 9
    single = SampleGenerated(spec=spec, entry=entry, artifact=ref("s"), work=WORK)
    assert (put_of(single).sampled, put_of(single).sample) == (9, f"{spec.group}.0")


def test_a_step_of_an_earlier_release_counts_its_tokens_without_seconds() -> None:
    updated, *_ = [e for e in whole_run("r1", "a-run", steps=1) if isinstance(e, PolicyUpdated)]
    trained = updated.model_copy(update={"metrics": {"train/tokens": 12.0}})
    put = put_of(trained)
    assert (put.trained, put.device, put.device_s) == (12, None, 0.0)


def test_money_is_missing_where_a_price_is_missing() -> None:
    line = CostLine("r1", spent={"cpu": 7200.0})
    assert line.as_json(Prices())["cost"] is None
    assert line.as_json(Prices(cpu_hour=0.5))["cost"] == 1.0
    assert line.as_json(Prices(), gain=0.5)["cost_per_reward_point"] is None
    assert line.as_json(Prices(cpu_hour=0.5), gain=0.5)["cost_per_reward_point"] == 0.02


def _with_work(event: Event) -> Event:
    return event.model_copy(update={"work": WORK}) if "work" in type(event).model_fields else event


@pytest.mark.postgres
async def test_a_rebuild_gives_equal_rows_and_the_sums_are_those_of_the_events(
    database: Database,
) -> None:
    events = [_with_work(event) for event in whole_run("r1", "a-run", steps=4)]
    async with Notifier(database) as notifier:
        log, tables = PostgresLog(database, notifier), ReadModel(database)
        for event in events:
            await log.append([event], cause=uuid4())
        projector = Projector(log, tables)
        while await projector.step():
            pass
        before = await everything(database)
        [line] = await tables.costs.lines("run")
        works = [event for event in events if getattr(event, "work", None)]
        assert len(before["costs"]) == len(works) > 8
        assert line.spent == {"cpu": pytest.approx(2.5 * len(works))}
        assert line.wasted == {"GradeGroup": pytest.approx(0.5 * len(works))}
        for key in COST_KEYS:
            assert total_of(await tables.costs.lines(key, runs=["r1"])).spent == line.spent
        assert not await tables.costs.lines("run", since=datetime.now(UTC) + timedelta(days=1))
        await projector.rebuild()
        assert await everything(database) == before
