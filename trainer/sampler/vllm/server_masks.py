"""Checks that a server drew a forced answer under the token masks that the learner will compute.

vLLM does not report its masks. It gets our grammar, and its llguidance makes the masks. We make them too
(`trainer/grammar/token_masks.py`), and three checks compare them:
- Each token that was drawn is one that we allow.
- With each token the server reports the likeliest ones, as far as its mask allows them. They must be the
  tokens that we allow, and where we allow few, all of them.
- The first answer under a grammar must have the logprobs that the learner computes under our masks. That
  also finds tokens that the server forbids where we allow many.
"""

import math
from collections.abc import Mapping, Sequence

from schemas.errors import FailureCategory, UserCodeError
from trainer.grammar.token_masks import is_allowed, num_allowed
from trainer.sampler.vllm.canary import EXACT, FACTOR

NUM_LIKELIEST = 20
"""How many of the likeliest tokens a server reports. More than 20 need an argument of vLLM."""
IMPOSSIBLE = -9999.0
"""The logprob that vLLM reports for a token that is not allowed."""


def refuse_other_mask(
    url: str, mask: bytes, token: int, likeliest: Mapping[int, float], *, top_p: float
) -> None:
    """Compare our mask of a token that was drawn with the likeliest tokens that the server reported
    there. With a `top_p` below 1, which cuts tokens off too, none of them is missed. Raises
    UserCodeError when the server's mask is another one."""
    allowed = {number for number, logprob in likeliest.items() if logprob > IMPOSSIBLE}
    wrong = next((number for number in (token, *allowed) if not is_allowed(mask, number)), None)
    if wrong is not None:
        raise _different(url, f"it allows token {wrong}, which is not allowed here")
    expected = min(num_allowed(mask), NUM_LIKELIEST)
    if top_p == 1 and len(allowed) < expected:
        raise _different(
            url, f"it allows {len(allowed)} tokens where at least {expected} are allowed"
        )


def refuse_other_logprobs(
    url: str, reported: Sequence[float], learner: Sequence[float], *, noise: float
) -> None:
    """Compare the logprobs of an answer that the server reported with those of the learner under our
    masks. `noise` is the mean distance of the two without a mask. Raises UserCodeError when they differ
    by clearly more, in the mean over the tokens that had an alternative."""
    distances = [
        abs(server - ours) for server, ours in zip(reported, learner, strict=True) if ours or server
    ]
    distance = math.fsum(distances) / max(1, len(distances))
    if not distance <= max(EXACT, FACTOR * noise):
        raise _different(
            url, f"its logprobs differ from the learner's by {distance:.2g} on average"
        )


def _different(url: str, how: str) -> UserCodeError:
    return UserCodeError(
        FailureCategory.VALIDATION,
        f"the sampler {url} applies other token masks to this forced answer than the learner: {how}. "
        "Start vLLM without --reasoning-parser and without another structured outputs backend than "
        "guidance, simplify the schema, or set HEADRACE_SAMPLER=torch",
    )
