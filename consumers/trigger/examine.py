"""Reads the triggers of a pushed commit and finds those that the push matches; submits their runs.

A pushed commit comes from a repository that is not trusted. Its files are read from git without a
checkout, within bounds, and no code of it runs here.
"""

import asyncio
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC

from consumers.trigger.refusals import describe_refusal
from infra.ports.services import Repositories, Submissions
from infra.spine.ports.event_log import EventStore
from schemas.effects import ExaminePush, PushRead, RunSubmitted, SubmitRun
from schemas.errors import NotFound, Refused
from schemas.specs import CommitSpec, Push, TriggerMatch
from schemas.toml.name_templates import fill_template
from schemas.toml.triggers import BRANCH, TAG, TRIGGER_FILE, Trigger, parse_triggers
from schemas.toml.untrusted import MOST_BYTES

SKIP = re.compile(r"\[(skip train|train skip)\]", re.IGNORECASE)
NO_FILE = f"there is no {TRIGGER_FILE} at this commit"
NO_MATCH = "no trigger matches"

MOST_MATCHES = 32
"""The most triggers that one push may match. Their descriptions share one event."""

MOST_MATCH_BYTES = 40_000
"""The most bytes that these descriptions may take."""


@dataclass(frozen=True, slots=True)
class TriggerPorts:
    """The mirrors of repositories, the door for submissions, and the log's clock."""

    repositories: Repositories
    submissions: Submissions
    log: EventStore


async def examine(effect: ExaminePush, ports: TriggerPorts) -> PushRead:
    """Return the triggers that a push matches, or why no run follows. Raises RepositoryAway when the
    repository does not answer."""
    day = (await ports.log.clock_time()).astimezone(UTC).date().isoformat()
    try:
        found = await _find_matches(ports.repositories, effect.push, day=day)
    except Refused as error:
        return PushRead(effect, day, error=describe_refusal(error.message, error.issues))
    if isinstance(found, str):
        return PushRead(effect, day, reason=found)
    return PushRead(effect, day, matches=found)


async def _find_matches(
    repositories: Repositories, push: Push, *, day: str
) -> tuple[TriggerMatch, ...] | str:
    """The triggers that a push matches, or the reason why there are none. Raises Refused when the
    commit or its triggers are wrong."""
    sha = await repositories.fetch(push.workspace, _commit(push))
    content = await repositories.read_file(push.workspace, sha, TRIGGER_FILE, most=MOST_BYTES)
    if content is None:
        return NO_FILE
    if skip := SKIP.search(await repositories.message(push.workspace, sha)):
        return f"the commit's message has {skip[0]}"
    triggers = await asyncio.to_thread(parse_triggers, content)
    wanted = await asyncio.to_thread(
        lambda: [
            (n, trigger) for n, trigger in enumerate(triggers, 1) if trigger.wants_ref(push.ref)
        ]
    )
    if any(trigger.paths for _, trigger in wanted):
        changed = await repositories.changed_paths(push)
        wanted = await asyncio.to_thread(
            lambda: [(n, trigger) for n, trigger in wanted if trigger.wants_paths(changed)]
        )
    labels = labels_of(triggers)
    matches = tuple(
        _match(number, trigger, push, label=labels[number - 1], day=day)
        for number, trigger in wanted
    )
    _check_size(matches)
    return matches or NO_MATCH


def labels_of(triggers: Sequence[Trigger]) -> tuple[str, ...]:
    """The label of each trigger: the name of its config, and `#2` for the second one with this name."""
    stems = [trigger.stem for trigger in triggers]
    counts = [stems[: index + 1].count(stem) for index, stem in enumerate(stems)]
    return tuple(
        stem if count == 1 else f"{stem}#{count}" for stem, count in zip(stems, counts, strict=True)
    )


def _match(number: int, trigger: Trigger, push: Push, *, label: str, day: str) -> TriggerMatch:
    return TriggerMatch(
        trigger=number,
        config=trigger.config,
        label=label,
        run_name=fill_template(trigger.name, _fields(trigger, push, day=day)),
        overrides=json.dumps(trigger.set),
        concurrency=trigger.concurrency,
        max_runs_per_day=trigger.max_runs_per_day,
        require_approval=trigger.require_approval,
    )


def _fields(trigger: Trigger, push: Push, *, day: str) -> Mapping[str, str]:
    """The fields that a template of a run's name may use."""
    is_tag = push.ref.startswith(TAG)
    short = push.ref.removeprefix(TAG if is_tag else BRANCH)
    return {
        "workspace": push.workspace_name,
        "branch": "" if is_tag else short,
        "tag": short if is_tag else "",
        "ref": short,
        "sha": push.after,
        "short_sha": push.after[:7],
        "config": trigger.stem,
        "number": str(push.number),
        "date": day,
    }


def _check_size(matches: tuple[TriggerMatch, ...]) -> None:
    """Raises Refused when the matches do not fit into one event."""
    if len(matches) > MOST_MATCHES:
        raise Refused(
            f"the push matches {len(matches)} triggers, more than {MOST_MATCHES}; narrow their "
            "branches or paths"
        )
    size = sum(len(match.model_dump_json()) for match in matches)
    if size > MOST_MATCH_BYTES:
        raise Refused(
            f"the triggers that the push matches have {size} bytes together, more than "
            f"{MOST_MATCH_BYTES}; shorten their `set`"
        )


async def submit(effect: SubmitRun, ports: TriggerPorts) -> RunSubmitted:
    """Submit the run of a trigger with the TOML of the pushed commit. Raises Refused when there is no
    such TOML, or when the run is refused."""
    push, match = effect.origin.push, effect.origin.match
    repositories = ports.repositories
    sha = await repositories.fetch(push.workspace, _commit(push))
    config = await repositories.read_file(push.workspace, sha, match.config, most=MOST_BYTES)
    if config is None:
        raise NotFound(
            f"trigger {match.trigger} of {TRIGGER_FILE} names {match.config}, which is not in commit "
            f"{push.after[:12]}; commit it, or correct config"
        )
    name = await ports.submissions.submit(effect.origin, config)
    return RunSubmitted(effect, run_name=name)


def _commit(push: Push) -> CommitSpec:
    return CommitSpec(url=push.url, sha=push.after, ref=push.ref)
