"""Submitting: a TOML is validated, what it uses is pinned, and the run or evaluation is appended once.

Submit fixes what the run uses: the dataset's content and the checkpoint's files. The commit is fixed
later, by the sync consumer on the workspace's stream. The client's idempotency key gives the run its id
and its events their cause. The same request under the same key therefore makes one run, and another
request under that key is refused.

A push submits through the same door (`producers/core/run_submissions.py`). Its request names its origin,
and its run uses the pushed commit.
"""

import hashlib
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC
from types import MappingProxyType

from infra import telemetry
from infra.failpoints import hit
from infra.identity.quotas import Quotas
from infra.names import Kind, Names
from infra.ports.actor import own_workspace, visible_workspaces
from infra.ports.secrets import SecretStore
from infra.settings.model_directories import OWN_MACHINE, ModelDirectories
from infra.settings.network_policy import NO_NETWORK, NetworkPolicy
from infra.settings.vllm import Tuning
from infra.spine.ports.event_log import EventStore, Recorded
from producers.core.datasets.evaluated_rows import evaluated_rows
from producers.core.lookup import Lookup
from producers.core.models.provider_model import owned_model
from producers.core.models.vocabularies import Vocabularies
from producers.core.run_names import invented_name, require_name, used_name_error
from producers.core.validation.budgets import budget_warnings, check_budget
from producers.core.validation.given_secrets import check_given_secrets
from producers.core.validation.references import ReferenceFinder, Requester
from producers.core.validation.rollout_issues import entrypoint_of
from producers.core.validation.validate import Valid, require_valid
from producers.core.workspaces import Workspace, Workspaces
from schemas.config import EvalConfig, Experiment, RunConfig
from schemas.costs.prices import Prices
from schemas.errors import Conflict, InvalidConfig, Issue, Refused
from schemas.events import CommitRequested, EvaluationRequested, Event, RunDeleted, RunRequested
from schemas.events.decider_version import DECIDER_VERSION
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
from schemas.limits import longest_answer
from schemas.models.fork import ForkPoint
from schemas.sampling import Day, PolicyRef, SamplingParams
from schemas.secrets.secret_value import SecretValue
from schemas.specs import CommitSpec, GroupTemplate, PushOrigin
from schemas.toml.parser import parse_eval, parse_run

LONGEST_NAME = 100
NO_PRICES: Mapping[str, float] = MappingProxyType({})
NAMES_TRIED = 100
KEY_USED = (
    "this Idempotency-Key was used for another request; send a new key with a new request, and the "
    "same key only to repeat a request"
)


@dataclass(frozen=True, slots=True)
class ForkOrigin:
    """The run that a request forks, and where. The child is named after its parent, with `number` or the
    next free one."""

    parent: RunRequested
    point: ForkPoint
    number: int = 1


@dataclass(frozen=True, slots=True)
class SubmitRequest:
    """A request to run or evaluate a TOML. `start`, if set, replaces the TOML's
    `experiment.model_path`. `origin` is the push that submits, or None. `submitter` is the person
    whose personal secrets the run may use, or None. `creator` is the owner of the API key, for
    lists. `given` are values of required secrets that are for this run alone. `fork` says that the run
    continues another one."""

    config: Mapping[str, object]
    workspace: str | None = None
    name: str | None = None
    start: str | None = None
    origin: PushOrigin | None = None
    submitter: str | None = None
    creator: str | None = None
    given: Mapping[str, SecretValue] = field(default_factory=dict, repr=False)
    fork: ForkOrigin | None = None

    @property
    def requester(self) -> Requester:
        submitter = None if self.origin else self.submitter
        return Requester(self.workspace, submitter, frozenset(self.given))

    def digest(self, kind: str) -> str:
        """A hash of the request: two requests are the same when their digests are equal. It is stored,
        so of the secrets that are given it has the names alone."""
        content: list[object] = [kind, self.config, self.workspace, self.name, self.start]
        if self.origin is not None:
            content.append(self.origin.key)
        if self.given:
            content.append(sorted(self.given))
        if self.fork is not None:
            content.append(self.fork.point.model_dump())
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class ReservedName:
    """A name that is held for what is about to be appended."""

    kind: Kind
    name: str
    identity: str


@dataclass(frozen=True, slots=True)
class Resolved:
    """A valid request for a run, with everything that its names refer to. A dry run shows this."""

    config: RunConfig
    valid: Valid


class Submitter:
    """Submits runs and evaluations."""

    def __init__(
        self,
        log: EventStore,
        names: Names,
        *,
        lookup: Lookup,
        workspaces: Workspaces,
        secrets: SecretStore,
        network: NetworkPolicy = NO_NETWORK,
        directories: ModelDirectories = OWN_MACHINE,
        quotas: Quotas | None = None,
        vllm: Tuning | None = None,
        vocabularies: Vocabularies | None = None,
        prices: Mapping[str, float] = NO_PRICES,
    ) -> None:
        self._log = log
        self._quotas = quotas
        self._names = names
        self._secrets = secrets
        self._prices = Prices.of(prices) if prices else None
        self._references = ReferenceFinder(
            log,
            names,
            lookup=lookup,
            workspaces=workspaces,
            network=network,
            secrets=secrets,
            directories=directories,
            vllm=vllm,
            vocabularies=vocabularies,
        )

    async def resolve_run(self, request: SubmitRequest) -> Resolved:
        """Validate a request and look up everything that it names. Appends nothing. Raises InvalidConfig
        with all issues, and NotFound when there is no such workspace."""
        config = parse_run(request.config)
        check_given_secrets(request.given, config)
        if request.start is not None:
            experiment = config.experiment.model_copy(update={"model_path": request.start})
            config = config.model_copy(update={"experiment": experiment})
        config = _pin_commit(config, request.origin)
        check_budget(config, self._prices)
        references = await self._references.find_references(config, request.requester)
        return Resolved(config, require_valid(config, references))

    async def try_run(self, request: SubmitRequest) -> Resolved:
        """Like resolve_run, for a dry run: its name is checked too, and not reserved. Raises Conflict
        when it is in use."""
        resolved = await self.resolve_run(request)
        if request.name is not None:
            require_name("run", request.name)
            scope = _scope(resolved.valid)
            if await self._names.find_id("run", request.name, scope=scope) is not None:
                raise used_name_error("run", request.name)
        return resolved

    async def submit_run(self, request: SubmitRequest, *, key: str) -> Recorded:
        """Append RunRequested, and with it the request that fetches its commit, unless the run waits for
        approval. Returns the request as recorded. Raises InvalidConfig, NotFound, Conflict."""
        run = RunId(short_id("run", key))
        digest = request.digest("run")
        if recorded := await self._find_recorded(digest, key=key, stream=run_stream(run)):
            return recorded
        resolved = await self.resolve_run(request)
        valid = resolved.valid
        requested = RunRequested(
            run=run,
            run_name=await self._reserve_run_name(request, run, scope=_scope(valid)),
            config=resolved.config,
            model=valid.model,
            dataset=valid.dataset.dataset,
            validation=valid.validation.dataset if valid.validation else None,
            workspace=valid.workspace.id if valid.workspace else None,
            date=await self._today(),
            warnings=(*valid.warnings, *budget_warnings(resolved.config)),
            origin=request.origin,
            submitter=request.requester.submitter,
            creator=request.creator,
            belongs_to=_owner(valid),
            reward_models=valid.reward_models,
            decider=DECIDER_VERSION,
            teacher=valid.teacher,
            prices=self._prices,
        )
        if request.fork is not None:
            requested = _continue_parent(requested, request.fork)
        events: list[Event] = [requested]
        if valid.workspace is not None and not requested.needs_approval:
            events.append(commit_request(requested, valid.workspace))
        reserved = ReservedName("run", requested.run_name, run)
        return await self._append(events, reserved, request.given, key=key, digest=digest)

    async def submit_eval(self, request: SubmitRequest, *, key: str) -> Recorded:
        """Append EvaluationRequested and the request that fetches its commit. Raises InvalidConfig,
        NotFound, Conflict."""
        evaluation = EvalId(short_id("evaluation", key))
        stream = eval_stream(evaluation)
        digest = request.digest("evaluation")
        if recorded := await self._find_recorded(digest, key=key, stream=stream):
            return recorded
        config = parse_eval(request.config)
        check_given_secrets(request.given, config)
        valid = require_valid(
            config, await self._references.find_references(config, request.requester)
        )
        if valid.workspace is None:
            raise AssertionError("an evaluation without a rollout is refused by config_issues")
        submitter = request.requester.submitter
        template = _template(config, valid, today=await self._today())
        model = owned_model(
            valid.model, owner=evaluation, workspace=valid.workspace.id, submitter=submitter
        )
        requested = EvaluationRequested(
            evaluation=evaluation,
            eval_name=await self._reserve_name(
                "evaluation", request.name, evaluation, scope=valid.workspace.id
            ),
            template=template.model_copy(update={"model": model}),
            rows=evaluated_rows(config, valid.dataset.dataset.num_rows),
            batch_size=config.evaluation.batch_size,
            pass_threshold=config.evaluation.pass_threshold,
            config=config,
            workspace=valid.workspace.id,
            warnings=valid.warnings,
            submitter=submitter,
            decider=DECIDER_VERSION,
        )
        fetching = _request_commit(valid.workspace, config.experiment, stream)
        reserved = ReservedName("evaluation", requested.eval_name, evaluation)
        events = [requested, fetching]
        return await self._append(events, reserved, request.given, key=key, digest=digest)

    async def _append(
        self,
        events: Sequence[Event],
        reserved: ReservedName,
        given: Mapping[str, SecretValue],
        *,
        key: str,
        digest: str,
    ) -> Recorded:
        """Bind the key to this request and store the secrets that are given for it alone, so that the
        run finds them. Then append, if the quotas allow it. Raises Conflict when the
        key was bound to another request meanwhile or its evaluation was deleted, QuotaExceeded, and
        Refused when an event is too large. All release the name."""
        hit("submit.before_commit")
        try:
            if await self._names.take("request", key, digest) != digest:
                raise Conflict(KEY_USED)
            if given:
                await self._secrets.give(reserved.identity, given)
                hit("submit.secrets_given")
            async with self._count_run(events[0]):
                recorded = await self._log.append(
                    events,
                    cause=derive_id(HEADRACE, f"submit/{reserved.kind}/{key}"),
                    traceparent=telemetry.traceparent(),
                )
            if recorded[0].stream != events[0].stream:
                # Only its request was appended earlier: the evaluation itself was deleted.
                raise _deletion_error("evaluation", key)
        except Refused:
            await self._names.release(reserved.kind, reserved.name, reserved.identity)
            if given:
                await self._secrets.take_back(reserved.identity)
            raise
        hit("submit.after_commit")
        return recorded[0]

    @asynccontextmanager
    async def _count_run(self, requested: Event) -> AsyncIterator[None]:
        """Count a run or evaluation that is appended inside the block. Raises QuotaExceeded."""
        if self._quotas is None:
            yield
            return
        workspace = getattr(requested, "workspace", None) or getattr(requested, "belongs_to", None)
        await self._quotas.admit_run(requested.run_id, requested.stream, workspace=workspace)
        try:
            yield
        except Refused:
            await self._quotas.withdraw_run(requested.run_id)
            raise

    async def _find_recorded(self, digest: str, *, key: str, stream: StreamName) -> Recorded | None:
        """The event that an earlier request with this key appended. Raises Conflict when that request
        was another one, or when its run was deleted."""
        holder = await self._names.find_id("request", key)
        if holder is not None and holder != digest:
            raise Conflict(KEY_USED)
        found = (await self._log.load({stream: 0}))[stream]
        if found and isinstance(found[0].event, RunDeleted):
            raise _deletion_error("run", key)
        return found[0] if found else None

    async def _reserve_run_name(self, request: SubmitRequest, run: RunId, *, scope: str) -> str:
        """Reserve a name for a run. Nobody can choose another name for the run of a push, so a name
        that is in use gets a suffix from the run's id."""
        if request.fork is not None and request.name is None:
            return await self._reserve_fork_name(request.fork, run, scope=scope)
        try:
            return await self._reserve_name("run", request.name, run, scope=scope)
        except Conflict:
            if request.origin is None or request.name is None:
                raise
        suffix = f"-{run[:6]}"
        return await self._reserve_name(
            "run", request.name[: LONGEST_NAME - len(suffix)] + suffix, run, scope=scope
        )

    async def _reserve_fork_name(self, fork: ForkOrigin, run: RunId, *, scope: str) -> str:
        """Reserve the next free name of the form PARENT-fork-N; if many are in use, one that the run's
        id makes unique."""
        for number in (*range(fork.number, fork.number + NAMES_TRIED), run[:8]):
            suffix = f"-fork-{number}"
            name = fork.parent.run_name[: LONGEST_NAME - len(suffix)] + suffix
            if await self._names.take("run", name, run, scope=scope) == run:
                return name
        return await self._reserve_name("run", None, run, scope=scope)

    async def _reserve_name(
        self, kind: Kind, wanted: str | None, identity: str, *, scope: str
    ) -> str:
        """Reserve the wanted name in the workspace `scope`, or without one a name derived from the id.
        Returns it. Raises InvalidConfig when the name is not allowed, and Conflict when it is in use."""
        if wanted is not None:
            require_name(kind, wanted)
            if await self._names.take(kind, wanted, identity, scope=scope) != identity:
                raise used_name_error(kind, wanted)
            return wanted
        for attempt in range(NAMES_TRIED):
            name = invented_name(identity, attempt)
            if await self._names.take(kind, name, identity, scope=scope) == identity:
                return name
        return identity

    async def _today(self) -> Day:
        """The day by the clock that stamps events. It is recorded with the request, so that a prompt
        does not depend on when it is rendered."""
        return (await self._log.clock_time()).astimezone(UTC).date().isoformat()


def _continue_parent(requested: RunRequested, fork: ForkOrigin) -> RunRequested:
    """Return the request of a fork, with what its parent pinned when it was submitted: the contents of
    its dataset and its model, the day, and the models that its keys name, unless the keys changed."""
    parent = fork.parent
    ours, theirs = requested.config.advanced, parent.config.advanced
    pinned: dict[str, object] = {
        "model": parent.model,
        "dataset": parent.dataset,
        "date": parent.date,
        "teacher": parent.teacher,
        "fork": fork.point,
    }
    if ours.validation_dataset == theirs.validation_dataset:
        pinned["validation"] = parent.validation
    if ours.reward_models == theirs.reward_models:
        pinned["reward_models"] = parent.reward_models
    return requested.model_copy(update=pinned)


def _owner(valid: Valid) -> str | None:
    """The workspace (id) that a run without a rollout belongs to: the one that the request names, or the
    only one that the sender may see. Raises InvalidConfig for an API key of several workspaces that
    names none."""
    named = valid.owner.id if valid.owner is not None else None
    owner = named or own_workspace()
    if owner is None and valid.workspace is None and visible_workspaces() is not None:
        message = (
            "is not given, and your API key is for an organisation with several or none; name the "
            "workspace that the run belongs to (--workspace)"
        )
        raise InvalidConfig(f"workspace {message}", issues=(Issue("workspace", message),))
    return owner


def _scope(valid: Valid) -> str:
    """Where the name of a run is unique: in the workspace of its rollout, or else in the one it belongs
    to, and for a run of none among such runs."""
    return (valid.workspace.id if valid.workspace is not None else _owner(valid)) or ""


def commit_request(requested: RunRequested, workspace: Workspace) -> CommitRequested:
    """The event that makes sync fetch the commit of a run."""
    ref = requested.origin.push.ref if requested.origin else None
    return _request_commit(workspace, requested.config.experiment, requested.stream, ref=ref)


def _pin_commit(config: RunConfig, origin: PushOrigin | None) -> RunConfig:
    """Return a config that runs the pushed commit, whatever branch or commit the TOML names."""
    if origin is None or config.experiment.rollout is None:
        return config
    pinned = {"commit_sha": origin.push.after, "branch": None}
    experiment = config.experiment.model_copy(update=pinned)
    return config.model_copy(update={"experiment": experiment})


def _deletion_error(kind: str, key: str) -> Conflict:
    return Conflict(
        f"the {kind} of Idempotency-Key {key} was deleted; send a new key to make another {kind}"
    )


def _request_commit(
    workspace: Workspace, experiment: Experiment, stream: StreamName, *, ref: str | None = None
) -> CommitRequested:
    return CommitRequested(
        workspace=workspace.id,
        workspace_name=workspace.name,
        commit=CommitSpec(
            url=workspace.url, branch=experiment.branch, sha=experiment.commit_sha, ref=ref
        ),
        entrypoints=(entrypoint_of(experiment),),
        requester=stream,
    )


def _template(config: EvalConfig, valid: Valid, *, today: Day) -> GroupTemplate:
    advanced = config.advanced
    return GroupTemplate(
        dataset=valid.dataset.dataset,
        model=valid.model,
        policy=PolicyRef(version=0),
        params=SamplingParams(
            temperature=advanced.temperature,
            max_prompt_tokens=advanced.max_prompt_length,
            max_new_tokens=longest_answer(advanced),
            seed=advanced.seed,
            deterministic=advanced.deterministic,
            date=advanced.date or today,
            allows_wide_native=not advanced.deterministic,
        ),
        num_samples=config.evaluation.n,
    )
