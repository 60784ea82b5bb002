"""Pause, resume, stop and retry: commands that are appended to the stream of a run or an evaluation.

A command that would have no meaning is refused. The stream's owner decides at the next step
boundary what a command leads to.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from uuid import UUID

from infra.ports.secrets import SecretStore
from infra.spine.ports.event_log import Cursor, EventStore
from producers.core.history.run_status import TELLING, RunStatus, status_after
from producers.core.lookup import Lookup
from producers.core.validation.given_secrets import SecretsNotSet, check_given_secrets
from schemas.costs.budget import Budget
from schemas.errors import Conflict
from schemas.events import (
    EvaluationCompleted,
    EvaluationImported,
    EvaluationRequested,
    EvaluationRetryRequested,
    EvaluationStarted,
    EvaluationStopRequested,
    Event,
    MessageDeadLettered,
    MessageRedriven,
    RunPauseRequested,
    RunRequested,
    RunResumeRequested,
    RunStopRequested,
)
from schemas.ids import HEADRACE, derive_id
from schemas.secrets.secret_value import SecretValue

COMMANDS: dict[str, Callable[[str], Event]] = {
    "stop": lambda run: RunStopRequested(run=run),
    "pause": lambda run: RunPauseRequested(run=run),
    "resume": lambda run: RunResumeRequested(run=run),
}


class ImportedElsewhere(Conflict):
    """An imported evaluation cannot be repeated here. `config_path` is where its config is on the
    machine that made it, if that was recorded, and `local_name` its name there."""

    def __init__(self, event: EvaluationImported) -> None:
        run = event.local_run
        path = run.provenance.get("config_path")
        self.config_path = path if isinstance(path, str) else None
        self.local_name = run.name
        super().__init__(
            f"evaluation {event.eval_name} was imported; repeat local run {run.name} on the machine "
            "that made it, and import it again with --replace"
        )


NO_SECRETS: Mapping[str, SecretValue] = MappingProxyType({})


class Control:
    """Appends the commands pause, resume, stop and retry."""

    def __init__(self, log: EventStore, lookup: Lookup, secrets: SecretStore) -> None:
        self._log = log
        self._lookup = lookup
        self._secrets = secrets

    async def run(
        self, verb: str, ref: str, *, cause: UUID, raised: Budget | None = None
    ) -> tuple[str, Cursor]:
        """Ask a run to `verb` (stop, pause, resume). `raised` has limits of its budget that are raised
        with `resume`. Returns the run's id and the cursor of the command. A command that is already
        being carried out appends nothing. Raises NotFound, Conflict."""
        request = await self._lookup.run(ref)
        status = await self._status(request.run)
        if verb == "resume" and not status.paused:
            await self._refuse_held(request.run, request.run_name)
        if not _changes_anything(verb, request.run_name, status):
            return request.run, Cursor()
        command = COMMANDS[verb](request.run)
        if verb == "resume":
            _check_budget(request, status, raised)
            command = RunResumeRequested(run=request.run, budget=raised)
        [recorded] = await self._log.append([command], cause=cause)
        return request.run, recorded.cursor

    async def ending(self, run: str) -> str | None:
        """How a run (its id) ended, or that it is stopping; None while neither is so."""
        status = await self._status(run)
        return status.ended or ("stopping" if status.stopping else None)

    async def stop_evaluation(self, ref: str, *, cause: UUID) -> tuple[str, Cursor]:
        """Ask an evaluation to stop. Raises NotFound, Conflict."""
        request = await self._lookup.evaluation(ref)
        types = [EvaluationCompleted.type, EvaluationRetryRequested.type]
        told = await self._log.read(request.evaluation, after=Cursor(), limit=10_000, types=types)
        last = told[-1].event if told else None
        if isinstance(last, EvaluationCompleted):
            raise Conflict(f"evaluation {request.eval_name} is already {last.status}")
        stop = EvaluationStopRequested(evaluation=request.evaluation)
        [recorded] = await self._log.append([stop], cause=cause)
        return request.evaluation, recorded.cursor

    async def retry_evaluation(
        self, ref: str, *, given: Mapping[str, SecretValue] = NO_SECRETS
    ) -> tuple[str, Cursor]:
        """Ask to repeat the attempts of an evaluation that were left out. Returns its id and the cursor
        of the command. Two requests at the same time are one. `given` are values of required secrets
        for the repeated attempts alone, because those of the first ones are gone. Raises NotFound,
        Conflict, InvalidConfig, and SecretsNotSet when a required secret is neither given nor set."""
        request = await self._lookup.evaluation(ref)
        name = request.eval_name
        if isinstance(request, EvaluationImported):
            raise ImportedElsewhere(request)
        if request.run is not None:
            raise Conflict(
                f"evaluation {name} is a validation of a run and cannot be repeated; submit an "
                "evaluation of the checkpoint instead"
            )
        types = [EvaluationStarted.type, EvaluationCompleted.type, EvaluationRetryRequested.type]
        found = await self._log.read(request.evaluation, after=Cursor(), limit=10_000, types=types)
        events = [recorded.event for recorded in found]
        if not any(isinstance(event, EvaluationStarted) for event in events):
            raise Conflict(f"evaluation {name} has not started, so it has nothing to repeat")
        if not isinstance(events[-1], EvaluationCompleted):
            raise Conflict(f"evaluation {name} is running; repeat its failed attempts once it ends")
        await self._give_secrets(request, given)
        number = 1 + sum(isinstance(event, EvaluationRetryRequested) for event in events)
        retry = EvaluationRetryRequested(evaluation=request.evaluation, number=number)
        cause = derive_id(HEADRACE, f"control/retry-evaluation/{request.evaluation}/{number}")
        [recorded] = await self._log.append([retry], cause=cause)
        return request.evaluation, recorded.cursor

    async def _give_secrets(
        self, request: EvaluationRequested, given: Mapping[str, SecretValue]
    ) -> None:
        if request.config is None:
            return
        check_given_secrets(given, request.config)
        wanted = [name for name in request.config.secrets.required if name not in given]
        missing = await self._secrets.missing(
            wanted, workspace=request.workspace, submitter=request.submitter
        )
        if missing:
            raise SecretsNotSet(missing)
        if given:
            await self._secrets.give(request.evaluation, given)

    async def _refuse_held(self, run: str, name: str) -> None:
        """Raises Conflict when the run waits for a dead letter, because only its redelivery lets the
        run continue."""
        types = [MessageDeadLettered.type, MessageRedriven.type]
        held: dict[UUID, str] = {}
        for recorded in await self._log.read(run, after=Cursor(), limit=10_000, types=types):
            match recorded.event:
                case MessageDeadLettered(pauses=True, cause=cause):
                    held[recorded.id] = cause
                case MessageRedriven(letter=letter):
                    held.pop(letter, None)
        for letter, cause in held.items():
            raise Conflict(
                f"run {name} is held by dead letter {letter} ({cause}); once the cause is gone: "
                f"`headrace dlq redrive {letter}`"
            )

    async def _status(self, run: str) -> RunStatus:
        types = [kind.type for kind in TELLING]
        status, after = RunStatus(), Cursor()
        while found := await self._log.read(run, after=after, limit=500, types=types):
            for recorded in found:
                status = status_after(status, recorded.event)
            after = found[-1].cursor
        return status


def _check_budget(request: RunRequested, status: RunStatus, raised: Budget | None) -> None:
    """Raises Conflict when the run would pause again at once, because its budget is exhausted, or when
    the raised limit cannot be counted."""
    limits = raised.limits if raised else {}
    if "max_cost" in limits and request.prices is None:
        raise Conflict(
            f"run {request.run_name} began without prices, so max_cost cannot be counted; raise "
            "max_hours or max_tokens instead"
        )
    found = status.exhausted
    if found is not None and limits.get(found.limit, 0.0) <= found.most:
        raise Conflict(
            f"run {request.run_name} has used {found.used:.4g} of {found.limit} = {found.most:g}, and "
            f"a step takes up to {found.estimate:.4g}; go on with `headrace train resume "
            f"{request.run_name} --raise {found.limit}=AMOUNT`, where AMOUNT is larger"
        )


def _changes_anything(verb: str, name: str, status: RunStatus) -> bool:
    """Whether the command changes anything. Raises Conflict when it is impossible."""
    if status.ended is not None:
        raise Conflict(f"run {name} is already {status.ended}")
    if verb == "stop":
        return not status.stopping
    if status.stopping:
        raise Conflict(f"run {name} is stopping, so it cannot {verb}; wait until it has stopped")
    if verb == "pause":
        if status.paused and not status.resuming:
            raise Conflict(
                f"run {name} is already paused; `headrace train resume {name}` resumes it"
            )
        return not status.pausing
    if status.resuming:
        return status.pausing
    if not status.paused and not status.pausing:
        raise Conflict(f"run {name} is not paused; `headrace train pause {name}` pauses it")
    return True
