"""A TOML, a dataset and a commit become a run: validated, pinned, admitted, and appended once.

What runs is fixed here: the dataset's content, the checkpoint's files. The commit is fixed by sync, on
the workspace's stream. The client's idempotency key is the run's id and the cause of its events: asking
again is asking once, and asking for something else under the same key is refused.
"""

import difflib
import hashlib
import json
import random
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC

from infra import telemetry
from infra.failpoints import hit
from infra.ports.event_log import EventStore, Recorded
from infra.postgres.names import Kind, Names
from producers.core.admission import evaluation_issues, training_issues
from producers.core.datasets.registration import find as find_dataset
from producers.core.lookup import Lookup
from producers.core.model_facts import ModelFacts, length_issues, model_facts, unknown_characters
from producers.core.model_ref import resolve_model
from producers.core.rollouts import check_rollout
from producers.core.run_names import invented_name
from producers.core.workspaces import Workspace, Workspaces
from schemas.config import EvalConfig, Experiment, RunConfig
from schemas.errors import Conflict, InvalidConfig, Issue, NotFound, Refused
from schemas.events import (
    DatasetRegistered,
    EvaluationRequested,
    Event,
    RepositoryPushed,
    RunDeleted,
    RunRequested,
)
from schemas.ids import (
    HEADRACE,
    EvalId,
    RunId,
    StreamName,
    derive_id,
    eval_stream,
    run_stream,
    short_id,
)
from schemas.sampling import Day, ModelRef, PolicyRef, SamplingParams
from schemas.specs import CommitSpec, DatasetRef, Entrypoint, GroupTemplate
from schemas.toml.parser import not_built, parse_eval, parse_run, refuse

NAME = re.compile(r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$")
NAMES_TRIED = 100
KEY_USED = (
    "this Idempotency-Key was used for another request; send a new key with a new request, and the "
    "same key only to repeat one"
)
SAMPLED_SHARE = 0.1
"""Rows an evaluation takes when it names no limit."""


@dataclass(frozen=True, slots=True)
class Asked:
    """A request as it came in: the TOML as data, and what stands beside it."""

    config: Mapping[str, object]
    workspace: str | None = None
    name: str | None = None
    start: str | None = None

    def digest(self, kind: str) -> str:
        """What was asked, as a hash: two requests are the same if it is."""
        said = [kind, self.config, self.workspace, self.name, self.start]
        return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class Taken:
    """A name that was taken for what is about to be appended."""

    kind: Kind
    name: str
    identity: str


@dataclass(frozen=True, slots=True)
class Resolved:
    """A run's request with everything looked up: what a dry run shows."""

    config: RunConfig
    model: ModelRef
    facts: ModelFacts
    dataset: DatasetRef
    validation: DatasetRef | None
    workspace: Workspace | None
    warnings: tuple[str, ...]


class Submitter:
    """Admits runs and evaluations."""

    def __init__(
        self, log: EventStore, names: Names, *, lookup: Lookup, workspaces: Workspaces
    ) -> None:
        self._log = log
        self._names = names
        self._lookup = lookup
        self._workspaces = workspaces

    async def resolve_run(self, asked: Asked) -> Resolved:
        """Validate and look everything up; appends nothing. Raises InvalidConfig with all issues that
        can be told together."""
        config = parse_run(asked.config)
        if asked.start is not None:
            experiment = config.experiment.model_copy(update={"model_path": asked.start})
            config = config.model_copy(update={"experiment": experiment})
        if early := not_built(config):
            raise refuse("training", early)
        dataset = await self._dataset(config.experiment.dataset, "experiment.dataset")
        validation = None
        if config.advanced.validation_dataset is not None:
            named = config.advanced.validation_dataset
            validation = await self._dataset(named, "advanced.validation_dataset")
        if late := training_issues(config, dataset, validation):
            raise refuse("training", late)
        model = await resolve_model(
            config.experiment.model_path, seed=config.advanced.seed, lookup=self._lookup
        )
        model = model.model_copy(update={"dtype": config.advanced.precision})
        facts = await model_facts(model, self._lookup)
        if too_long := length_issues(config, facts.context):
            raise refuse("training", too_long)
        warnings = unknown_characters(facts, dataset, validation)
        workspace = None
        if config.experiment.rollout is not None:
            workspace = await self._workspaces.choose(asked.workspace)
            warnings += await check_rollout(self._log, workspace.id, config.experiment)
        return Resolved(
            config=config,
            model=model,
            facts=facts,
            dataset=dataset.dataset,
            validation=validation.dataset if validation else None,
            workspace=workspace,
            warnings=warnings,
        )

    async def submit_run(self, asked: Asked, *, key: str) -> Recorded:
        """Append RunRequested, and with it the push that brings its commit in. Returns the request as
        recorded. Raises InvalidConfig, NotFound, Conflict."""
        run = RunId(short_id("run", key))
        digest = asked.digest("run")
        if known := await self._asked_before(digest, key=key, stream=run_stream(run)):
            return known
        resolved = await self.resolve_run(asked)
        requested = RunRequested(
            run=run,
            run_name=await self._name("run", asked.name, run),
            config=resolved.config,
            model=resolved.model,
            dataset=resolved.dataset,
            validation=resolved.validation,
            workspace=resolved.workspace.id if resolved.workspace else None,
            date=await self._today(),
            warnings=resolved.warnings,
        )
        events: list[Event] = [requested]
        if resolved.workspace is not None:
            experiment = resolved.config.experiment
            events.append(_push(resolved.workspace, experiment, requested.stream))
        taken = Taken("run", requested.run_name, run)
        return await self._append(events, taken, key=key, digest=digest)

    async def submit_eval(self, asked: Asked, *, key: str) -> Recorded:
        """Append EvaluationRequested and the push that brings its commit in."""
        evaluation = EvalId(short_id("evaluation", key))
        stream = eval_stream(evaluation)
        digest = asked.digest("evaluation")
        if known := await self._asked_before(digest, key=key, stream=stream):
            return known
        config = parse_eval(asked.config)
        if early := not_built(config):
            raise refuse("evaluation", early)
        dataset = await self._dataset(config.experiment.dataset, "experiment.dataset")
        rows = _rows(config, dataset.dataset)
        if late := evaluation_issues(config, dataset, rows):
            raise refuse("evaluation", late)
        model = await resolve_model(
            config.experiment.model_path, seed=config.advanced.seed, lookup=self._lookup
        )
        facts = await model_facts(model, self._lookup)
        if too_long := length_issues(config, facts.context):
            raise refuse("evaluation", too_long)
        warnings = unknown_characters(facts, dataset)
        workspace = await self._workspaces.choose(asked.workspace)
        warnings += await check_rollout(self._log, workspace.id, config.experiment)
        requested = EvaluationRequested(
            evaluation=evaluation,
            eval_name=await self._name("evaluation", asked.name, evaluation),
            template=_template(config, model, dataset.dataset, today=await self._today()),
            rows=rows,
            batch_size=config.evaluation.batch_size,
            pass_threshold=config.evaluation.pass_threshold,
            config=config,
            workspace=workspace.id,
            warnings=warnings,
        )
        push = _push(workspace, config.experiment, stream)
        taken = Taken("evaluation", requested.eval_name, evaluation)
        return await self._append([requested, push], taken, key=key, digest=digest)

    async def _append(
        self, events: list[Event], taken: "Taken", *, key: str, digest: str
    ) -> Recorded:
        """Take the key for this request, then append. Raises Conflict when another request took it
        meanwhile, Refused when an event is too large; the name is free again then."""
        hit("submit.before_commit")
        try:
            if await self._names.take("request", key, digest) != digest:
                raise Conflict(KEY_USED)
            recorded = await self._log.append(
                events,
                cause=derive_id(HEADRACE, f"submit/{taken.kind}/{key}"),
                traceparent=telemetry.traceparent(),
            )
        except Refused:
            await self._names.release(taken.kind, taken.name, taken.identity)
            raise
        hit("submit.after_commit")
        return recorded[0]

    async def _asked_before(self, digest: str, *, key: str, stream: StreamName) -> Recorded | None:
        """What this key brought about already. Raises Conflict when it was something else."""
        holder = await self._names.find("request", key)
        if holder is not None and holder != digest:
            raise Conflict(KEY_USED)
        found = (await self._log.load({stream: 0}))[stream]
        if found and isinstance(found[0].event, RunDeleted):
            raise Conflict(
                "the run that this Idempotency-Key made was deleted; send a new key to make another"
            )
        return found[0] if found else None

    async def _name(self, kind: Kind, wanted: str | None, identity: str) -> str:
        """Take the wanted name, or one made from the id. Raises Conflict."""
        if wanted is not None:
            if not NAME.fullmatch(wanted):
                message = f"{wanted!r} cannot name it: use letters, digits, '.', '_' and '-'"
                raise InvalidConfig(message, issues=(Issue("name", message),))
            if await self._names.take(kind, wanted, identity) != identity:
                raise Conflict(f"there is a {kind} called {wanted}; choose another name")
            return wanted
        for attempt in range(NAMES_TRIED):
            name = invented_name(identity, attempt)
            if await self._names.take(kind, name, identity) == identity:
                return name
        return identity

    async def _today(self) -> Day:
        """The day by the clock that stamps events: a fact of what is appended, so that no prompt depends
        on when it is rendered."""
        return (await self._log.clock_time()).astimezone(UTC).date().isoformat()

    async def _dataset(self, ref: str, key: str) -> DatasetRegistered:
        try:
            return await find_dataset(self._log, ref)
        except NotFound as error:
            close = difflib.get_close_matches(ref, await self._names.all("dataset"), n=1)
            issue = Issue(key, error.message, close[0] if close else None)
            raise InvalidConfig(error.message, issues=(issue,)) from error


def _push(workspace: Workspace, experiment: Experiment, stream: StreamName) -> RepositoryPushed:
    entrypoint = Entrypoint(
        rollout=experiment.rollout or "", path=experiment.entrypoint or "main.py"
    )
    return RepositoryPushed(
        workspace=workspace.id,
        workspace_name=workspace.name,
        commit=CommitSpec(url=workspace.url, branch=experiment.branch, sha=experiment.commit_sha),
        entrypoints=(entrypoint,),
        requester=stream,
    )


def _rows(config: EvalConfig, dataset: DatasetRef) -> tuple[int, ...]:
    """The first `limit` rows; without a limit a tenth of them, drawn from the seed, in row order."""
    if config.evaluation.limit is not None:
        return tuple(range(min(config.evaluation.limit, dataset.num_rows)))
    count = max(1, round(SAMPLED_SHARE * dataset.num_rows))
    drawn = random.Random(config.advanced.seed).sample(range(dataset.num_rows), count)  # noqa: S311 - the same rows for a seed
    return tuple(sorted(drawn))


def _template(
    config: EvalConfig, model: ModelRef, dataset: DatasetRef, *, today: Day
) -> GroupTemplate:
    advanced = config.advanced
    return GroupTemplate(
        dataset=dataset,
        model=model,
        policy=PolicyRef(version=0),
        params=SamplingParams(
            temperature=advanced.temperature,
            max_prompt_tokens=advanced.max_prompt_length,
            max_new_tokens=advanced.max_response_length,
            seed=advanced.seed,
            deterministic=advanced.deterministic,
            date=advanced.date or today,
        ),
        num_samples=config.evaluation.n,
    )
