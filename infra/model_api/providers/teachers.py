"""Teachers on vLLM servers: `infra.ports.teachers.Teachers`.

vLLM reads a prompt of token ids for a completion of one token, and says with `prompt_logprobs` how
likely each of them was after those before it, at a temperature of 1. The answer names the ids, so that
logprobs in the wrong places are noticed, and the texts of the tokens.
"""

import asyncio
import json
import math
from contextlib import suppress
from typing import Any
from weakref import WeakValueDictionary

from infra.model_api.providers.client import MOST_BYTES, ProviderAway, ProviderClient
from infra.ports.teachers import Reading
from schemas.errors import Refused, TeacherAway, TransientError
from schemas.models.teacher import LONGEST_TEXT
from schemas.sampling import ProviderRef, Sequence
from schemas.secrets.masking import NO_MASKS, Masks
from schemas.secrets.secret_value import SecretValue
from schemas.text import well_formed

PATIENCE_S = 120.0
"""How long one row may take, with its retries. After that its group waits and asks again."""

AT_ONCE = 16
"""How many rows one server reads at the same time for this process, whatever runs they belong to. The
others wait here, where no deadline runs."""

BYTES_OF_A_TOKEN = 512
"""More than an answer says about one token."""

LEAST = -9999.0
"""The number that vLLM writes for minus infinity, because JSON has none."""

ROUNDING = 1e-3
"""How far above 0 rounding may bring a logprob. It counts as 0."""

SHOWN = 40
"""Characters of a wrong value that an error shows."""


class VllmTeachers:
    """Asks models on vLLM servers."""

    def __init__(self, client: ProviderClient, *, patience_s: float = PATIENCE_S) -> None:
        self._client = client
        self._patience_s = patience_s
        self._rooms: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()

    async def read(
        self, teacher: ProviderRef, row: Sequence, *, key: SecretValue | None, what: str
    ) -> Reading:
        body = {
            "model": teacher.model,
            "prompt": row.tokens,
            "max_tokens": 1,
            "temperature": 1.0,
            "prompt_logprobs": 0,
        }
        room = self._rooms.setdefault(teacher.base_url, asyncio.Semaphore(AT_ONCE))
        try:
            async with room:
                answer = await self._client.ask(
                    teacher,
                    "completions",
                    body,
                    key=key,
                    deadline_s=self._patience_s,
                    most_bytes=MOST_BYTES + BYTES_OF_A_TOKEN * len(row.tokens),
                )
        except ProviderAway as error:
            text = f"the teacher, asked about {what}: {error}"
            raise (TeacherAway(text) if error.is_waiting else TransientError(text)) from error
        except Refused as error:
            raise Refused(f"the teacher, asked about {what}: {error.message}") from error
        # A server that was given the key may quote it.
        masks = Masks({teacher.secret or "key": key.reveal()}) if key else NO_MASKS
        try:
            return await asyncio.to_thread(read_answer, answer, row, masks)
        except UnusableReading as error:
            raise TransientError(
                f"the teacher {teacher.name} at {teacher.base_url} gave no usable answer about {what}: "
                f"{error}"
            ) from None


class UnusableReading(Exception):
    """Why an answer cannot be used, and what to do."""


def read_answer(answer: bytes, row: Sequence, masks: Masks = NO_MASKS) -> Reading:
    """The reading in an answer. Raises UnusableReading when it is not about all tokens of the
    row, or gives one that the policy chose a logprob which is not finite."""
    found = _prompt_logprobs(answer)
    if len(found) != len(row.tokens):
        raise UnusableReading(
            f"it has {len(found)} log-probabilities for {len(row.tokens)} tokens; check that the server "
            "does not cut prompts off"
        )
    logprobs: list[float] = [0.0]
    texts: dict[int, str] = {}
    for place, token in enumerate(row.tokens[1:], 1):
        said = found[place]
        entry = said.get(str(token)) if isinstance(said, dict) else None
        if not isinstance(entry, dict):
            raise UnusableReading(
                f"it has no log-probability of token {token} in place {place}; check that the server is "
                "vLLM, and that nothing between changes its answers"
            )
        text = entry.get("decoded_token")
        if not isinstance(text, str):
            raise UnusableReading(
                f"it has no text of token {token}, by which the vocabularies are compared; start the "
                "server with its tokenizer (without --skip-tokenizer-init)"
            )
        if token not in texts:
            texts[token] = masks.text(well_formed(text))[:LONGEST_TEXT]
        is_chosen = row.loss_mask[place] == 1
        logprobs.append(_usable(entry.get("logprob"), token, place, masks) if is_chosen else 0.0)
    return Reading(tuple(logprobs), texts)


def _prompt_logprobs(answer: bytes) -> list[Any]:
    try:
        found = json.loads(answer)["choices"][0]["prompt_logprobs"]
    except (ValueError, KeyError, IndexError, TypeError, RecursionError):
        found = None
    if not isinstance(found, list):
        raise UnusableReading(
            "it has no prompt_logprobs; check that the base URL is that of a vLLM server, because other "
            "servers do not say how likely given tokens are"
        )
    return found


def _usable(value: object, token: int, place: int, masks: Masks) -> float:
    """A logprob that can be learned from. Raises UnusableReading for any other value."""
    number = math.nan
    if isinstance(value, int | float) and not isinstance(value, bool):
        with suppress(OverflowError):
            number = float(value)
    if not (math.isfinite(number) and LEAST < number <= ROUNDING):
        is_shown = value is None or type(value) in (int, float)
        shown = masks.text(str(value))[:SHOWN] if is_shown else f"of type {type(value).__name__}"
        raise UnusableReading(
            f"it gives token {token} in place {place} the log-probability {shown}; check the teacher's "
            "weights and number format"
        )
    return min(number, 0.0)
