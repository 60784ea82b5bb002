"""Finds the samples that the parent of a fork recorded for the same group.

They may be used if the parent sampled its group as the fork would: with the same weights, row, sampling
parameters and workflow. The grader may be another one, because recorded samples are graded again. The
commit may be another one too, because two commits may differ in the grader alone. A user who forks with
another commit and replays samples takes the workflow of both for the same.
"""

from dataclasses import replace

from infra.spine.ports.event_log import EventStore
from schemas.effects import GroupReplayed, ReplayGroup
from schemas.events import GroupGenerated
from schemas.ids import REFUTED, GroupKey, group_stream
from schemas.specs import GroupSpec, GroupTemplate

GRADING = ("snapshot", "commit", "grader", "rewards", "rubrics", "judge", "grader_timeout_s")
"""The fields of a rollout that say how samples are graded, and from which commit."""

OWNED = ("pushed", "submitter", "workspace", "secrets")
"""The fields of a rollout that say whose secrets it gets."""

FREE = ("rollout", "run", "replay_of", "policy", "avoid")
"""The fields of a template that are compared otherwise, or do not matter."""


async def find_recorded(effect: ReplayGroup, log: EventStore) -> GroupReplayed:
    """Return the samples that the parent recorded for a group, or the reason why they cannot be used."""
    spec = effect.spec
    parent = spec.template.replay_of
    found = await _find_group(replace(spec.group_key, owner=str(parent)), log)
    if found is None:
        return GroupReplayed(effect, problem=f"run {parent} has not generated this group")
    problem = difference(spec, found.spec)
    if problem is not None:
        return GroupReplayed(effect, problem=f"run {parent} sampled this group with {problem}")
    return GroupReplayed(effect, parts=found.parts, entries=found.entries)


async def _find_group(key: GroupKey, log: EventStore) -> GroupGenerated | None:
    """Return a group as the log has it, or the newest one that was generated in its place because its
    samples were refuted."""
    found = None
    while True:
        stream = group_stream(key.id)
        history = (await log.load({stream: 0})).get(stream, ())
        if not history:
            return found
        found = next((r.event for r in history if isinstance(r.event, GroupGenerated)), None)
        key = replace(key, replacement=key.replacement + REFUTED)


def difference(spec: GroupSpec, recorded: GroupSpec) -> str | None:
    """Return what differs in how two groups are sampled, or None if nothing does."""
    if (spec.row, spec.attempts) != (recorded.row, recorded.attempts):
        return f"row {recorded.row}"
    ours, theirs = spec.template, recorded.template
    if _weights(ours) != _weights(theirs):
        return "other weights"
    for name in GroupTemplate.model_fields:
        if name not in FREE and getattr(ours, name) != getattr(theirs, name):
            return f"another {name}"
    if ours.rollout is None or theirs.rollout is None:
        return None if ours.rollout == theirs.rollout else "another rollout"
    kept = OWNED if ours.rollout.kind == "server" else (*OWNED, *GRADING)
    for name in type(ours.rollout).model_fields:
        if name not in kept and getattr(ours.rollout, name) != getattr(theirs.rollout, name):
            return f"another {name} of its rollout"
    return None


def _weights(template: GroupTemplate) -> str | None:
    """The hash of the weights that a group samples with. Runs store the same weights at several
    places."""
    weights = template.policy.weights
    return weights.sha256 if weights else None
