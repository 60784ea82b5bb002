"""Constraints on an answer: what a request forces it to be, and the grammar that forced it.

A constrained answer is drawn from the policy's distribution over the tokens that a grammar allows. So
its logprobs are over these tokens, and the learner must compute them over the same tokens. The record of
an answer has the grammar as text and the hash of all of its token masks. The learner computes the masks
again from the grammar and the answer's tokens, and compares the hash.
"""

from pydantic import BaseModel, ConfigDict, Field


class Constraint(BaseModel):
    """An answer is forced to be this: JSON that is valid by `json_schema` (JSON text), or a call of one
    of the tools in `calls`. With both it is one of the two."""

    model_config = ConfigDict(frozen=True, extra="ignore")
    json_schema: str | None = None
    calls: tuple[str, ...] = ()


class AppliedGrammar(BaseModel):
    """The grammar that an answer was sampled under, in the form of llguidance. `masks_sha256` is the
    hash of its token masks, one for each token of the answer, in their order."""

    model_config = ConfigDict(frozen=True, extra="ignore")
    text: str
    masks_sha256: str


class ConstrainedSpan(BaseModel):
    """The tokens from `start` to `end` (exclusive) of a training row, which are one answer that was
    sampled under a grammar."""

    model_config = ConfigDict(frozen=True, extra="ignore")
    start: int = Field(ge=0)
    end: int = Field(ge=0)
    grammar: AppliedGrammar
