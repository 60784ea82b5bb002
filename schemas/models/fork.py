"""Where a run begins that is a fork of another run, and with which versions of its policy."""

from pydantic import Field

from schemas.artifact_refs import ArtifactRef
from schemas.sampling import Value


class ForkPoint(Value):
    """Right after step `step` of the run `parent` was settled. `position` is the version of the parent's
    run stream then, and `policy_position` that of its policy stream. `replay_samples` says that groups
    which sample with weights of the parent take the samples that the parent recorded."""

    parent: str
    step: int = Field(ge=0)
    position: int = Field(ge=1)
    policy_position: int = Field(ge=1)
    replay_samples: bool = False


class EarlierWeights(Value):
    """The weights after an earlier step."""

    step: int = Field(ge=0)
    weights: ArtifactRef


class ForkedPolicy(Value):
    """The policy that a fork begins with. `taken` optimizer steps led to it. `weights` are those of
    earlier versions of the parent that groups of the fork sample with."""

    point: ForkPoint
    taken: int = Field(ge=0)
    weights: tuple[EarlierWeights, ...] = ()
