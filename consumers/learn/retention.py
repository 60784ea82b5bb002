"""Which bytes of earlier policy versions are kept, and which are discarded. Pure.

The bytes of a version are stored for one of three reasons:

1. A checkpoint or a validation needs the version. It is `pinned`, and is kept for good.
2. A learner may have to recover from the version. The newest RECOVERY_KEPT of these are kept.
3. Groups may still be sampled with its weights. These are kept until every such group is settled.
"""

from dataclasses import replace

from consumers.learn.state import PolicyState
from schemas.algorithms import samples_nothing
from schemas.artifact_refs import ArtifactRef
from schemas.events import PolicyUpdated
from schemas.specs import StateRef
from trainer import schedule

RECOVERY_KEPT = 2
"""How many versions that are stored for recovery alone are kept: the newest, and the one before it in
case the newest turns out to be unreadable."""


def retain(state: PolicyState, event: PolicyUpdated) -> PolicyState:
    """Return the state with the versions that are kept once `event` has made the newest one."""
    new = event.state
    recovery, sampler = _kept_for_recovery(state, event.step), _kept_for_samplers(state, event.step)
    is_spare = not event.pinned
    if new.durable and is_spare:
        recovery = (*recovery, new)
    if state.base is not None and _has_same_weights(state.base, new):
        # One blob holds both versions. From now on the newer version decides how long the blob is
        # kept, unless the older one is kept for good.
        is_spare = is_spare and state.base in sampler
        sampler = tuple(version for version in sampler if version != state.base)
    if new.weights and is_spare:
        sampler = (*sampler, new)
    return replace(state, recovery_versions=recovery, sampler_versions=sampler)


def discardable(state: PolicyState, step: int) -> tuple[ArtifactRef, ...]:
    """Return the artifacts of earlier versions that can be discarded while `step` is taken: the state of
    versions that recovery no longer needs, and the weights of versions that no group samples with any
    more."""
    states = [version.state for version in state.recovery_versions[:-RECOVERY_KEPT]]
    weights = [version.weights for version in _unneeded_sampler_versions(state, step)]
    return tuple(ref for ref in (*states, *weights) if ref is not None)


def _kept_for_recovery(state: PolicyState, step: int) -> tuple[StateRef, ...]:
    """Return the recovery versions that are kept once `step` is taken."""
    kept = state.recovery_versions[-RECOVERY_KEPT:]
    return tuple(version for version in kept if not _has_aliases(state, version, step))


def _kept_for_samplers(state: PolicyState, step: int) -> tuple[StateRef, ...]:
    """Return the sampler versions that are kept once `step` is taken."""
    unneeded = _unneeded_sampler_versions(state, step)
    kept = [version for version in state.sampler_versions if version not in unneeded]
    return tuple(version for version in kept if not _has_aliases(state, version, step))


def _unneeded_sampler_versions(state: PolicyState, step: int) -> tuple[StateRef, ...]:
    """Return the sampler versions whose weights are not needed once the batch of `step` is complete.
    Recovery does not need them. No unsettled group needs them either, because the oldest version that an
    unsettled group pins is newer."""
    if state.spec is None or state.base is None:
        return ()
    pinned = state.base.step
    if not samples_nothing(state.spec.config.advanced):
        # A step that tests its samples reads the weights that made them, and may ask for new samples.
        oldest_step = step if state.spec.attests else step + 1
        pinned = schedule.pace_of(state.spec.config).pinned_version(oldest_step)
    stored = [v.step for v in (*state.sampler_versions, state.base) if v.step <= pinned]
    oldest = max(stored, default=0)
    recovery = state.recovery_versions[-RECOVERY_KEPT:]
    return tuple(
        version
        for version in state.sampler_versions
        if version.step < oldest and not any(_has_same_weights(version, kept) for kept in recovery)
    )


def _has_aliases(state: PolicyState, version: StateRef, step: int) -> bool:
    """Whether skipped steps before `step` are aliases of this version. The checkpoint or the validation
    of such a step may use the version, so it is kept for good."""
    return version == state.base and version.step < step - 1


def _has_same_weights(a: StateRef, b: StateRef) -> bool:
    """Whether two versions' weights are the same bytes, and so the same artifact. A step without a
    gradient, or at a learning rate of zero, changes nothing."""
    return a.weights is not None and b.weights is not None and a.weights.uri == b.weights.uri
