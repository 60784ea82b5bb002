"""The likeliest tokens in the place of each token of an answer, for clients that ask for them.

They come from one more pass over the whole answer, the one that the learner makes. So they cost nothing
where nobody asks, and what is drawn does not depend on whether somebody does.
"""

import torch

from schemas.sampling import LikelyToken, SampleRequest, Turn, sequences_of
from trainer.device_thread import Device
from trainer.forward.allowed_tokens import FORBIDDEN
from trainer.forward.packing import Example, pack
from trainer.objective.batch import with_masks
from trainer.policy import Policy
from trainer.sampler.completion import Completion


async def with_top_logprobs(
    turn: Turn, row: Completion, request: SampleRequest, device: Device
) -> Turn:
    """The turn with the likeliest tokens, if the request asked for them. `row` is its completion."""
    if request.likeliest is None:
        return turn
    found = await device.run(_find_top_logprobs, turn, row, request.likeliest)
    return turn.model_copy(update={"likeliest": found})


@torch.no_grad()
def _find_top_logprobs(
    turn: Turn, row: Completion, most: int
) -> tuple[tuple[LikelyToken, ...], ...]:
    """The likeliest tokens of the whole distribution at the row's temperature (at 1, if the row is
    greedy), or of the allowed tokens where the answer is constrained. The token that was drawn has the
    logprob that it was drawn with."""
    version = row.version
    policy = Policy(version.loaded, dict(version.trained), version.scaling)
    rows = [Example(0, sequence) for sequence in sequences_of((turn,))]
    examples = with_masks(rows, policy)
    device = version.loaded.base.model.device
    (micro,) = pack(examples, micro_batch_tokens=1, share=False, device=device)
    ids_M_K, logprobs_M_K = policy.likeliest(
        micro, temperature=row.params.temperature or 1.0, most=most
    )
    return tuple(
        tuple(
            LikelyToken(
                piece=row.chat.piece(token), logprob=own if token == drawn else float(logprob)
            )
            for token, logprob in zip(ids, logprobs, strict=True)
            if logprob > FORBIDDEN / 2
        )
        for ids, logprobs, drawn, own in zip(
            ids_M_K.tolist(),
            logprobs_M_K.tolist(),
            turn.completion_ids,
            turn.logprobs,
            strict=True,
        )
    )
