"""The canary: checks that a server samples from the policy that the learner has.

When an adapter or new weights do not reach the sampler, training does not learn and no error appears. So
after each load the server samples a completion of a fixed prompt, and the logprobs that it reports must
agree with those that the learner computes for the same tokens. The temperature is not 1, because
otherwise a server that reports raw logprobs would pass.

How closely the two can agree depends on the server's number format and kernels. The server's base model
without any adapter is the measure. The difference from the learner there is the server's *noise*.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

from schemas.sampling import Message, Turn, sequences_of
from trainer.device_thread import Device
from trainer.forward.packing import Example, pack
from trainer.model.chat_template import Chat
from trainer.model.lora_names import Scaling, Tensors
from trainer.objective.batch import with_masks
from trainer.policy import LoadedModel, Policy
from trainer.sampler.vllm.client import CompletionRequest, SampledTokens, ServerGone
from trainer.sampler.vllm.server_state import Replica, TargetVersion

PROMPT = (Message(role="user", content="What is 47 + 38? Say how you know, and count to 10."),)
NUM_TOKENS = 32
TEMPERATURE = 0.7
SEED = 20_231

EXACT = 1e-4
"""Two models count as the same if the mean absolute difference of their logprobs is at most this."""
BASE_SPREAD = 0.1
"""The largest noise that is accepted, as a fraction of the spread of the logprobs. The noise of rounding
to bfloat16 is far below it, and the difference to another model's weights is far above it."""
LEAST = 1e-5
FACTOR = 10.0
"""With a trained version, the distance may be at most `LEAST`, or `FACTOR` times the noise if that is
more."""


@dataclass(frozen=True, slots=True)
class CanaryResult:
    """`distance` is the mean absolute difference between the logprobs that the server reported and those
    that the learner computed. `problem` says why the check failed; None if it passed."""

    distance: float
    problem: str | None = None


def probe_request(chat: Chat) -> CompletionRequest:
    """The request that the canary always sends."""
    return CompletionRequest(
        prompt_ids=chat.encode(chat.text(PROMPT, reply_next=True)),
        max_new_tokens=NUM_TOKENS,
        temperature=TEMPERATURE,
        seed=SEED,
        stop_ids=None,
    )


def as_turn(request: CompletionRequest, answer: SampledTokens) -> Turn:
    """The completion of the canary, as the learner reads it."""
    return Turn(
        prompt_ids=tuple(request.prompt_ids),
        completion_ids=answer.ids,
        logprobs=answer.logprobs,
        text="",
        finish_reason="length",
    )


@torch.no_grad()
def compute_learner_logprobs(
    loaded: LoadedModel, trained: Tensors, scaling: Scaling, turn: Turn, temperature: float
) -> list[float]:
    """The learner's logprobs for the tokens that the server sampled, one per token, under the masks of a
    forced answer. Must run on the device's thread."""
    policy = Policy(loaded, dict(trained), scaling)
    device = loaded.base.model.device
    examples = with_masks([Example(0, sequence) for sequence in sequences_of((turn,))], policy)
    (micro,) = pack(examples, micro_batch_tokens=1, share=False, device=device)
    return [float(x) for x in policy.logprobs(micro, temperature=temperature)[0]]


class Canary:
    """Samples the fixed prompt on a server, and compares with the learner. `device` computes the
    learner's logprobs. The methods raise the errors of `VllmServer.complete`."""

    def __init__(self, device: Device) -> None:
        self._device = device

    async def measure_noise(self, replica: Replica, target: TargetVersion) -> CanaryResult:
        """Measure the noise with the base model, or with all weights that the server has."""
        request, answer = await self._probe(replica, target)
        trained = target.version.trained if target.is_full else {}
        learner = await self._learner_logprobs(target, request, answer, trained=trained)
        return judge_base(answer.logprobs, learner)

    async def check_version(self, replica: Replica, target: TargetVersion) -> CanaryResult:
        """Check a trained version. The noise of the server must be known; it is not once the server
        broke off, which raises ServerGone."""
        noise = replica.noise.get(target.base_key)
        if noise is None:
            raise ServerGone(f"the sampler {replica.server.url} broke off")
        request, answer = await self._probe(replica, target)
        without = await self._learner_logprobs(target, request, answer, trained={})
        trained = target.version.trained
        learner = await self._learner_logprobs(target, request, answer, trained=trained)
        return judge_version(answer.logprobs, learner, without, noise=noise)

    async def _probe(
        self, replica: Replica, target: TargetVersion
    ) -> tuple[CompletionRequest, SampledTokens]:
        request = probe_request(target.chat)
        return request, await replica.server.complete(replica.model(target), request)

    async def _learner_logprobs(
        self,
        target: TargetVersion,
        request: CompletionRequest,
        answer: SampledTokens,
        *,
        trained: Tensors,
    ) -> list[float]:
        version, turn = target.version, as_turn(request, answer)
        given = (version.loaded, trained, version.scaling, turn, request.temperature)
        return await self._device.run(compute_learner_logprobs, *given)


def judge_base(reported: Sequence[float], learner: Sequence[float]) -> CanaryResult:
    """Check that the server has the run's base model, and measure its noise."""
    distance, spread = _distance(reported, learner), _spread(learner)
    if distance <= max(EXACT, BASE_SPREAD * spread):
        return CanaryResult(distance)
    return CanaryResult(
        distance,
        f"its logprobs differ from the run's base model by {distance:.2g} on average, though no adapter "
        "is loaded. It serves another model, or it was started without "
        "--logprobs-mode processed_logprobs",
    )


def judge_version(
    reported: Sequence[float],
    learner: Sequence[float],
    without: Sequence[float],
    *,
    noise: float,
) -> CanaryResult:
    """Check that the server samples from a trained version, an adapter or all weights. `without` are the
    logprobs of the base model alone for the same tokens. If training changed the policy by clearly more
    than the noise (4 times), the server must also be closer to the version than to the base model."""
    distance, missing = _distance(reported, learner), _distance(reported, without)
    if math.isnan(distance):
        return CanaryResult(distance, "its logprobs, or the learner's, are not numbers")
    if distance > max(LEAST, FACTOR * noise):
        return CanaryResult(
            distance, f"its logprobs differ from the learner's by {distance:.2g} on average"
        )
    if _distance(learner, without) > 4 * noise and missing < distance:
        return CanaryResult(
            distance, "it samples from the base model, as if nothing had been trained"
        )
    return CanaryResult(distance)


def _distance(a: Sequence[float], b: Sequence[float]) -> float:
    """The mean absolute difference."""
    return math.fsum(abs(x - y) for x, y in zip(a, b, strict=True)) / len(a)


def _spread(values: Sequence[float]) -> float:
    """The mean absolute difference of neighbouring values, a measure of how much the logprobs vary."""
    return math.fsum(abs(x - y) for x, y in pairwise(values)) / max(1, len(values) - 1)
