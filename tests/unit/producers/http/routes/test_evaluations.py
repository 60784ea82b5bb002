"""The results of an evaluation by row and attempt, what a retry does to them, and comparisons."""

from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from schemas.config import EvalConfig, Evaluation
from schemas.events import (
    EvaluationCompleted,
    EvaluationRequested,
    EvaluationRetryRequested,
    EvaluationStarted,
    Event,
    GroupGraded,
)
from schemas.ids import eval_stream
from schemas.sampling import Grade, Message, SampleBatch, SampleFailure, SampleRecord
from schemas.specs import DatasetRef, GroupSpec, SampleEntry
from tests.kit.application import Application, rows
from tests.kit.specs import template

pytestmark = pytest.mark.postgres

CONFIG = EvalConfig.model_validate(
    {
        "experiment": {
            "rollout": "say",
            "entrypoint": "main.py",
            "model_path": "scratch:qwen3-tiny",
            "dataset": "numbers",
        },
        "evaluation": {"n": 2},
    }
)
TIMEOUT = SampleFailure.model_validate({"category": "timeout", "message": "too slow"})
LOST = SampleFailure.model_validate({"category": "internal_error", "message": "the engine is gone"})


async def dataset(app: Application, name: str = "numbers") -> DatasetRef:
    made = await app.upload(name, rows(4 if name == "numbers" else 5))
    assert made.status_code == 200
    found = await app.services.readmodel.registry.dataset(name)
    assert found is not None
    ref = await app.services.log.load({f"dataset-{found['id']}": 0})  # type: ignore[dict-item]  # a stream
    [recorded] = next(iter(ref.values()))
    return recorded.event.dataset  # type: ignore[attr-defined]  # DatasetRegistered


def beginning(name: str, data: DatasetRef, *, config: EvalConfig = CONFIG) -> Iterator[Event]:
    shape = template(num_samples=2, dataset=data)
    yield EvaluationRequested(
        evaluation=name, eval_name=name, template=shape, rows=(1, 3), config=config, workspace="w1"
    )
    yield EvaluationStarted(
        evaluation=name, template=shape, rows=(1, 3), batch_size=2, pass_threshold=1.0
    )


async def grade(
    app: Application,
    name: str,
    rewards: Sequence[float | None],
    *,
    slot: int,
    data: DatasetRef,
    number: int = 0,
    attempts: tuple[int, ...] = (),
    failure: SampleFailure = TIMEOUT,
) -> GroupGraded:
    """A graded group of an evaluation, with its samples in an artifact."""
    group = f"{name}-evaluate-0-{slot}-{number}"
    samples = tuple(
        SampleRecord(
            index=i,
            messages=(Message(role="assistant", content=f"{number}.{i}"),),
            text=f"{number}.{i}",
            failure=failure if reward is None else None,
        )
        for i, reward in enumerate(rewards)
    )
    batch = SampleBatch(group=group, samples=samples).model_dump_json().encode()
    artifact = await app.services.artifacts.put_artifact(batch, run=name, blob=True)
    shape = template(num_samples=len(rewards), dataset=data)
    return GroupGraded(
        spec=GroupSpec(group=group, row=(1, 3)[slot], template=shape, attempts=attempts),
        artifact=artifact,
        entries=tuple(SampleEntry(index=i) for i in range(len(rewards))),
        grades=tuple(
            Grade(index=i, reward=reward, failure=failure if reward is None else None)
            for i, reward in enumerate(rewards)
        ),
    )


async def evaluated(
    app: Application,
    name: str,
    data: DatasetRef,
    *groups: Sequence[Any],
    failure: SampleFailure = TIMEOUT,
    config: EvalConfig = CONFIG,
    ends: tuple[float, float] | None = None,
) -> None:
    """An evaluation that ended with these rewards by slot. Attempts without one have `failure`. Its
    figure 0.5 has an interval with these `ends`."""
    graded = [
        await grade(app, name, each, slot=slot, data=data, failure=failure)
        for slot, each in enumerate(groups)
    ]
    metrics = {"eval/pass@1": 0.5}
    if ends is not None:
        metrics |= {"eval/pass@1/low": ends[0], "eval/pass@1/high": ends[1]}
    done = EvaluationCompleted(evaluation=name, status="finished", metrics=metrics)
    await app.append([*beginning(name, data, config=config), *graded, done])


async def test_rows_and_attempts_are_listed_with_their_rewards(app: Application) -> None:
    data = await dataset(app)
    await evaluated(app, "one", data, (1.0, None), (0.0, 0.5))
    listed = await app.get("/evals/one/rows")
    assert listed["total_count"] == 2
    assert listed["rows"][0] == {
        "row": 1,
        "slot": 0,
        "attempts": 2,
        "passed": 1,
        "failed": 1,
        "left_out": 0,
        "reward": 0.5,
        "rewards": [1.0, None],
        "error": "timeout: too slow",
    }
    everything = await app.get("/evals/one/samples")
    assert [(s["row"], s["attempt"], s["reward"]) for s in everything["samples"]] == [
        (1, 0, 1.0),
        (1, 1, None),
        (3, 0, 0.0),
        (3, 1, 0.5),
    ]
    assert everything["samples"][0]["prompt"][0]["content"] == "Say 1"
    first = everything["samples"][0]["id"]
    detail = (await app.get(f"/evals/one/samples/{first}"))["sample"]
    assert (detail["text"], detail["reward"], detail["num_turns"]) == ("0.0", 1.0, 0)
    page = await app.get("/evals/one/samples", limit=2, offset=1)
    assert [s["text"] for s in page["samples"]] == ["0.1", "0.0"]
    assert (page["total_count"], page["has_more"]) == (4, True)
    of_row = await app.get("/evals/one/samples", row=3)
    assert [s["row"] for s in of_row["samples"]] == [3, 3]
    failed = await app.get("/evals/one/samples", failed="true")
    assert [(s["row"], s["attempt"]) for s in failed["samples"]] == [(1, 1)]
    assert failed["samples"][0]["failure"]["category"] == "timeout"
    assert (await app.get("/evals/one/samples", not_passed="true"))["total_count"] == 3


async def test_a_retry_is_requested_once_and_its_results_take_their_places(
    app: Application,
) -> None:
    data = await dataset(app)
    await evaluated(app, "one", data, (1.0, None), (0.0, 0.5), failure=LOST)
    answer = await app.post("/evals/one/retry", {})
    assert answer.status_code == 200, answer.text
    assert answer.json()["retryable_samples"] == 1
    found = answer.json()["eval"]
    assert (found["status"], found["completed_at"], found["error"]) == ("running", None, None)
    again = await app.post("/evals/one/retry", {})
    assert (again.status_code, again.json()["code"]) == (409, "CONFLICT")
    assert "is running" in again.json()["detail"]
    loaded = (await app.services.log.load({eval_stream("one"): 0}))[eval_stream("one")]
    requests = [r for r in loaded if isinstance(r.event, EvaluationRetryRequested)]
    assert len(requests) == 1
    repeated = await grade(app, "one", (1.0,), slot=0, data=data, number=1, attempts=(1,))
    done = EvaluationCompleted(evaluation="one", status="finished", metrics={"eval/pass@1": 1.0})
    await app.append([repeated, done])
    found = (await app.get("/evals/one"))["eval"]
    assert (found["status"], found["completed"], found["metrics"]) == (
        "finished",
        2,
        {"eval/pass@1": 1.0},
    )
    assert (await app.get("/evals/one/rows"))["rows"][0]["rewards"] == [1.0, 1.0]
    merged = (await app.get("/evals/one/samples", row=1))["samples"]
    assert [(s["attempt"], s["text"]) for s in merged] == [(0, "0.0"), (1, "1.0")]
    refused = await app.post("/evals/one/retry", {})
    assert refused.status_code == 409
    assert "nothing to repeat" in refused.json()["detail"]


async def test_an_evaluation_that_has_not_started_is_not_retried(app: Application) -> None:
    data = await dataset(app)
    await app.append([next(beginning("one", data))])
    refused = await app.post("/evals/one/retry", {})
    assert refused.status_code == 409
    assert "has not started" in refused.json()["detail"]


async def test_equal_rewards_are_no_difference_at_different_thresholds(app: Application) -> None:
    data = await dataset(app)
    lower = CONFIG.model_copy(update={"evaluation": Evaluation(n=2, pass_threshold=0.5)})
    await evaluated(app, "low", data, (0.5, 0.5), (0.5, 0.5), config=lower)
    await evaluated(app, "high", data, (0.5, 0.5), (0.5, 0.5))
    found = await app.get("/evals/low/compare/high")
    assert found["counts"]["same"] == 2
    assert [one["difference"] for one in found["differences"]] == [0.0, 0.0]
    assert found["rows"][0]["passed"] == [2, 2]
    assert found["caveats"] == [
        "an attempt passes at 0.5 in low and at 1 in high; the paired differences and the rows use 0.5 "
        "for both"
    ]
    assert (await app.get("/evals/high/compare/low"))["rows"][0]["passed"] == [0, 0]


async def test_a_comparison_says_which_rows_its_figures_are_of(app: Application) -> None:
    data = await dataset(app)
    await evaluated(app, "both", data, (1.0, 1.0), (0.0, 0.0))
    await evaluated(app, "one", data, (1.0, 1.0))
    found = await app.get("/evals/both/compare/one")
    assert found["caveats"] == [
        "the figures are of 2 rows in both and 1 in one, and 1 of these are the same; compare the "
        "paired differences"
    ]
    await evaluated(app, "lost", data, (None, None), failure=LOST)
    found = await app.get("/evals/one/compare/lost")
    assert found["differences"] == []
    assert found["caveats"][0].endswith("0 of these are the same; nothing can be compared")
    await app.append([*beginning("runs", data)])
    found = await app.get("/evals/runs/compare/one")
    assert found["caveats"][0] == "runs has not ended, so only its rows so far are compared"


async def test_two_evaluations_are_compared_by_row(app: Application) -> None:
    data = await dataset(app)
    await evaluated(app, "one", data, (1.0, None), (0.0, 0.5), failure=LOST)
    await evaluated(app, "two", data, (1.0, 0.0), (1.0, 0.5))
    found = await app.get("/evals/one/compare/two")
    assert found["counts"] == {"gained": 1, "lost": 1, "same": 0, "missing": 0}
    assert found["metrics"] == [{"key": "eval/pass@1", "values": [0.5, 0.5]}]
    reward, pass_rate = found["differences"]
    assert (reward["key"], reward["difference"], reward["rows"]) == ("eval/reward", 0.0, 2)
    assert reward["se"] == pytest.approx(0.5)
    assert reward["interval"] == pytest.approx([-6.3531, 6.3531], abs=1e-4)
    assert (pass_rate["key"], pass_rate["difference"]) == ("eval/pass_rate", 0.0)
    assert found["rows"][1] == {
        "row": 3,
        "change": "gained",
        "passed": [0, 1],
        "attempts": [2, 2],
        "reward": [0.25, 0.75],
    }
    assert found["caveats"] == []
    await evaluated(app, "three", data, (None, None), failure=LOST)
    found = await app.get("/evals/one/compare/three")
    assert found["counts"] == {"gained": 0, "lost": 0, "same": 0, "missing": 2}
    other = await dataset(app, "others")
    await evaluated(app, "four", other, (1.0, 1.0))
    refused = await app.api.get("/api/v1/evals/one/compare/four")
    assert refused.status_code == 409
    assert "numbers and others" in refused.json()["detail"]
