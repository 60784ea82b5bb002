"""The costs of a run whose history was moved into an archive."""

from datetime import datetime

from pydantic import BaseModel, ConfigDict


class ArchivedCost(BaseModel):
    """The sums of one type of effect on one kind of device; both are None for what no effect took.
    `last_at` is the time of the last of them."""

    model_config = ConfigDict(frozen=True)
    effect: str | None
    device: str | None
    device_s: float
    wasted_s: float
    sampled: int
    trained: int
    discarded: int
    calls_usd: float
    calls_tokens: int
    last_at: datetime
