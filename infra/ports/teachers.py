"""The port to teachers on servers: models that say how likely they find tokens which others sampled."""

from dataclasses import dataclass
from typing import Protocol

from schemas.sampling import ProviderRef, Sequence
from schemas.secrets.secret_value import SecretValue


@dataclass(frozen=True, slots=True)
class Reading:
    """How a teacher read a training row: its `logprobs`, in the places of the row's own (0.0 where the
    policy did not choose the token), and its text for each token behind the first, by id."""

    logprobs: tuple[float, ...]
    texts: dict[int, str]


class Teachers(Protocol):
    """Teachers, wherever they run."""

    async def read(
        self, teacher: ProviderRef, row: Sequence, *, key: SecretValue | None, what: str
    ) -> Reading:
        """Have a teacher read a row. All logprobs are finite and not above 0. Raises Refused when it
        refuses the row for good (also when its key or model is wrong), TeacherAway when it cannot be
        reached or asks to wait for too long, and TransientError when its answer cannot be used or it
        fails otherwise. Errors name the row by `what`, and none shows the key."""
        ...
