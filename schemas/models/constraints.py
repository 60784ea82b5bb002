"""Constraints on an answer: what a request forces it to be, and the grammar that forced it.

A constrained answer is drawn from the policy's distribution over the tokens that a grammar allows. So
its logprobs are over these tokens, and the learner must compute them over the same tokens. The record of
an answer has the grammar as text and the hash of all of its token masks. The learner computes the masks
again from the grammar and the answer's tokens, and compares the hash.
"""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

VocabularyKind = Literal["ours", "vllm"]
"""How llguidance reads the vocabulary of a model: from the tokens that we give it, or by itself from the
tokenizer's file, as it does in a vLLM server."""


class Constraint(BaseModel):
    """An answer is forced to be this: JSON that is valid by `json_schema` (JSON text), or a call of one
    of the tools in `calls`. With both it is one of the two."""

    model_config = ConfigDict(frozen=True, extra="ignore")
    json_schema: str | None = None
    calls: tuple[str, ...] = ()


class AppliedGrammar(BaseModel):
    """The grammar that an answer was sampled under, in the form of llguidance. `masks_sha256` is the
    hash of its token masks, one for each token of the answer, in their order. The masks are over the
    tokens of `vocabulary`."""

    model_config = ConfigDict(frozen=True, extra="ignore")
    text: str
    masks_sha256: str
    vocabulary: VocabularyKind = Field(default="ours", exclude_if=lambda value: value == "ours")


class ConstrainedSpan(BaseModel):
    """The tokens from `start` to `end` (exclusive) of a training row, which are one answer that was
    sampled under a grammar."""

    model_config = ConfigDict(frozen=True, extra="ignore")
    start: int = Field(ge=0)
    end: int = Field(ge=0)
    grammar: AppliedGrammar
