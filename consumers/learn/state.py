"""The state of a policy stream: the newest version, and which earlier versions are still stored."""

from dataclasses import dataclass

from schemas.specs import StateRef, TrainSpec


@dataclass(frozen=True, slots=True)
class PolicyState:
    """The newest version (`base`), how many steps led to it (`taken`), and what may be discarded.

    Two lists hold the versions that no checkpoint or validation needs, oldest first. The versions in
    `recovery_versions` are stored whole for recovery. Those in `sampler_versions` have their weights
    stored, for samplers or recovery. `failed` says that the learner gave up. `refused` counts the
    batches of the next step in which samples were refuted.
    """

    spec: TrainSpec | None = None
    base: StateRef | None = None
    taken: int = 0
    interval: int = 1
    recovery_versions: tuple[StateRef, ...] = ()
    sampler_versions: tuple[StateRef, ...] = ()
    failed: bool = False
    refused: int = 0
