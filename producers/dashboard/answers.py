"""The answers of one group as the reader shows them: with figures, in an order, found by their text."""

from collections.abc import Callable, Mapping, Sequence

from infra.readmodel.runs import GroupRow
from producers.core.history.sample_search import message_texts
from producers.dashboard.branches import BranchChoice, shown_branch, tabs
from producers.dashboard.charts import Curve, curve, thin
from producers.dashboard.token_spans import TokenStretch, stretches
from producers.http.routes.samples import rewarded_turns
from schemas.ids import GroupId, sample_id
from schemas.learner import requested_rows
from schemas.sampling import Grade, Judgement, Message, SampleRecord

ORDERS: Mapping[str, Callable[[Mapping[str, object]], object]] = {
    "index": lambda one: one["index"],
    "reward": lambda one: (one["reward"] is None, -_float(one["reward"])),
    "length": lambda one: -_float(one["completion_tokens"]),
    "failure": lambda one: (one["failure"] is None, one["index"]),
}
PAGE_CHARACTERS = 60_000
"""Characters of users on one page, so that it stays below 150 KB with everything."""

MOST_CHARACTERS, LEAST_CHARACTERS = 10_000, 100
STRIP_POINTS = 120


def answer(
    group: GroupRow,
    record: SampleRecord,
    grade: Grade | None,
    judged: Sequence[Judgement],
    mean: float | None,
    branch: BranchChoice | None = None,
) -> dict[str, object]:
    """One sample with its reward, its distance from the group's mean, what its tokens say, and the
    messages of the chosen branch."""
    reward = grade.reward if grade else None
    logprobs = trained_logprobs(record)
    number, messages = shown_branch(record, branch)
    return {
        "id": sample_id(GroupId(group.group), record.index),
        "index": record.index,
        "messages": messages,
        "branch": number,
        "branches": record.branches,
        "tabs": tabs(record, number),
        "text": record.text,
        "reward": reward,
        "advantage": None if reward is None or mean is None else reward - mean,
        "parts": grade.parts if grade else {},
        "rewarded_turns": rewarded_turns(record),
        "agent_rewards": record.agent_rewards,
        "failure": record.failure or (grade.failure if grade else None),
        "judgements": [one for one in judged if one.index == record.index],
        "output": record.output,
        "prompt_tokens": record.prompt_tokens,
        "completion_tokens": record.completion_tokens,
        "truncated": record.truncated,
        "num_turns": record.num_turns,
        "trained_tokens": len(logprobs),
        "mean_logprob": sum(logprobs) / len(logprobs) if logprobs else None,
        "strip": _strip(logprobs),
        "tokens": None,
        "no_tokens": None,
    }


def tokens(
    one: Mapping[str, object],
    record: SampleRecord,
    vocabulary: Mapping[int, bytes] | None,
    colour: str,
    largest: float,
    most: int | None,
) -> Mapping[str, object]:
    """The tokens of an answer in their colours, or a sentence about why there are none. `largest` is the
    largest advantage of its group."""
    absent: str | None = None
    found: list[TokenStretch] | None = None
    if not record.sequences:
        absent = "No tokens of this answer are recorded, so they have no colours."
    elif vocabulary is None:
        absent = "The tokenizer of the model is not on this server, so the tokens have no texts."
    else:
        part = _float(one["advantage"]) / largest if largest else 0.0
        found = stretches(record, vocabulary, colour=colour, advantage=part, most=most)
        if found is None:
            absent = "The tokenizer of the model has changed since, so the tokens have no texts."
    return {"tokens": found, "no_tokens": absent}


def trained_logprobs(record: SampleRecord) -> list[float]:
    """The logprobs of the tokens that the policy chose, in their order, row by row as requested."""
    return [
        logprob
        for row in (record.sequences[number] for number in requested_rows(record))
        for logprob, trained in zip(row.logprobs, row.loss_mask, strict=True)
        if trained
    ]


def share_of_text(records: Sequence[SampleRecord], others: int = 0) -> int:
    """How many characters of each text a page with these samples and `others` texts more shows."""
    longest = (
        max(sum(1 + len(m.tool_calls) for m in spoken) for spoken in record.conversations)
        for record in records
    )
    count = sum(4 + num_texts for num_texts in longest)
    count += others
    return max(LEAST_CHARACTERS, min(MOST_CHARACTERS, PAGE_CHARACTERS // max(1, count)))


def whole_text(record: SampleRecord) -> str:
    """Everything that was said in a sample, uncut, with all of its branches."""
    spoken = _conversation(record.messages) if record.messages else record.text
    branches = (
        f"=== branch {number} ===\n\n{_conversation(branch)}"
        for number, branch in enumerate(record.branches, 1)
        if branch != record.messages
    )
    return "\n\n".join([spoken, *branches])


def _conversation(messages: Sequence[Message]) -> str:
    return "\n\n".join("\n".join([f"=== {one.role} ===", *message_texts(one)]) for one in messages)


def text_part(record: SampleRecord, part: str) -> str | None:
    """One text of a sample, uncut: `message-N`, `branch-B-message-N`, `text`, `printed`, `traceback` or
    `failure`. None when the sample has no such text."""
    output, failure = record.output, record.failure
    texts = {f"message-{n}": "\n".join(message_texts(one)) for n, one in enumerate(record.messages)}
    for number, branch in enumerate(record.branches, 1):
        named = ((f"branch-{number}-message-{n}", one) for n, one in enumerate(branch))
        texts |= {name: "\n".join(message_texts(one)) for name, one in named}
    texts["text"] = record.text
    if output is not None:
        texts |= {"printed": output.stdout, "traceback": output.traceback or ""}
    if failure is not None:
        texts["failure"] = failure.message
    return texts.get(part)


def _strip(logprobs: Sequence[float]) -> Curve | None:
    return curve(thin(list(enumerate(logprobs)), STRIP_POINTS), width=240, height=24)


def _float(value: object) -> float:
    return value if isinstance(value, int | float) else 0.0
