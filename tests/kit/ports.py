"""All ports of a test at once, for every consumer."""

from dataclasses import dataclass, fields
from typing import Any

from consumers.process.ports import ports_from
from infra.spine.ports.artifacts import Artifacts
from infra.spine.runtime.consumer import AnyConsumer


@dataclass(frozen=True)
class AllPorts:
    """The ports by the names that consumers use; None for one that no effect of the test needs. A test
    may give it to the `perform` of any consumer. `build` makes those of one consumer, as the runtime
    wants them."""

    log: Any
    blobs: Any
    artifacts: Any
    datasets: Any
    clock: Any
    settings: Any
    repositories: Any = None
    sampler: Any = None
    learner: Any = None
    user: Any = None
    gateway: Any = None
    forges: Any = None
    submissions: Any = None
    secrets: Any = None
    judges: Any = None
    judgements: Any = None
    teachers: Any = None
    hub: Any = None
    scorer: Any = None

    def build(self, consumer: AnyConsumer, artifacts: Artifacts) -> object:
        available = {field.name: getattr(self, field.name) for field in fields(self)}
        return ports_from(available)(consumer, artifacts)
