"""The state of each vLLM server as this process knows it, and the version that a request asks for."""

from dataclasses import dataclass, field, replace

from trainer.model.chat_template import Chat
from trainer.sampler.completion import Version
from trainer.sampler.vllm.client import ServerCard, ServerGone, VllmServer
from trainer.sampler.vllm.weight_turns import BASE

BACK_S = 1.0
"""Seconds before a server that is away is asked again. The pause doubles each time, up to MOST_BACK
times this one."""
MOST_BACK = 32


@dataclass(frozen=True, slots=True)
class TargetVersion:
    """The version that a request is sampled from. `sha256` is the hash of its weights; None means the
    base model alone. With `is_full` they are all weights, and otherwise those of an adapter.
    `version.base` names the base model."""

    version: Version
    chat: Chat
    sha256: str | None
    is_full: bool = False

    @property
    def base(self) -> "TargetVersion":
        """The base model alone."""
        return replace(self, sha256=None, is_full=False)

    @property
    def weights(self) -> str:
        """The weights of a server that samples from this version."""
        return str(self.sha256) if self.is_full else BASE

    @property
    def base_key(self) -> str:
        return self.version.base

    @property
    def name(self) -> str:
        if self.is_full:
            return f"headrace-{self.sha256}-full"
        scaling = self.version.scaling
        kind = "-rs" if scaling.is_rank_stabilized else ""
        return f"headrace-{self.sha256}-a{scaling.alpha:g}{kind}"


@dataclass(slots=True, eq=False)
class Replica:
    """The state of one server, as this process knows it. `card` is None while the server is away.
    `noise` maps a base model to the server's noise (`canary.py`). `holds` are the names of the adapters
    that passed the canary there. `fenced` says why the server is not used any more.

    The weights of a server that `takes_weights` can be replaced. `weights` are those that passed the
    canary there, under the label `label`; None after they were replaced."""

    server: VllmServer
    card: ServerCard | None = None
    noise: dict[str, float] = field(default_factory=dict)
    holds: set[str] = field(default_factory=set)
    takes_weights: bool = False
    weights: str | None = None
    label: str | None = None
    fenced: str | None = None
    away: Exception | None = None
    ask_again_at: float = 0.0
    silent: int = 0

    def mark_lost(self, error: Exception, *, now: float) -> None:
        """Record that the server broke off a request. Its adapters may be gone, so `noise` and `holds`
        are replaced by empty ones, and a task that is still loading a version writes into the old ones.
        Requests that break off together count once."""
        if self.card is None and now < self.ask_again_at:
            return
        self.card, self.away = None, error
        self.ask_again_at = now + BACK_S * min(MOST_BACK, 2**self.silent)
        self.silent += 1
        self.noise, self.holds = {}, set()
        self.weights = self.label = None

    def model(self, target: TargetVersion) -> str:
        """The model name that selects the version in a request to this server. Raises ServerGone when
        it is away."""
        if self.card is None:
            raise ServerGone(f"the sampler {self.server.url} broke off")
        return self.card.base if target.sha256 is None or target.is_full else target.name

    def has(self, target: TargetVersion) -> bool:
        if self.takes_weights and self.weights != target.weights:
            return False
        if target.is_full:
            return self.takes_weights
        known = target.base_key in self.noise
        return known and (target.sha256 is None or target.name in self.holds)
