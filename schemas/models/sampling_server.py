"""The server that sampled: which one it was, and how closely it agrees with the learner."""

from pydantic import BaseModel, ConfigDict, Field


class SamplingServer(BaseModel):
    """A server of the fleet that made a turn. `noise` is the mean absolute difference between its
    logprobs and the learner's, in nats, as the canary measured it with the base model at load."""

    model_config = ConfigDict(frozen=True, extra="ignore")
    url: str
    noise: float = Field(ge=0)


BUILT_IN = "built-in"
"""The name of the sampler inside of this platform, which has no address."""


def server_of(servers: tuple[SamplingServer, ...]) -> str:
    """The address of the server that made a sample; of the last one, if several did."""
    return servers[-1].url if servers else BUILT_IN
