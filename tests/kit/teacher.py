"""A teacher on a server, as vLLM answers for one: it says how likely given tokens are, and fails as a
test says. `tests/contracts/teachers_suite.py` compares it with real vLLM.

Its distribution follows from the token before. It likes digits, so that a student can learn something.
"""

import math
from dataclasses import dataclass, field
from functools import cache
from hashlib import blake2b
from itertools import pairwise
from typing import Any, Literal

from schemas.models.scratch import CHARACTERS, SPECIAL_TOKENS, scratch_shape
from schemas.sampling import Sequence
from tests.kit.provider import Reply, refusal

MODEL = "big"
CONTEXT: Literal[0] = 0
CHOSEN: Literal[1] = 1
LIKED, OTHERS = 100.0, 1.0
"""Weights of digits and of other tokens, before each is changed by up to a factor of two."""

Fault = Literal[
    "down", "nan", "infinite", "null", "least", "short", "shifted", "unnamed", "textless"
]
"""How an answer is wrong. `down`: there is none."""


def texts_of(shape: str) -> tuple[str, ...]:
    """The texts of the tokens of a scratch shape, by id."""
    return (*SPECIAL_TOKENS, *CHARACTERS[scratch_shape(shape).vocabulary])


@cache
def distribution(before: int, texts: tuple[str, ...]) -> tuple[float, ...]:
    """The logprob of each token behind the token `before`."""
    weights = [
        (LIKED if text.isdigit() else OTHERS)
        * (1 + blake2b(f"{before} {token}".encode(), digest_size=1).digest()[0] / 255)
        for token, text in enumerate(texts)
    ]
    total = math.fsum(weights)
    return tuple(math.log(weight / total) for weight in weights)


@dataclass
class FakeTeacher:
    """Takes requests of `tests.kit.provider`. It answers wrong or not at all while `fault` is set, in
    the first place that the request asks about behind `fault_from`."""

    texts: tuple[str, ...] = texts_of("qwen3-tiny")
    context: int = 128
    fault: Fault | None = None
    fault_from: int = 1
    asked: list[tuple[int, ...]] = field(default_factory=list)

    def __call__(self, number: int, body: Any) -> Reply:
        tokens = tuple(body["prompt"])
        self.asked.append(tokens)
        if self.fault == "down":
            return refusal(503, "The engine is starting.")
        if body["model"] != MODEL:
            return refusal(404, f"The model `{body['model']}` does not exist.")
        if len(tokens) + body["max_tokens"] > self.context:
            text = f"This model's maximum context length is {self.context} tokens."
            return refusal(400, text)
        if max(tokens) >= len(self.texts):
            return refusal(400, f"Token id {max(tokens)} is out of vocabulary")
        said: list[Any] = [None]
        for before, token in pairwise(tokens):
            logprob = distribution(before, self.texts)[token]
            entry = {"logprob": logprob, "rank": 1, "decoded_token": self.texts[token]}
            said.append({str(token): entry})
        choice = {"index": 0, "text": "0", "logprobs": None, "finish_reason": "length"}
        return 200, {}, {"choices": [{**choice, "prompt_logprobs": self._wrong(said)}]}

    def _wrong(self, said: list[Any]) -> list[Any] | None:
        """The answer with the fault in it."""
        place = self.fault_from
        wrong = {"nan": math.nan, "infinite": -math.inf, "null": None, "least": -9999.0}
        if self.fault in wrong:
            (entry,) = said[place].values()
            entry["logprob"] = wrong[self.fault]
        elif self.fault == "textless":
            (entry,) = said[place].values()
            del entry["decoded_token"]
        elif self.fault == "short":
            return said[:-1]
        elif self.fault == "shifted":
            return [None, *said[2:], said[1]]
        elif self.fault == "unnamed":
            return None
        return said


def row_of(tokens: tuple[int, ...], *, prompt: int) -> Sequence:
    """A training row whose first `prompt` tokens the policy did not choose."""
    mask = (CONTEXT,) * prompt + (CHOSEN,) * (len(tokens) - prompt)
    return Sequence(tokens=tokens, loss_mask=mask, logprobs=tuple(-1.0 * chosen for chosen in mask))
