"""A finished run, read through the API: info, samples, logs, trace, checkpoints, events."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from infra.blobs.artifacts import reference
from schemas.datasets import DatasetRow
from schemas.events import (
    BatchAssembled,
    Event,
    GroupGraded,
    GroupsRequested,
    GroupsSettled,
    RunFinished,
    RunPaused,
    RunRequested,
    RunStarted,
    SettledGroup,
)
from schemas.ids import REFUTED, GroupKey, Purpose, WorkerId, sample_id
from schemas.sampling import Message
from schemas.specs import BatchGroup
from tests.kit.application import Application
from tests.kit.showcase import FIRST, fill
from tests.kit.specs import DATASET
from tests.kit.story import batch_of, beginning, checkpoint, step, whole_run
from tests.kit.tenants import ask, create_api_key

pytestmark = pytest.mark.postgres

STEPS = 3
BERT = '{"model_type": "bert", "architectures": ["BertForMaskedLM"]}'


@pytest.fixture
async def told(app: Application) -> Application:
    """An application with a finished run `first` (id r1) of three steps, whose artifacts are
    stored."""
    artifacts = app.services.artifacts
    rows = [
        DatasetRow(prompt=(Message(role="user", content=f"Say {n}"),), label=str(n))
        for n in range(8)
    ]
    content = await artifacts.put_artifact(
        b"".join(row.to_line() for row in rows), run="d", blob=True
    )
    manifest = await artifacts.put_artifact(b'{"step": 3}', run="r1", blob=True)
    for event in whole_run("r1", "first", steps=STEPS):
        if event.type == "rl.run.requested":
            dataset = DATASET.model_copy(update={"content": content})
            event = event.model_copy(update={"dataset": dataset})
        if event.type == "rl.checkpoint.saved":
            event = checkpoint("r1", STEPS, manifest)
        await app.append([event])
    for number in range(1, STEPS + 1):
        for slot in range(2):
            await stored(app, str(GroupKey("r1", Purpose.TRAIN, number, slot)))
    await app.services.readmodel.names.take("run", "first", "r1")
    return app


async def stored(app: Application, group: str) -> None:
    """Store the group's artifact, whose reference says that it is a row."""
    for data in (batch_of(group), b"a note"):
        await put_row(app, data)


async def put_row(app: Application, data: bytes) -> None:
    """Store bytes as a row of the database."""
    await app.database.durable.execute(
        "insert into artifacts (sha256, data) values ($1, $2) on conflict do nothing",
        reference(data).sha256,
        data,
    )


async def test_info_has_the_shape_that_others_rely_on(told: Application) -> None:
    info = await told.get("/runs/first")
    run = info["run"]
    assert {
        "id",
        "name",
        "status",
        "phase",
        "algorithm",
        "execution_mode",
        "model",
        "dataset",
        "rollout",
        "commit_sha",
        "current_step",
        "total_steps",
        "reward",
        "created_at",
        "started_at",
        "completed_at",
        "error",
        "config",
    } <= set(run)
    assert (run["status"], run["phase"], run["current_step"]) == ("finished", "complete", 3)
    assert run["reward"] == pytest.approx(0.3)
    [saved] = info["checkpoints"]
    assert (saved["step"], saved["ref"], saved["reward"]) == (3, "first@3", 0.3)
    points = info["metrics"]["rollout/raw_reward"]
    assert [(p["step"], p["value"]) for p in points] == [(1, 0.1), (2, 0.2), (3, 0.3)]
    assert (await told.get("/runs/r1/metrics"))["metrics"] == info["metrics"]
    assert (await told.get("/runs/first/checkpoints"))["checkpoints"] == info["checkpoints"]


async def test_lists_are_paged_filtered_and_searched(told: Application) -> None:
    for number in range(2, 5):
        await told.append(list(beginning(f"r{number}", f"other_{number}", steps=2))[:1])
    first = await told.get("/runs", limit=3)
    assert [run["id"] for run in first["runs"]] == ["r4", "r3", "r2"]
    assert (first["total_count"], first["has_more"], first["next_offset"]) == (4, True, 3)
    last = await told.get("/runs", limit=3, offset=3)
    assert (last["has_more"], last["next_offset"]) == (False, None)
    assert (await told.get("/runs", status="finished"))["total_count"] == 1
    assert (await told.get("/runs", search="OTHER_3"))["runs"][0]["id"] == "r3"
    assert (await told.get("/runs", search="other%"))["total_count"] == 0


async def test_samples_show_what_was_asked_answered_and_earned(told: Application) -> None:
    page = await told.get("/runs/first/samples", step=2, limit=3)
    assert page["total_count"] == 4
    assert page["has_more"] is True
    answered, failed, third = page["samples"]
    assert answered["id"] == "r1-train-2-0-0.0"
    assert answered["text"] == "3"
    assert (answered["reward"], answered["parts"]) == (1.0, {"exact": 1.0})
    assert answered["row"] == 2
    assert (answered["label"], answered["prompt"][0]["content"]) == ("2", "Say 2")
    assert failed["reward"] is None
    assert failed["failure"]["category"] == "timeout"
    assert third["slot"] == 1
    rest = await told.get("/runs/first/samples", step=2, limit=3, offset=3)
    assert [sample["index"] for sample in rest["samples"]] == [1]
    assert (await told.get("/runs/first/samples"))["total_count"] == 12


async def test_a_sample_is_shown_with_what_its_code_left_behind(told: Application) -> None:
    sample = (await told.get("/runs/first/samples/r1-train-2-0-0.1"))["sample"]
    assert sample["failure"]["category"] == "timeout"
    assert sample["output"]["stdout"] == "began\n"
    assert sample["output"]["traceback"] == "ValueError"
    assert sample["output"]["files"] == {"note.txt": 6}
    assert (sample["grader_output"], sample["tools"]) == (None, [])
    path = "/api/v1/runs/first/samples/r1-train-2-0-0.1/files/"
    found = await told.api.get(f"{path}note.txt")
    assert (found.status_code, found.content) == (200, b"a note")
    for wrong in ("other.txt", "../note.txt"):
        assert (await told.api.get(f"{path}{wrong}")).status_code == 404
    for wrong in ("r1-train-2-0-0.7", "r1-train-9-0-0.0", "r2-train-2-0-0.0", "nothing"):
        answer = await told.api.get(f"/api/v1/runs/first/samples/{wrong}")
        assert answer.status_code == 404


async def test_samples_have_all_branches_in_lists_and_alone_and_rewards_of_parts(
    app: Application,
) -> None:
    await fill(app, steps=2)
    page = await app.get(f"/runs/{FIRST}/samples", step=2, limit=50)
    listed = next(sample for sample in page["samples"] if sample["branches"])
    alone = (await app.get(f"/runs/{FIRST}/samples/{listed['id']}"))["sample"]
    for sample in (listed, alone):
        answered, checked = sample["branches"]
        assert answered == sample["messages"]
        assert [message["content"] for message in checked] == [
            "Is 137 the result of 12 * 11 + 5?",
            "Yes, it is.",
        ]
    paid = [sample for sample in page["samples"] if sample["rewarded_turns"]]
    assert paid[0]["rewarded_turns"] == [{"turn": 0, "agent": "solver", "reward": 0.5}]
    assert paid[0]["agent_rewards"] == {"solver": -1.5}
    call = alone["branches"][0][2]["tool_calls"][0]
    assert call["function"]["name"] == "calculator", "as OpenAI writes it"
    other = next(sample for sample in page["samples"] if not sample["branches"])
    assert (await app.get(f"/runs/{FIRST}/samples/{other['id']}"))["sample"]["branches"] == []


async def test_logs_read_like_a_story_from_either_end(told: Application) -> None:
    everything = (await told.get("/runs/first/logs", limit=1000))["logs"]
    messages = [line["message"] for line in everything]
    assert messages[0].startswith("Run first is requested: grpo of scratch:qwen3-tiny")
    assert "Started: 3 steps of 2 prompts x 2 samples" in messages
    assert "Step 2 is done: reward 0.2, loss 0.5" in messages
    assert messages[-1] == "Finished after 3 steps; reward 0.3"
    assert {line["level"] for line in everything} == {"info", "warning"}
    for direction in ("older", "newer"):
        seen: list[object] = []
        cursor: str | None = None
        while True:
            page = await told.get(
                "/runs/first/logs", limit=4, direction=direction, cursor=cursor or ""
            )
            seen = page["logs"] + seen if direction == "older" else seen + page["logs"]
            cursor = page["next_cursor"]
            if not cursor or not page["logs"]:
                break
        assert seen == everything
    bad = await told.api.get("/api/v1/runs/first/logs", params={"cursor": "x"})
    assert bad.status_code == 400


async def test_a_trace_has_eight_hops_in_order(told: Application) -> None:
    group = GroupKey("r1", Purpose.TRAIN, 2, 1).id
    found = await told.get("/runs/first/trace", sample=sample_id(group, 1))
    assert [hop["hop"] for hop in found["hops"]] == list(range(1, 9))
    assert [hop["event"] for hop in found["hops"]] == [
        "rl.run.requested",
        "rl.workspace.synced",
        "rl.groups.requested",
        "rl.group.generated",
        "rl.group.graded",
        "rl.batch.assembled",
        "rl.policy.updated",
        "rl.checkpoint.saved",
    ]
    assert found["hops"][0]["ms_since_previous"] is None
    assert all(hop["ms_since_previous"] >= 0 for hop in found["hops"][1:])
    for sample, status in (("r1-train-9-0-0.0", 404), ("r2-train-1-0-0.0", 404), ("x", 400)):
        answer = await told.api.get("/api/v1/runs/first/trace", params={"sample": sample})
        assert answer.status_code == status


async def test_the_trace_of_a_sample_that_is_left_out_says_why(app: Application) -> None:
    events: list[Event] = list(beginning("r1", "first", steps=3))
    for number in (1, 2, 3):
        taken = list(step("r1", number))
        for group in [one for one in taken if isinstance(one, GroupGraded)]:
            lost = number == 2 or (number == 3 and group.spec.group_key.slot == 1)
            settled = SettledGroup(
                group=BatchGroup(
                    slot=group.spec.group_key.slot,
                    replacement=0,
                    artifact=group.artifact,
                    rewards=(0.0, 1.0),
                ),
                dropped="grader_error: no label" if number == 2 else None,
            )
            if lost:
                taken = [without(one, settled.group.slot) for one in taken]
            taken.insert(
                taken.index(group) + 1,
                GroupsSettled(owner="r1", purpose=Purpose.TRAIN, step=number, groups=(settled,)),
            )
        events += taken
    for event in events:
        await app.append([event])
    await app.services.readmodel.names.take("run", "first", "r1")
    for sample, num_hops, says in (
        ("r1-train-1-0-0.0", 7, None),
        (
            "r1-train-1-0-0.1",
            7,
            "the sample has no reward, so it is left out of its group: timeout",
        ),
        ("r1-train-2-0-0.0", 5, "its group is in no batch: grader_error: no label"),
        ("r1-train-3-0-0.0", 7, None),
        ("r1-train-3-1-0.0", 5, "its group is in no batch: the step had enough other groups"),
    ):
        found = await app.get("/runs/first/trace", sample=sample)
        assert len(found["hops"]) == num_hops, sample
        assert str(found["reason"]).startswith(says or "None"), sample


async def test_the_trace_of_a_refuted_sample_names_the_group_in_its_place(
    app: Application,
) -> None:
    events = [*beginning("r1", "first", steps=1), *step("r1", 1)]
    (request,) = [one for one in events if isinstance(one, GroupsRequested)]
    slots = tuple(
        slot.model_copy(update={"replacement": REFUTED}) for slot in request.slots if slot.slot == 1
    )
    again = request.model_copy(update={"slots": slots})
    place = next(n for n, one in enumerate(events) if isinstance(one, BatchAssembled))
    events = [*events[:place], again, *(without(one, 1) for one in events[place:])]
    for event in events:
        await app.append([event])
    await app.services.readmodel.names.take("run", "first", "r1")
    found = await app.get("/runs/first/trace", sample="r1-train-1-1-0.0")
    assert len(found["hops"]) == 5
    assert found["reason"] == (
        "samples of its group were refuted, so it was generated again: r1-train-1-1-1000"
    )


def without(event: Event, slot: int) -> Event:
    """The event, if it is a batch without the group of this slot."""
    if not isinstance(event, BatchAssembled):
        return event
    return event.model_copy(update={"groups": tuple(g for g in event.groups if g.slot != slot)})


async def test_a_checkpoint_is_found_by_step_last_and_best(told: Application) -> None:
    for ref in ("first@3", "r1@last", "first@best"):
        shown = (await told.get(f"/checkpoints/{ref}"))["checkpoint"]
        assert (shown["run"], shown["step"], shown["ref"]) == ("r1", 3, "first@3")
        assert shown["manifest"] == {"step": 3}
        assert [file["name"] for file in shown["files"]] == [
            "adapter_config.json",
            "adapter_model.safetensors",
        ]
    other_digits = await told.api.get("/api/v1/checkpoints/first@\u0663")
    assert other_digits.status_code == 404, "a step has the digits 0 to 9"
    missing = await told.api.get("/api/v1/checkpoints/first@2")
    assert missing.status_code == 404
    assert "it has: 3" in missing.json()["detail"]
    no_file = await told.api.get("/api/v1/checkpoints/first@3/files/../secret")
    assert no_file.status_code == 404
    gone = await told.api.get("/api/v1/checkpoints/first@3/files/adapter_config.json")
    assert gone.status_code == 404


async def test_events_page_by_page_are_cloud_events(told: Application) -> None:
    seen: list[dict[str, Any]] = []
    after = ""
    while True:
        page = await told.get("/runs/first/events", limit=10, **({"after": after} if after else {}))
        seen += page["events"]
        if not page["events"]:
            break
        after = page["next"]
    assert len(seen) == 5 - 2 + STEPS * 8 + 2
    assert seen[0]["type"] == "rl.run.requested"
    assert seen[0]["specversion"] == "1.0"
    assert len({event["id"] for event in seen}) == len(seen)
    only = await told.get("/runs/first/events", types="rl.step.settled")
    assert [event["data"]["step"] for event in only["events"]] == [1, 2, 3]
    for query in ("after=zz", "types=rl.nothing"):
        assert (await told.api.get(f"/api/v1/runs/first/events?{query}")).status_code == 400


async def stream(app: Application, run: str, **headers: str) -> list[tuple[str, str]]:
    """All server-sent events until the server ends: (id, type)."""
    named = {"Accept": "text/event-stream", **{k.replace("_", "-"): v for k, v in headers.items()}}
    found, identity = [], ""
    async with app.api.stream("GET", f"/api/v1/runs/{run}/events", headers=named) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        async for line in answer.aiter_lines():
            if line.startswith("id: "):
                identity = line[4:]
            if line.startswith("data: "):
                found.append((identity, json.loads(line[6:])["type"]))
    return found


async def test_a_stream_goes_on_where_it_broke_and_ends_with_the_run(app: Application) -> None:
    await app.append(list(beginning("r1", "first", steps=1)))
    following = asyncio.ensure_future(stream(app, "r1"))
    await app.append(list(step("r1", 1)))
    await app.append([RunFinished(run="r1", step=1)])
    found = await asyncio.wait_for(following, 60)
    assert [kind for _, kind in found][-2:] == ["rl.step.settled", "rl.run.finished"]
    assert len(found) == 3 + 8 + 1
    resumed = await stream(app, "r1", Last_Event_ID=found[4][0])
    assert resumed == found[5:]
    over = await app.api.get(
        "/api/v1/runs/r1/events",
        headers={"Accept": "text/event-stream", "Last-Event-ID": found[-1][0]},
    )
    assert over.status_code == 204


async def test_a_stream_starts_again_when_the_database_went_back(app: Application) -> None:
    """The cases: a reader that is connected, and one that comes back with the id of an event that
    was lost."""
    await app.append(list(beginning("r1", "first", steps=1)))
    following = asyncio.ensure_future(stream(app, "r1"))
    await app.append(list(step("r1", 1)))
    app.database.history.history_epoch += 1
    await app.append([RunFinished(run="r1", step=1)])
    found = await asyncio.wait_for(following, 60)
    assert list(dict(found).values()).count("rl.run.finished") == 1
    assert len(dict(found)) == 3 + 8 + 1, "it misses nothing"
    again = await stream(app, "r1", Last_Event_ID="ffffffffff-1")
    assert again == list(dict(found).items())


async def test_commands_that_make_no_sense_are_conflicts(app: Application) -> None:
    await app.append(list(beginning("r1", "first", steps=2)))
    resumed = await app.post("/runs/r1/resume", {})
    assert resumed.status_code == 409
    assert "not paused" in resumed.json()["detail"]
    assert (await app.post("/runs/r1/pause", {})).status_code == 200
    assert (await app.post("/runs/r1/pause", {})).status_code == 200
    await app.append([RunPaused(run="r1", step=1)])
    again = await app.post("/runs/r1/pause", {})
    assert again.status_code == 409
    assert "already paused" in again.json()["detail"]
    info = (await app.get("/runs/r1"))["run"]
    assert (info["status"], info["phase"]) == ("running", "paused")
    assert (await app.post("/runs/r1/stop", {})).status_code == 200
    late = await app.post("/runs/r1/resume", {})
    assert "stopping" in late.json()["detail"]
    await app.append([RunFinished(run="r1", step=1)])
    over = await app.post("/runs/r1/stop", {})
    assert over.status_code == 409
    assert "run first is already finished" in over.json()["detail"]
    types = [e["type"] for e in (await app.get("/runs/r1/events"))["events"]]
    assert types.count("rl.run.pause-requested") == 1


async def test_a_stop_says_what_holds_the_run(app: Application) -> None:
    await app.append(list(beginning("r1", "first", steps=2)))
    await app.database.durable.execute(
        "insert into run_gates as g (run_id, state, decider) values ('r1', 'open', 9)"
        " on conflict (run_id) do update set decider = 9"
    )
    waits = (await app.post("/runs/r1/stop", {})).json()["waiting_for"]
    assert [wait["what"] for wait in waits] == ["workers"], "nobody knows a release"
    await app.services.effects.register(WorkerId("w"), host="h", pid=1, lease_s=60)
    waits = (await app.get("/runs/r1"))["waiting_for"]
    assert [wait["what"] for wait in waits] == ["release"]
    assert "run r1 began under a newer release" in waits[0]["message"]


async def test_a_tenant_learns_why_a_run_waits_but_not_which_machine_works(
    app: Application,
) -> None:
    made = await app.post("/workspaces", {"url": "/repo", "name": "sums"})
    workspace = made.json()["workspace"]["id"]
    key = await create_api_key(app, "reads", "read", workspace="sums")
    for event in beginning("r1", "first", steps=2):
        own = isinstance(event, RunRequested)
        await app.append([event.model_copy(update={"workspace": workspace}) if own else event])
    await app.database.durable.execute(
        "insert into effects (id, consumer, stream, lane, run_id, type, data, correlation, worker,"
        " attempts) values (gen_random_uuid(), 'learn', 'policy-r1', 'train', 'r1', 'TrainStep',"
        " '{}', gen_random_uuid(), 'gpu-7:w', 1)"
    )
    await app.services.effects.register(WorkerId("gpu-7:w"), host="gpu-7", pid=4242, lease_s=60)
    told = (await app.get("/runs/r1"))["waiting_for"]
    assert "gpu-7:w (pid 4242 on gpu-7) performs TrainStep again" in told[0]["message"]
    shown = (await ask(app, "GET", "/api/v1/runs/r1", key)).json()["waiting_for"]
    assert shown[0]["message"].startswith("worker 1 performs TrainStep again; its lease ends in")
    assert "gpu-7" not in json.dumps(shown)


async def test_a_run_without_progress_or_workers_is_unknown(app: Application) -> None:
    events = list(beginning("r1", "first", steps=2))
    await app.append(events)
    assert any(isinstance(event, RunStarted) for event in events)
    assert (await app.get("/runs/r1"))["run"]["status"] == "running"
    await app.database.durable.execute(
        "update runs set last_at = last_at - interval '1 hour' where run = 'r1'"
    )
    unknown = await app.get("/runs/r1")
    assert unknown["run"]["status"] == "unknown"
    assert [wait["what"] for wait in unknown["waiting_for"]] == ["workers"]
    assert (await app.get("/runs", status="unknown"))["total_count"] == 1
    await app.services.effects.register(WorkerId("w"), host="h", pid=1, lease_s=60)
    assert (await app.get("/runs/r1"))["run"]["status"] == "running"


async def test_cached_models_say_which_forward_pass_runs_them(
    told: Application, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    configs = {"acme/olmo": '{"model_type": "olmo"}', "acme/bert": BERT, "acme/part": "{"}
    for name, config in configs.items():
        folder = tmp_path / f"models--{name.replace('/', '--')}" / "snapshots" / "abc"
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(config)
    (tmp_path / "models--acme--none").mkdir()
    found = {m["name"]: m for m in (await told.get("/models"))["models"] if m["kind"] == "hub"}
    assert {name: model["runs"] for name, model in found.items()} == {
        "acme/olmo": "general",
        "acme/bert": "refused",
        "acme/part": None,
        "acme/none": None,
    }
    assert "'olmo'" in found["acme/olmo"]["why"]
    assert found["acme/none"]["why"] == "its config.json is not in the cache"


async def test_the_platform_tells_about_itself(told: Application) -> None:
    await told.services.effects.register(WorkerId("w"), host="h", pid=1, lease_s=60)
    said = await told.get("/status")
    assert said["runs"] == {"finished": 1}
    assert [worker["id"] for worker in said["workers"]] == ["w"]
    assert said["lag"]["project"] == 0
    assert said["horizon_age_s"] >= 0
    assert said["horizon_holders"] == []
    assert said["waiting_for"] == []
    answer = await told.get("/models")
    names = {model["name"] for model in answer["models"] if model["runs"] == "lean"}
    assert {"scratch:qwen3-2m", "scratch:qwen3-tiny"} <= names
    assert {family["runs"] for family in answer["families"]} == {"lean", "general", "refused"}
    text = (await told.api.get("/metrics")).text
    assert "headrace_workers 1.0" in text
    assert 'headrace_runs{status="finished"} 1.0' in text
