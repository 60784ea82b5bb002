"""The form of the playground: one question for two models, and what was said before."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pydantic import TypeAdapter, ValidationError

from schemas.errors import InvalidConfig, Issue
from schemas.sampling import Value

SIDES = ("left", "right")
MOST_TURNS = 50
LONGEST_QUESTION = 100_000
MOST_TOKENS = 8192


class PlaygroundTurn(Value):
    """A question and the answers of both models."""

    question: str
    left: str = ""
    right: str = ""


TURNS = TypeAdapter(tuple[PlaygroundTurn, ...])


@dataclass(frozen=True, slots=True)
class PlaygroundQuestion:
    """A question to two models (`models` by side), with the turns before it."""

    models: Mapping[str, str]
    system: str
    question: str
    turns: Sequence[PlaygroundTurn]
    temperature: float
    max_tokens: int
    seed: int | None

    def body(self, side: str, *, stream: bool) -> bytes:
        """The body of a chat completion for one side."""
        messages = [{"role": "system", "content": self.system}] if self.system else []
        for turn in self.turns:
            messages.append({"role": "user", "content": turn.question})
            messages.append({"role": "assistant", "content": getattr(turn, side)})
        messages.append({"role": "user", "content": self.question})
        body: dict[str, object] = {
            "model": self.models[side],
            "messages": messages,
            "temperature": self.temperature,
            "max_tokens": self.max_tokens,
            "stream": stream,
        }
        return json.dumps(body if self.seed is None else {**body, "seed": self.seed}).encode()


def parse_question(fields: Mapping[str, str]) -> PlaygroundQuestion:
    """The question in a form. Raises InvalidConfig."""
    question = fields.get("question", "").strip()
    if not question or len(question) > LONGEST_QUESTION:
        raise _invalid("question", f"must have 1 to {LONGEST_QUESTION} characters")
    seed = fields.get("seed", "").strip()
    return PlaygroundQuestion(
        models={side: fields.get(side, "") for side in SIDES},
        system=fields.get("system", "").strip()[:LONGEST_QUESTION],
        question=question,
        turns=parse_turns(fields.get("turns", "")),
        temperature=_number(fields, "temperature", "0.7", least=0, most=2),
        max_tokens=int(_number(fields, "max_tokens", "256", least=1, most=MOST_TOKENS)),
        seed=int(_number(fields, "seed", "", least=0, most=2**31 - 1)) if seed else None,
    )


def parse_turns(text: str) -> tuple[PlaygroundTurn, ...]:
    """The turns that a form carries; the newest if there are many. Raises InvalidConfig."""
    try:
        return TURNS.validate_json(text or "[]")[-MOST_TURNS:]
    except ValidationError as error:
        raise _invalid("turns", "cannot be read; open the playground again") from error


def _number(
    fields: Mapping[str, str], name: str, default: str, *, least: float, most: float
) -> float:
    text = fields.get(name, "").strip() or default
    try:
        value = float(text)
    except ValueError:
        value = least - 1
    if not least <= value <= most:
        raise _invalid(name, f"must be a number from {least:g} to {most:g}, got {text[:20]!r}")
    return value


def _invalid(name: str, message: str) -> InvalidConfig:
    return InvalidConfig(f"{name} {message}", issues=(Issue(name, message),))
