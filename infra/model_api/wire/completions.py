"""OpenAI's Completions: a text that the model continues, without a chat template."""

import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from infra.model_api.wire.chat_completions import LABELS, Stops, StreamOptions, failure
from infra.model_api.wire.chat_completions import NOTHING as CHAT_NOTHING
from infra.model_api.wire.chat_completions import REFUSED as CHAT_REFUSED
from infra.model_api.wire.errors import GatewayError, invalid
from infra.model_api.wire.parameters import check_extra, field_names, invalid_request
from infra.model_api.wire.request import LONGEST_MODEL, MOST_CHOICES, ModelRequest, rest_of
from schemas.sampling import Turn

DEFAULT_TOKENS = 16
"""How many tokens an answer has at most, if the request does not say it. That is OpenAI's default."""
MOST_PROMPTS = 64
MOST_IDS = 1 << 20

REFUSED = CHAT_REFUSED | {
    "response_format": "a text is continued as the policy goes on; use chat completions",
    "suffix": "not supported; leave it out",
    "best_of": "not supported; use n",
    "prompt_embeds": "not supported; send text",
}
NOTHING = CHAT_NOTHING | {"suffix": ("",), "best_of": (1,)}

Ids = Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1, max_length=MOST_IDS)]
Prompts = (
    str
    | Ids
    | Annotated[list[str], Field(min_length=1, max_length=MOST_PROMPTS)]
    | Annotated[list[Ids], Field(min_length=1, max_length=MOST_PROMPTS)]
)


class TextRequest(BaseModel):
    """The part of a request that is obeyed."""

    model_config = ConfigDict(extra="allow")
    prompt: Prompts
    model: str | None = None
    max_tokens: int | None = Field(default=None, ge=1)
    n: int | None = Field(default=1, ge=1, le=MOST_CHOICES)
    stop: Stops | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    echo: bool | None = False
    logprobs: Annotated[int, Field(ge=0, le=5)] | None = None
    temperature: float | None = Field(default=None, ge=0, le=2)
    top_p: float | None = Field(default=None, ge=0, le=1)

    def prompts(self) -> tuple[str | tuple[int, ...], ...]:
        """The prompts, each as text or as token ids."""
        given = self.prompt
        if isinstance(given, str):
            return (given,)
        if given and isinstance(given[0], int):
            return (tuple(number for number in given if isinstance(number, int)),)
        return tuple(one if isinstance(one, str) else tuple(_ids(one)) for one in given)


def _ids(given: object) -> Iterator[int]:
    if isinstance(given, list):
        yield from given


KNOWN = field_names(TextRequest)


@dataclass(frozen=True, slots=True)
class TextCompletion:
    """A request for completions of texts, and how its answer is written. Its choices are `n` for the
    first prompt, then `n` for the next one, and so on."""

    request: TextRequest
    model_request: ModelRequest
    streams: bool

    @property
    def model(self) -> str:
        return (self.request.model or "policy")[:LONGEST_MODEL]

    def answer(self, turns: Sequence[Turn], *, number: int) -> bytes:
        """The answer as one JSON object, with a choice for each turn."""
        choices = [
            {"index": index, "text": turn.text, "finish_reason": turn.finish_reason}
            | {"logprobs": self.logprobs(turn)}
            for index, turn in enumerate(turns)
        ]
        return json.dumps(
            self.head(number) | {"choices": choices, "usage": self.usage(turns)}
        ).encode()

    def stream(self, *, number: int) -> "TextStream":
        return TextStream(self, number)

    def head(self, number: int) -> dict[str, object]:
        """The fields that an answer and all of its chunks have."""
        return {
            "id": f"cmpl-{number}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": self.model,
        }

    def usage(self, turns: Sequence[Turn]) -> dict[str, int]:
        """The tokens of an answer. The choices of one prompt share its tokens."""
        each = self.request.n or 1
        prompt = sum(turn.counts.prompt_tokens for turn in turns[::each])
        completion = sum(turn.counts.completion_tokens for turn in turns)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
        }

    def logprobs(self, turn: Turn) -> dict[str, object] | None:
        """The tokens of an answer and their logprobs, in the form of this format."""
        if self.request.logprobs is None:
            return None
        pieces = turn.pieces or ()
        likeliest = turn.likeliest or ((),) * len(pieces)
        shown = [
            (bytes(piece).decode(errors="replace"), logprob, likely)
            for piece, logprob, likely in zip(pieces, turn.logprobs, likeliest, strict=False)
            if piece is not None
        ]
        return {
            "tokens": [text for text, _, _ in shown],
            "token_logprobs": [logprob for _, logprob, _ in shown],
            "top_logprobs": [
                {bytes(one.piece).decode(errors="replace"): one.logprob for one in likely}
                for _, _, likely in shown
            ],
            "text_offset": [0, *accumulate(len(text) for text, _, _ in shown)][: len(shown)],
        }


def parse(body: bytes) -> TextCompletion:
    """Parse a request body. Raises GatewayError (400), which names the parameter and what is wrong."""
    try:
        request = TextRequest.model_validate_json(body)
    except ValidationError as error:
        raise invalid_request(error, KNOWN) from error
    check_extra(request.model_extra, labels=LABELS, refused=REFUSED, nothing=NOTHING)
    if request.echo:
        raise invalid("echo", "the prompt is not repeated; leave it out")
    prompts = request.prompts()
    if len(prompts) * (request.n or 1) > MOST_CHOICES:
        raise invalid("n", f"a request may have at most {MOST_CHOICES} answers in all")
    wanted = ModelRequest(
        messages=(),
        prompts=prompts,
        max_tokens=request.max_tokens or DEFAULT_TOKENS,
        stop=tuple(request.stop or ()),
        num_choices=request.n or 1,
        pieces=request.logprobs is not None,
        likeliest=request.logprobs or None,
    )
    return TextCompletion(request, wanted, bool(request.stream))


@dataclass(slots=True)
class TextStream:
    """The chunks of an answer: the text of each choice, its finish reason, usage, then [DONE]."""

    of: TextCompletion
    number: int
    keep_alive: bytes = b": keep-alive\n\n"
    _told: dict[int, str] = field(default_factory=dict)

    def text(self, choice: int, piece: str) -> Iterator[bytes]:
        """Write a piece of the text of a choice."""
        self._told[choice] = self._told.get(choice, "") + piece
        yield self._chunk(choice, piece)

    def end(self, turns: Sequence[Turn]) -> Iterator[bytes]:
        """Write what was not written yet."""
        for choice, turn in enumerate(turns):
            rest = rest_of(self._told.get(choice, ""), turn.text)
            yield self._chunk(
                choice, rest, finish=turn.finish_reason, logprobs=self.of.logprobs(turn)
            )
        options = self.of.request.stream_options
        if options and options.include_usage:
            yield _event(self.of.head(self.number) | {"choices": [], "usage": self.of.usage(turns)})
        yield b"data: [DONE]\n\n"

    def failure(self, error: GatewayError) -> bytes:
        return b"data: " + failure(error) + b"\n\n"

    def _chunk(
        self, choice: int, text: str, *, finish: str | None = None, logprobs: object = None
    ) -> bytes:
        said = {"index": choice, "text": text, "finish_reason": finish, "logprobs": logprobs}
        return _event(self.of.head(self.number) | {"choices": [said]})


def _event(body: dict[str, object]) -> bytes:
    return b"data: " + json.dumps(body).encode() + b"\n\n"
