"""An installation with something on every page of the dashboard: runs in each state with their curves,
samples with tools, judges and failures, datasets, workspaces, evaluations and a dead letter.

Every text that users choose goes through `text`, so a test can put others in their places.
"""

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

from infra.ports.actor import Actor, acting_as
from infra.readmodel.registry import RunNote
from infra.spine.ports.event_log import Cursor
from infra.spine.runtime.dead_letters import dead_letter_message
from producers.core.datasets.row_issues import RowIssue, line_issue, to_text
from schemas.costs.work import Work
from schemas.datasets import DatasetRow
from schemas.deployments import ServedModel
from schemas.events import (
    BatchAssembled,
    CheckpointSaved,
    CommitRequested,
    CommitStatusDecided,
    DatasetRegistered,
    EvaluationCompleted,
    EvaluationRequested,
    EvaluationStarted,
    Event,
    GroupGenerated,
    GroupGraded,
    GroupsRequested,
    HookPinged,
    ModelDeployed,
    ModelDeployFailed,
    ModelDeployRequested,
    PolicyInitialized,
    PolicyUpdated,
    PushExamined,
    PushReceived,
    RefsListed,
    RefsMoved,
    RunFailed,
    RunFinished,
    RunPaused,
    RunRequested,
    RunStarted,
    RunWarned,
    StepSettled,
    TriggerFired,
    TriggerRefused,
    TriggerSubmitted,
    WorkspaceConnected,
    WorkspaceRejected,
    WorkspaceSynced,
)
from schemas.ids import HEADRACE, ConsumerName, GroupKey, Purpose, derive_id
from schemas.models.fork import ForkPoint
from schemas.sampling import JudgementBatch, Message, PolicyRef, SampleBatch
from schemas.specs import (
    BatchGroup,
    CommitSpec,
    CommitStatus,
    DatasetRef,
    DiscoveredRollout,
    Entrypoint,
    GroupSpec,
    Plan,
    Push,
    PushOrigin,
    RefMove,
    SampleEntry,
    Slot,
    TrainSpec,
    TriggerMatch,
)
from tests.kit.application import Application
from tests.kit.history import keep
from tests.kit.showcase_answers import NUM_SAMPLES, QUESTIONS, Texts, group_of_answers
from tests.kit.showcase_regrade import REGRADE, fill_regrade
from tests.kit.specs import MODEL, checkpoint_spec, config, ref, version
from tests.kit.specs import template as group_template

WORKSPACE = "ws-sums"
DATASET = "ds-sums"
REJECTED = "ds-broken"
FIRST, SECOND, FAILED, PAUSED, PENDING = (
    "run-finished",
    "run-running",
    "run-failed",
    "run-paused",
    "run-pending",
)
FORK = ForkPoint(parent=FIRST, step=1, position=1, policy_position=1)
EVALUATION, LATER = "eval-held-out", "eval-later"
STEPS = 40
SECONDS = {"generate": 2.4, "grade": 0.3, "learn": 1.8, "publish": 0.2, "wait": 0.1}


@dataclass(frozen=True)
class Showcase:
    """The addresses of the pages that have something to show, by a short name."""

    pages: dict[str, str]


async def fill(app: Application, *, text: Texts = str, steps: int = STEPS) -> Showcase:
    """Append everything. Returns the pages that show it."""
    dataset = await _dataset(app, text)
    await _workspace(app, text)
    names = ("gsm8k-grpo-3e-6", "gsm8k-gspo-1e-6", "tools-broken", "tools-long", "new-rewards")
    for run, name in zip((FIRST, SECOND, FAILED, PAUSED, PENDING), names, strict=True):
        await _request(app, run, text(name), dataset, text)
    await _train(app, FIRST, steps, text)
    await fill_regrade(app, FIRST, text)
    await app.services.readmodel.run_notes.change(
        FIRST, lambda _: RunNote((text("baseline"), text("paper")), text("best so far")), by="ada"
    )
    await app.append([RunFinished(run=FIRST, step=steps, reward=0.87)])
    await _train(app, SECOND, max(2, steps * 2 // 3), text, total=steps)
    await _train(app, FAILED, 2, text, total=steps)
    message = text(
        "the grader raised ZeroDivisionError in 8 of 8 samples (rollouts/tools/main.py:41)"
    )
    await app.append([RunFailed(run=FAILED, kind="error", message=message)])
    await _train(app, PAUSED, 3, text, total=steps)
    await app.append([RunPaused(run=PAUSED, step=3, reason=text("paused by ada"))])
    await _evaluation(app, EVALUATION, text("held-out-after-40"), dataset, text)
    await _evaluation(app, LATER, text("held-out-later"), dataset, text, rewards=(1.0, 0.0))
    await _deployments(app, text)
    await _dead_letter(app, text)
    paused = await app.services.log.read(PAUSED, after=Cursor(), limit=1, types=[RunPaused.type])
    made = await app.services.shares.create(FIRST, days=7, by=text("ada"))
    return Showcase({**_pages(made.key), "moment": f"/runs/{PAUSED}/at/{paused[0].cursor}"})


def _pages(key: str) -> dict[str, str]:
    return {
        "runs": "/",
        "runs-nothing": "/?search=no-such-run",
        "run": f"/runs/{FIRST}",
        "run-live": f"/runs/{SECOND}",
        "run-failed": f"/runs/{FAILED}",
        "run-paused": f"/runs/{PAUSED}",
        "run-pending": f"/runs/{PENDING}",
        "samples": f"/runs/{FIRST}/samples?step=2",
        "samples-branch": f"/runs/{FIRST}/samples?step=2&branch=0.2",
        "samples-logprob": f"/runs/{FIRST}/samples?step=2&colour=logprob",
        "samples-advantage": f"/runs/{FIRST}/samples?step=2&colour=advantage",
        "samples-trained": f"/runs/{FIRST}/samples?step=2&colour=trained",
        "sample-search": f"/runs/{FIRST}/search?text=answer",
        "health": f"/runs/{FIRST}/health",
        "forks": f"/runs/{FIRST}/forks",
        "forks-of-a-fork": f"/runs/{PENDING}/forks",
        "costs": "/cost",
        "regrades": f"/runs/{FIRST}/regrades",
        "regrade": f"/runs/{FIRST}/regrades/{REGRADE}",
        "samples-regraded": f"/runs/{FIRST}/samples?step=2&regrade={REGRADE}",
        "seeds": f"/runs/{FIRST}/seeds",
        "shares": f"/runs/{FIRST}/shares",
        "sessions": "/sessions",
        "workspace-alerts": f"/workspaces/{WORKSPACE}/alerts",
        "api_keys": "/api-keys?revoked=true",
        "shared": f"/shared?key={key}",
        "timeline": f"/runs/{FIRST}/timeline?step=1",
        "events": f"/runs/{PAUSED}/events",
        "events-found": f"/runs/{PAUSED}/events?search=paused",
        "hops": f"/runs/{FIRST}/trace/{GroupKey(FIRST, Purpose.TRAIN, 2, 0)}.0",
        "compare": f"/compare?runs={FIRST},{SECOND}",
        "checkpoints-compared": f"/compare/checkpoints?a={FIRST}@last&b={SECOND}@last",
        "evaluations-compared": f"/compare/evaluations?a={EVALUATION}&b={LATER}",
        "new": "/new",
        "new-fork": f"/new?from={FIRST}@last",
        "new-evaluation": f"/new-evaluation?checkpoint={FIRST}@last",
        "evaluations": "/evals",
        "evaluation": f"/evals/{EVALUATION}",
        "evaluation-samples": f"/evals/{EVALUATION}/samples?row=1&colour=logprob",
        "datasets": "/datasets",
        "dataset": f"/datasets/{DATASET}",
        "dataset-rejected": f"/datasets/{REJECTED}",
        "workspaces": "/workspaces",
        "workspace": f"/workspaces/{WORKSPACE}",
        "workspace-filtered": f"/workspaces/{WORKSPACE}?event=ping",
        "deployments": "/deployments?checkpoint=gsm8k-grpo-3e-6@best",
        "deployment": "/deployments/sums",
        "playground": "/playground",
        "platform": "/platform",
        "not-found": "/runs/no-such-run",
    }


async def _dataset(app: Application, text: Texts) -> DatasetRef:
    rows = [
        DatasetRow(prompt=(Message(role="user", content=text(question)),), label=text(str(7 * n)))
        for n, question in enumerate(QUESTIONS * 2)
    ]
    content = await app.services.artifacts.put_artifact(
        b"".join(row.to_line() for row in rows), run="d", blob=True
    )
    dataset = DatasetRef(dataset=DATASET, name=text("gsm8k-train"), content=content, num_rows=8)
    registered = DatasetRegistered(
        dataset=dataset,
        columns=("user_prompt", "ground_truth", text("difficulty")),
        file_name=text("gsm8k-train.jsonl"),
        file_size=content.size,
        original=content,
        mapping={text("question"): "user_prompt"},
    )
    await app.append([registered])
    await _rejected_upload(app, text)
    return dataset


async def _rejected_upload(app: Application, text: Texts) -> None:
    uploads = app.services.readmodel.uploads
    first = line_issue(3, text("is not JSON: Expecting value"), text('{"user_prompt": What is'))
    second = RowIssue(
        "line 5, column ground_truth",
        text("is missing"),
        line=5,
        column=text("ground_truth"),
        excerpt=text('{"user_prompt": "What is 2 + 2?"}'),
    )
    await uploads.announce(REJECTED, text("sums-draft"), text("sums-draft.jsonl"))
    error = text("sums-draft.jsonl cannot be a dataset: line 3 is not JSON: Expecting value")
    actor = Actor("t-ada", text("ada"), frozenset({"submit"}))
    with acting_as(actor):
        await uploads.reject(REJECTED, error, issues=to_text([first, second]))


async def _workspace(app: Application, text: Texts) -> None:
    url = text("https://git.example.org/team/sums.git")
    found = DiscoveredRollout(
        entrypoint=Entrypoint(rollout="math"), grader=text("Exact"), tools=(text("calculator"),)
    )
    broken = DiscoveredRollout(
        entrypoint=Entrypoint(rollout="tools"), error=text("main.py:3: no module named 'sympy'")
    )
    events: list[Event] = [
        CommitRequested(
            workspace=WORKSPACE, workspace_name=text("sums"), commit=CommitSpec(url=url)
        ),
        WorkspaceConnected(workspace=WORKSPACE, forge="gitea", can_post=True),
        WorkspaceSynced(
            workspace=WORKSPACE,
            request=derive_id(HEADRACE, "request"),
            commit="c" * 40,
            snapshot=ref("tree"),
            rollouts=(found, broken),
        ),
        HookPinged(workspace=WORKSPACE, forge="gitea", delivery="d0"),
        PushReceived(
            workspace=WORKSPACE,
            forge="gitea",
            delivery="d1",
            ref=text("refs/heads/main"),
            before="a" * 40,
            after="b" * 40,
            pusher=text("ada"),
        ),
        RefsListed(workspace=WORKSPACE, round=1, digest=None, error=text("the forge is away")),
        *_triggers(url, text),
        WorkspaceRejected(
            workspace=WORKSPACE, request=uuid4(), message=text("no rollouts/ folder")
        ),
    ]
    for event in events:
        await app.append([event])


def _triggers(url: str, text: Texts) -> Iterator[Event]:
    """A push that two triggers matched: one made a run, the other was refused."""
    main = text("refs/heads/main")
    push = Push(
        workspace=WORKSPACE, workspace_name=text("sums"), url=url, number=1, ref=main,
        before="a" * 40, after="b" * 40,
    )  # fmt: skip
    move = RefMove(ref=main, before=push.before, after=push.after, number=1)
    first, second = (
        TriggerMatch(trigger=number, config=text(f"configs/training/{name}.toml"))
        for number, name in enumerate(("sums", "tools"), 1)
    )
    fired = PushOrigin(push=push, match=first, context="headrace/sums/sums")
    refused = PushOrigin(push=push, match=second, context="headrace/sums/tools")
    status = CommitStatus(
        workspace=WORKSPACE, sha="b" * 40, context=fired.context, state="success",
        text=text("held-out reward 0.2 -> 0.9"),
    )  # fmt: skip
    name = text("sums")
    yield RefsMoved(workspace=WORKSPACE, workspace_name=name, url=url, round=1, moves=(move,))
    yield PushExamined(workspace=WORKSPACE, push=push, matches=(first, second), day="2026-11-22")
    yield TriggerFired(workspace=WORKSPACE, run=FIRST, origin=fired)
    yield TriggerSubmitted(
        workspace=WORKSPACE, run=FIRST, origin=fired, run_name=text("gsm8k-grpo-3e-6")
    )
    yield TriggerRefused(
        workspace=WORKSPACE, run="run-refused", origin=refused, message=text("no dataset tools")
    )
    yield CommitStatusDecided(workspace=WORKSPACE, subject=FIRST, number=1, stage=3, status=status)


async def _request(app: Application, run: str, name: str, dataset: DatasetRef, text: Texts) -> None:
    await app.services.readmodel.names.take("run", name, run)
    settings = config(
        training={"lr": 3e-6 if run == FIRST else 1e-6, "n_samples_per_prompt": NUM_SAMPLES},
        advanced={"algorithm": "grpo" if run == FIRST else "gspo"},
    )
    experiment = settings.experiment.model_copy(update={"model_path": text("Qwen/Qwen3-0.6B")})
    requested = RunRequested(
        run=run,
        run_name=name,
        config=settings.model_copy(update={"experiment": experiment}),
        model=MODEL,
        dataset=dataset,
        workspace=WORKSPACE,
        submitter=text("ada"),
        fork=FORK if run == PENDING else None,
        warnings=(text("max_response_length is less than most answers of the base model"),),
    )
    await app.append([requested])


async def _train(
    app: Application, run: str, steps: int, text: Texts, *, total: int | None = None
) -> None:
    template = group_template(num_samples=NUM_SAMPLES).model_copy(update={"run": run})
    total = total or steps
    spec = TrainSpec(
        run=run, config=config(), model=MODEL, total_steps=total, dataset=template.dataset
    )
    plan = Plan(total_steps=total, batch_size=2, num_samples=NUM_SAMPLES, num_rows=8)
    events: list[Event] = [
        RunStarted(run=run, plan=plan, spec=spec, template=template, commit="c" * 40),
        PolicyInitialized(run=run, spec=spec, state=version(0), versions={"torch": "2"}),
    ]
    for step in range(1, steps + 1):
        if step <= 2:
            events += await _groups(app, run, step, text)
        events += step_events(run, step)
    events.append(RunWarned(run=run, step=1, message=text("3 of 8 groups have no variance")))
    for event in events:
        await app.services.log.append([event], cause=uuid4())
    manifest = await keep(app, b'"manifest"')
    saved = checkpoint_spec(steps).model_copy(update={"run": run})
    await app.append([CheckpointSaved(spec=saved, manifest=manifest, reward=0.84)])


def step_events(run: str, step: int) -> Iterator[Event]:
    """The events at the end of a step, with metrics like those of a run that learns."""
    draw = random.Random(f"{run}/{step}")
    rise = 1 - math.exp(-step / 12)
    metrics = {
        "rollout/num_samples": 2.0 * NUM_SAMPLES,
        "rollout/raw_reward": 0.2 + 0.65 * rise + draw.gauss(0, 0.03),
        "train/entropy_loss": 1.4 - 0.7 * rise + draw.gauss(0, 0.02),
        "rollout/response_lengths": 180 + 90 * rise + draw.gauss(0, 8),
        "rollout/total_lengths": 300 + 90 * rise + draw.gauss(0, 8),
        "rollout/truncated_ratio": max(0.0, 0.15 - 0.12 * rise + draw.gauss(0, 0.01)),
        "train/kl": 0.002 + 0.01 * rise + abs(draw.gauss(0, 0.001)),
        "train/grad_norm": 0.9 - 0.3 * rise + draw.gauss(0, 0.05),
        "train/lag": 1.0,
        "rollout/failed_ratio": max(0.0, 0.05 - 0.04 * rise),
        "rollout/zero_variance_ratio": 0.1 + 0.2 * rise,
        "train/loss": 0.5 - 0.2 * rise,
        **{f"time/{part}_s": seconds for part, seconds in SECONDS.items()},
    }
    state = version(step)
    yield PolicyUpdated(
        run=run,
        step=step,
        state=state,
        batch=derive_id(HEADRACE, f"{run}/{step}"),
        metrics=metrics,
        plan=(8,),
        versions={},
        work=Work(effect="TrainStep", device="gpu.H100", device_s=1800.0, wasted_s=20.0),
    )
    yield StepSettled(run=run, step=step, state=state, metrics=metrics)


async def _groups(app: Application, run: str, step: int, text: Texts) -> Sequence[Event]:
    """The events of two groups of a step, whose artifacts are stored."""
    template = group_template(num_samples=NUM_SAMPLES).model_copy(update={"run": run})
    slots = tuple(Slot(slot=slot, row=slot) for slot in range(2))
    requested = GroupsRequested(
        owner=run, purpose=Purpose.TRAIN, step=step, slots=slots, template=template
    )
    events: list[Event] = [requested]
    held = []
    for slot in range(2):
        group = str(GroupKey(run, Purpose.TRAIN, step, slot))
        graded = await _graded_group(app, run, group, slot, text)
        events += graded
        last = graded[-1]
        rewards = tuple(grade.reward for grade in last.grades)
        held.append(BatchGroup(slot=slot, replacement=0, artifact=last.artifact, rewards=rewards))
    return [*events, BatchAssembled(run=run, step=step, groups=tuple(held))]


async def _graded_group(
    app: Application, run: str, group: str, row: int, text: Texts, *, reward: float | None = None
) -> tuple[GroupGenerated, GroupGraded]:
    """A group as it was generated and graded. `reward` replaces the rewards of all its answers."""
    template = group_template(num_samples=NUM_SAMPLES).model_copy(update={"run": run})
    spec = GroupSpec(group=group, row=row, template=template)
    samples, grades, judgements = group_of_answers(QUESTIONS[row % 4], text)
    if reward is not None:
        grades = tuple(one.model_copy(update={"reward": reward}) for one in grades)
    batch = SampleBatch(group=group, samples=samples)
    artifact = await keep(app, batch.model_dump_json().encode())
    judged = JudgementBatch(group=group, judgements=judgements)
    entries = tuple(
        SampleEntry(
            index=one.index,
            prompt_tokens=one.prompt_tokens,
            completion_tokens=one.completion_tokens,
            failure=one.failure.category if one.failure else None,
            message=one.failure.message[:200] if one.failure else None,
        )
        for one in samples
    )
    generated = GroupGenerated(spec=spec, entries=entries, parts=(artifact,))
    graded = GroupGraded(
        spec=spec,
        artifact=artifact,
        entries=entries,
        grades=grades,
        judgements=await keep(app, judged.model_dump_json().encode()),
    )
    return generated, graded


async def _evaluation(
    app: Application,
    evaluation: str,
    name: str,
    dataset: DatasetRef,
    text: Texts,
    *,
    rewards: Sequence[float | None] = (None, None),
) -> None:
    """An evaluation of two rows. `rewards` replaces the rewards of all answers of a row."""
    template = group_template(num_samples=NUM_SAMPLES, dataset=dataset)
    asked: dict[str, Any] = {"evaluation": evaluation, "template": template, "rows": (0, 1)}
    requested = EvaluationRequested(eval_name=name, workspace=WORKSPACE, **asked)
    started = EvaluationStarted(batch_size=8, pass_threshold=1.0, **asked)
    events: list[Event] = [requested, started]
    for row, reward in enumerate(rewards):
        group = str(GroupKey(evaluation, Purpose.EVALUATE, 0, row))
        events += await _graded_group(app, evaluation, group, row, text, reward=reward)
    ended = EvaluationCompleted(
        evaluation=evaluation,
        status="failed",
        reward=0.62,
        metrics={"pass@1": 0.5},
        message=text("2 of 8 attempts have no reward"),
    )
    for event in (*events, ended):
        await app.append([event])


async def _deployments(app: Application, text: Texts) -> None:
    """One that is active and was used, and one that failed."""
    served = ServedModel(
        name="sums",
        base_name=text("Qwen/Qwen3-0.6B"),
        model=MODEL,
        policy=PolicyRef(version=STEPS, weights=ref("w0")),
        lora_alpha=32.0,
        run=FIRST,
        run_name=text("gsm8k-grpo-3e-6"),
        step=STEPS,
        reward=0.87,
    )
    failed = served.model_copy(update={"name": "tools", "run": FAILED})
    message = text("its base model cannot be loaded: 12 GB are needed, and 8 GB are free")
    events: list[Event] = [
        ModelDeployRequested(deployment="sums", request="1", served=served),
        ModelDeployed(deployment="sums", request="1", served=served, number=1),
        ModelDeployRequested(deployment="tools", request="2", served=failed),
        ModelDeployFailed(deployment="tools", request="2", message=message),
    ]
    for event in events:
        await app.append([event])
    await app.database.durable.execute(
        "insert into inference_usage (api_key, model, requests, prompt_tokens, completion_tokens)"
        " values ('root', $1, 12, 480, 960)",
        served.model_name,
    )


async def _dead_letter(app: Application, text: Texts) -> None:
    log = app.services.log
    [message] = await log.append([RunWarned(run=SECOND, step=2, message="x")], cause=uuid4())
    cause = ValueError(text("a bug in the rules of the run"))
    await dead_letter_message(log, ConsumerName("grade"), message, cause, pauses=False)
    [last] = await log.append([RunWarned(run=SECOND, step=3, message="y")], cause=uuid4())
    assert await app.services.readmodel.caught_up(last.cursor, timeout_s=60)
