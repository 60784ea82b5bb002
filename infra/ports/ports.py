"""`Ports`: everything that the `perform` of a consumer may use.

The ports themselves are protocols in the files of this folder: `event_log`, `effects` and `bus` to the
database and the broker, `services` to what lies outside of it, `clock`. Every adapter of a port passes
the same contract suite (tests/contracts). The engines (Sampler, Learner) are protocols of `schemas`,
because `trainer` implements them.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, overload

from infra.ports.clock import Clock
from infra.ports.event_log import EventStore
from infra.ports.hub import ModelHub
from infra.ports.judges import JudgementRecord, Judges
from infra.ports.secrets import SecretStore
from infra.ports.services import (
    Artifacts,
    Blobs,
    Datasets,
    Forges,
    Gateway,
    Repositories,
    Submissions,
    UserCode,
)
from schemas.learner import Learner
from schemas.sampling import Sampler

if TYPE_CHECKING:
    from infra.settings.settings import Settings


@dataclass(frozen=True, slots=True)
class Ports:
    """The ports that `perform` may use. A port that only some lanes need is None in a process without
    such a lane. `require` returns these ports."""

    log: EventStore
    blobs: Blobs
    artifacts: Artifacts
    datasets: Datasets
    clock: Clock
    settings: "Settings"
    repositories: Repositories | None = None
    sampler: Sampler | None = None
    learner: Learner | None = None
    user: UserCode | None = None
    gateway: Gateway | None = None
    forges: Forges | None = None
    submissions: Submissions | None = None
    secrets: SecretStore | None = None
    judges: Judges | None = None
    judgements: JudgementRecord | None = None
    hub: ModelHub | None = None

    @overload
    def require(self, port: Literal["repositories"]) -> Repositories: ...
    @overload
    def require(self, port: Literal["sampler"]) -> Sampler: ...
    @overload
    def require(self, port: Literal["learner"]) -> Learner: ...
    @overload
    def require(self, port: Literal["user"]) -> UserCode: ...
    @overload
    def require(self, port: Literal["gateway"]) -> Gateway: ...
    @overload
    def require(self, port: Literal["forges"]) -> Forges: ...
    @overload
    def require(self, port: Literal["submissions"]) -> Submissions: ...
    @overload
    def require(self, port: Literal["secrets"]) -> SecretStore: ...
    @overload
    def require(self, port: Literal["judges"]) -> Judges: ...
    @overload
    def require(self, port: Literal["judgements"]) -> JudgementRecord: ...
    @overload
    def require(self, port: Literal["hub"]) -> ModelHub: ...
    def require(self, port: str) -> object:
        """Return a port that the effect's lane needs. Raises RuntimeError in a process that does not
        have it, because such a process must not claim the effect."""
        found: object = getattr(self, port)
        if found is None:
            raise RuntimeError(
                f"this process has no {port}: it should not have claimed the effect; check its lanes"
            )
        return found
