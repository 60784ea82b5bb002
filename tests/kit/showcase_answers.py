"""The answers of a group as the dashboard shows them: with reasoning and tools, without a reward, cut
off, and scored by judges."""

from collections.abc import Callable
from typing import Literal

from infra.blobs.artifacts import reference
from schemas.models.scratch import CHARACTERS, SPECIAL_TOKENS
from schemas.sampling import (
    Grade,
    Judgement,
    Message,
    RewardedTurn,
    SampleFailure,
    SampleOutput,
    SampleRecord,
    Sequence,
    ToolCall,
)

Texts = Callable[[str], str]
"""Takes a text and returns the one to show in its place."""

NUM_SAMPLES = 4
QUESTIONS = (
    "A farmer has 17 sheep. All but 9 run away. How many are left?",
    "What is 12 * 11 + 5? Use the calculator.",
    "Tom reads 14 pages a day. How many pages does he read in three weeks?",
    "A box holds 6 eggs. How many boxes are needed for 50 eggs?",
)

TRACEBACK = """Traceback (most recent call last):
  File "rollouts/math/main.py", line 41, in grade
    return float(answer) / float(label)
ZeroDivisionError: float division by zero
"""


def group_of_answers(
    question: str, text: Texts
) -> tuple[tuple[SampleRecord, ...], tuple[Grade, ...], tuple[Judgement, ...]]:
    """The samples of a group, their grades, and the judgements about them."""
    samples = (_with_tools(question, text), _short(text), _failed(text), _cut(text))
    failure = SampleFailure.model_validate(
        {"category": "grader_error", "message": text("division by zero")}
    )
    grades = (
        Grade(index=0, reward=1.0, parts={"exact": 1.0, text("format"): 1.0}),
        Grade(index=1, reward=0.25, parts={"exact": 0.0, "format": 0.25}),
        Grade(index=2, reward=None, failure=failure),
        Grade(index=3, reward=0.0, parts={"exact": 0.0}),
    )
    judgements = tuple(
        Judgement(
            index=index,
            rubric=text("clarity"),
            model=text("judge-model"),
            score=score,
            explanation=text("Names each step and checks the result."),
            problem=None if score is not None else text("the judge answered without a score"),
        )
        for index, score in ((0, 0.9), (1, 0.4), (3, None))
    )
    return samples, grades, judgements


def _asked(text: Texts, question: str = "Say 3") -> Message:
    return Message(role="user", content=text(question))


def _with_tools(question: str, text: Texts) -> SampleRecord:
    call = ToolCall(
        id="call-1", name=text("calculator"), arguments=text('{"expression": "12 * 11 + 5"}')
    )
    first = Message(role="system", content=text("Answer as briefly as you can."))
    checked = (
        Message(role="user", content=text("Is 137 the result of 12 * 11 + 5?")),
        Message(role="assistant", content=text("Yes, it is.")),
    )
    messages = (
        first,
        _asked(text, question),
        Message(
            role="assistant",
            content=text("I compute it."),
            reasoning=text("12 times 11 is 132, and 5 more is 137."),
            tool_calls=(call,),
        ),
        Message(role="tool", content=text("137"), tool_call_id="call-1", name=text("calculator")),
        Message(role="assistant", content=text("The answer is 137.")),
    )
    return SampleRecord(
        index=0,
        messages=messages,
        branches=(messages, checked),
        text=text("The answer is 137."),
        num_turns=3,
        prompt_tokens=41,
        completion_tokens=63,
        output=SampleOutput(
            stdout=text("called calculator\n"), files={"note.txt": reference(b"a")}
        ),
    )


def _short(text: Texts) -> SampleRecord:
    answer = text("About 130.")
    messages = (_asked(text), Message(role="assistant", content=answer))
    return SampleRecord(
        index=1,
        messages=messages,
        text=answer,
        sequences=(character_tokens("Say 3", answer[:20_000]),),
        num_turns=1,
        prompt_tokens=41,
        completion_tokens=5,
        turns=(RewardedTurn(row=0, num_actions=5, reward=0.5, agent=text("solver")),),
        agent_rewards={text("solver"): -1.5},
    )


def character_tokens(prompt: str, answer: str) -> Sequence:
    """A row of the characters of a prompt and an answer, as a scratch shape has them. The logprobs go
    through all shades."""
    unknown, end = SPECIAL_TOKENS.index("<|unk|>"), SPECIAL_TOKENS.index("<|end|>")
    ids = {character: n for n, character in enumerate(CHARACTERS["ascii"], len(SPECIAL_TOKENS))}
    given = [ids.get(character, unknown) for character in prompt]
    chosen = [*(ids.get(character, unknown) for character in answer), end]
    mask: list[Literal[0, 1]] = [0] * len(given)
    mask += [1] * len(chosen)
    return Sequence(
        tokens=(*given, *chosen),
        loss_mask=tuple(mask),
        logprobs=(0.0,) * len(given) + tuple(-(2.0 ** (n % 12 - 8)) for n in range(len(chosen))),
    )


def _failed(text: Texts) -> SampleRecord:
    answer = text("0")
    return SampleRecord(
        index=2,
        messages=(_asked(text), Message(role="assistant", content=answer)),
        text=answer,
        num_turns=1,
        prompt_tokens=41,
        completion_tokens=1,
        output=SampleOutput(stdout=text("label 0\n"), traceback=text(TRACEBACK), is_cut=True),
    )


def _cut(text: Texts) -> SampleRecord:
    answer = text("Let me think step by step. First, " * 8)
    return SampleRecord(
        index=3,
        messages=(_asked(text), Message(role="assistant", content=answer)),
        text=answer,
        num_turns=1,
        prompt_tokens=41,
        completion_tokens=512,
        truncated=True,
    )
