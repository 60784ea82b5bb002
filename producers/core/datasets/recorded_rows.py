"""Rows of a dataset from recorded samples: demonstrations, pairs of answers, or whole groups. Pure.

Rows are made of what the policy read and wrote, and of the rewards of that. Nothing else of the dataset
that the run used is in them, no ground truth in particular, and nothing that user code printed.
"""

import hashlib
import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from producers.core.datasets.messages import BadMessages, parse_conversation, parse_tools
from producers.core.datasets.preferences import MOST_MARGIN, BadPreference, parse_preference
from producers.core.datasets.readers import MAX_ROW_BYTES
from schemas.datasets import DatasetRow, RowsKind, Trajectory
from schemas.errors import InvalidConfig, Issue
from schemas.ids import GroupId, sample_id
from schemas.models.openai_messages import openai_message
from schemas.sampling import Grade, Message, SampleBatch, SampleFailure, SampleRecord, ToolSpec

REASONS: Mapping[str, str] = {
    "failed": "failed",
    "truncated": "were cut off at a limit of tokens",
    "no_reward": "have no reward",
    "no_answer": "do not end with a text of the assistant",
    "reasoning": "end with reasoning, which such rows do not teach",
    "below_min_reward": "have a reward below --min-reward",
    "above_max_reward": "have a reward above --max-reward",
    "not_the_best": "are not the best of their group",
    "duplicate": "repeat an earlier row",
    "too_long": f"need a row of more than {MAX_ROW_BYTES} bytes",
    "unfit": "break a rule of datasets, such as one with too many tools",
    "no_pair": "have no two answers to one prompt",
    "small_margin": "have no two answers whose rewards differ enough",
    "no_tokens": "have no recorded tokens",
    "few_rewards": "have fewer than two rewards",
}
"""Why a sample or a group becomes no row, and how that is said of several."""


@dataclass(frozen=True, slots=True)
class RowFilter:
    """Which rows are made. Rewards are those of a sample; of a pair, `min_reward` is the least of the
    better answer and `max_reward` the largest of the worse one; of a trajectory both bound the mean of
    the group. `reward_margin` is by how much the rewards of a pair differ at least; they always
    differ."""

    kind: RowsKind
    min_reward: float | None = None
    max_reward: float | None = None
    dedupe: bool = False
    best_of_group: bool = False
    limit: int | None = None
    reward_margin: float = 0.0

    def problem_of(self, low: float, high: float | None = None) -> str | None:
        """Why these rewards are left out, or None. `high` is that of the better answer of a pair."""
        better = low if high is None else high
        if self.min_reward is not None and better < self.min_reward:
            return "below_min_reward"
        if self.max_reward is not None and low > self.max_reward:
            return "above_max_reward"
        return None


@dataclass(frozen=True, slots=True)
class RecordedGroup:
    """A graded group: its id, the version that sampled it, its samples and their grades."""

    group: str
    version: int
    batch: SampleBatch
    grades: tuple[Grade, ...]


@dataclass(frozen=True, slots=True)
class _Answer:
    """A sample that can become a row: its conversation before the answer, the answer, and its reward."""

    index: int
    before: tuple[Message, ...]
    text: str
    reward: float
    tools: tuple[ToolSpec, ...]


@dataclass
class RowMaker:
    """Makes rows of groups, one group after the other, and counts what it leaves out."""

    wanted: RowFilter
    num_groups: int = 0
    num_samples: int = 0
    num_rows: int = 0
    highest: float | None = None
    lowest: float | None = None
    samples_left_out: Counter[str] = field(default_factory=Counter)
    groups_left_out: Counter[str] = field(default_factory=Counter)
    versions: set[int] = field(default_factory=set)
    group_sizes: set[int] = field(default_factory=set)
    _seen: set[bytes] = field(default_factory=set)

    @property
    def is_full(self) -> bool:
        """Whether there are as many rows as were asked for."""
        return self.wanted.limit is not None and self.num_rows >= self.wanted.limit

    def lines_of(self, group: RecordedGroup) -> Iterator[bytes]:
        """The rows of a group as lines, none beyond the limit."""
        self.num_groups += 1
        self.num_samples += len(group.batch.samples)
        grades = {grade.index: grade for grade in group.grades}
        for grade in group.grades:
            if (reward := reward_of(grade)) is not None:
                self.highest = reward if self.highest is None else max(self.highest, reward)
                self.lowest = reward if self.lowest is None else min(self.lowest, reward)
        match self.wanted.kind:
            case "sft":
                found = self._demonstrations(group, grades)
            case "preference":
                found = self._pair(group, grades)
            case "trajectory":
                found = self._trajectory(group, grades)
        for line in found:
            if self.is_full:
                return
            self.num_rows += 1
            yield line

    def _demonstrations(self, group: RecordedGroup, grades: Mapping[int, Grade]) -> Iterator[bytes]:
        usable = []
        for answer in self._answers(group, grades):
            if problem := self.wanted.problem_of(answer.reward):
                self.samples_left_out[problem] += 1
            else:
                usable.append(answer)
        if self.wanted.best_of_group and usable:
            best = min(usable, key=lambda one: (-one.reward, one.index))
            self.samples_left_out["not_the_best"] += len(usable) - 1
            usable = [best]
        for answer in usable:
            said = [*map(openai_message, answer.before), _assistant_message(answer.text)]
            tools = [_tool(one) for one in answer.tools]
            if self._is_repeated([said, tools]):
                self.samples_left_out["duplicate"] += 1
                continue
            about = {"sample": _id(group, answer.index), "reward": answer.reward}
            row = {"messages": said, "tools": tools, "metadata": about}
            if problem := _problem_of_row(row, line := _line(row)):
                self.samples_left_out[problem] += 1
            else:
                yield line

    def _pair(self, group: RecordedGroup, grades: Mapping[int, Grade]) -> Iterator[bytes]:
        """The two answers to one prompt whose rewards differ most; of equal ones the first."""
        prompts: dict[str, list[_Answer]] = {}
        for answer in self._answers(group, grades):
            if not answer.text.strip() or answer.before[-1].role not in ("user", "tool"):
                self.samples_left_out["no_answer"] += 1
                continue
            prompts.setdefault(_key([*map(openai_message, answer.before)]), []).append(answer)
        pairs = [_extremes(found) for found in prompts.values() if len(found) > 1]
        if not pairs:
            self.groups_left_out["no_pair"] += 1
            return
        chosen, rejected = min(
            pairs, key=lambda pair: (pair[1].reward - pair[0].reward, pair[0].index)
        )
        margin = chosen.reward - rejected.reward
        if margin <= 0 or margin < self.wanted.reward_margin or chosen.text == rejected.text:
            self.groups_left_out["small_margin"] += 1
            return
        if problem := self.wanted.problem_of(rejected.reward, chosen.reward):
            self.groups_left_out[problem] += 1
            return
        prompt = [openai_message(message) for message in chosen.before]
        tools = [_tool(one) for one in chosen.tools]
        if self._is_repeated([prompt, chosen.text, rejected.text, tools]):
            self.groups_left_out["duplicate"] += 1
            return
        samples = {"chosen": _id(group, chosen.index), "rejected": _id(group, rejected.index)}
        row = {
            "prompt": prompt,
            "chosen": chosen.text,
            "rejected": rejected.text,
            "margin": min(margin, MOST_MARGIN),
            "tools": tools,
            "metadata": samples,
        }
        if problem := _problem_of_row(row, line := _line(row)):
            self.groups_left_out[problem] += 1
        else:
            yield line

    def _trajectory(self, group: RecordedGroup, grades: Mapping[int, Grade]) -> Iterator[bytes]:
        records = group.batch.samples
        rewards = tuple(reward_of(grades.get(record.index)) for record in records)
        known = [reward for reward in rewards if reward is not None]
        if problem := self._problem_of_group(records, rewards, known):
            self.groups_left_out[problem] += 1
            return
        tokens = [[one.tokens for one in record.sequences] for record in records]
        if self._is_repeated([tokens, rewards]):
            self.groups_left_out["duplicate"] += 1
            return
        self.versions.add(group.version)
        self.group_sizes.add(len(records))
        trajectory = Trajectory(
            group=group.group,
            version=group.version,
            samples=tuple(map(_learned_part, records)),
            rewards=rewards,
            parts=_parts_of(records, rewards, grades),
        )
        prompt = next((_prompt_of(one) for one in records if one.messages), ())
        yield DatasetRow(prompt=prompt, trajectory=trajectory).to_line()

    def _problem_of_group(
        self,
        records: Sequence[SampleRecord],
        rewards: Sequence[float | None],
        known: Sequence[float],
    ) -> str | None:
        if len(known) < 2:
            return "few_rewards"
        rewarded = zip(records, rewards, strict=True)
        if not any(record.sequences for record, reward in rewarded if reward is not None):
            return "no_tokens"
        return self.wanted.problem_of(math.fsum(known) / len(known))

    def _answers(self, group: RecordedGroup, grades: Mapping[int, Grade]) -> Iterator[_Answer]:
        """The samples of a group that can become a row, in order. The others are counted."""
        for record in group.batch.samples:
            grade = grades.get(record.index)
            if problem := _problem_of(record, grade):
                self.samples_left_out[problem] += 1
                continue
            reward = reward_of(grade)
            assert reward is not None  # noqa: S101 - it has no problem
            *before, last = record.messages
            yield _Answer(record.index, tuple(before), last.content, reward, record.tools)

    def _is_repeated(self, content: object) -> bool:
        """Whether an earlier row has the same content, if that matters."""
        if not self.wanted.dedupe:
            return False
        digest = hashlib.blake2b(_key(content).encode(), digest_size=16).digest()
        if digest in self._seen:
            return True
        self._seen.add(digest)
        return False


def check_filter(wanted: RowFilter) -> None:
    """Raises InvalidConfig when filters contradict each other or have no meaning for the kind."""
    low, high = wanted.min_reward, wanted.max_reward
    if low is not None and high is not None and low > high:
        raise refusal_of("min_reward", f"must be at most max_reward ({high:g}), got {low:g}")
    if wanted.best_of_group and wanted.kind != "sft":
        raise refusal_of(
            "best_of_group",
            f"has no meaning for {wanted.kind}, which is made of several samples of a group; leave it "
            "out, or use sft",
        )
    if wanted.reward_margin and wanted.kind != "preference":
        raise refusal_of(
            "reward_margin",
            f"has no meaning for {wanted.kind}, which compares no two answers; leave it out, or use "
            "preference",
        )


def refusal_of(key: str, message: str) -> InvalidConfig:
    """The error for a field of a request."""
    return InvalidConfig(f"{key} {message}", issues=(Issue(key, message),))


def left_out_texts(counts: Mapping[str, int], noun: str) -> list[str]:
    """The counts of what became no row, in words; `noun` is samples or groups."""
    return [f"{count} {noun} {REASONS.get(why, why)}" for why, count in sorted(counts.items())]


def reward_of(grade: Grade | None) -> float | None:
    """The reward that a step learns from; None if the sample is left out of its baseline."""
    if grade is None or grade.reward is None or not math.isfinite(grade.reward):
        return None
    return grade.reward


def _problem_of(record: SampleRecord, grade: Grade | None) -> str | None:
    """Why a sample cannot become a demonstration or an answer of a pair; None if it can."""
    if record.failure is not None or (grade is not None and grade.failure is not None):
        return "failed"
    if record.truncated:
        return "truncated"
    if reward_of(grade) is None:
        return "no_reward"
    if len(record.messages) < 2:
        return "no_answer"
    last = record.messages[-1]
    if last.role != "assistant" or last.tool_calls or not last.content:
        return "no_answer"
    return "reasoning" if last.reasoning else None


def _problem_of_row(row: Mapping[str, object], line: bytes) -> str | None:
    """Why the check of uploads would refuse the row, and with it all others; None if it would not."""
    if len(line) > MAX_ROW_BYTES:
        return "too_long"
    try:
        parse_tools(row["tools"])
        if "messages" in row:
            parse_conversation(row["messages"], labelled=False)
        else:
            parse_preference(row, "paired", json_cells=False)
    except (BadMessages, BadPreference):
        return "unfit"
    return None


def _extremes(found: Sequence[_Answer]) -> tuple[_Answer, _Answer]:
    """The best and the worst answer; of equal ones the first."""
    best = min(found, key=lambda one: (-one.reward, one.index))
    worst = min(found, key=lambda one: (one.reward, one.index))
    return best, worst


def _learned_part(record: SampleRecord) -> SampleRecord:
    """A sample as far as a step learns from it: its tokens, and why it failed without the words of user
    code. Its conversation is in the tokens."""
    failure = record.failure and SampleFailure(category=record.failure.category, message="")
    return SampleRecord(
        index=record.index,
        text=record.text,
        sequences=record.sequences,
        num_turns=record.num_turns,
        prompt_tokens=record.prompt_tokens,
        completion_tokens=record.completion_tokens,
        truncated=record.truncated,
        failure=failure,
        turns=record.turns,
        agent_rewards=record.agent_rewards,
    )


def _parts_of(
    records: Sequence[SampleRecord],
    rewards: Sequence[float | None],
    grades: Mapping[int, Grade],
) -> dict[str, tuple[float | None, ...]]:
    """The parts of the rewards by name, those that each sample with a reward has."""
    known = [
        grades[record.index].parts
        for record, reward in zip(records, rewards, strict=True)
        if reward is not None
    ]
    names = sorted(set.intersection(*map(set, known))) if known else []
    return {
        name: tuple(
            None if reward is None else grades[record.index].parts[name]
            for record, reward in zip(records, rewards, strict=True)
        )
        for name in names
    }


def _prompt_of(record: SampleRecord) -> tuple[Message, ...]:
    """The messages before the first answer of the policy."""
    first = next((n for n, m in enumerate(record.messages) if m.role == "assistant"), None)
    return record.messages[:first]


def _id(group: RecordedGroup, index: int) -> str:
    return sample_id(GroupId(group.group), index)


def _assistant_message(text: str) -> dict[str, object]:
    return {"role": "assistant", "content": text}


def _tool(tool: ToolSpec) -> dict[str, object]:
    function = {
        "name": tool.name,
        "description": tool.description,
        "parameters": tool.parameters,
    }
    return {"type": "function", "function": function}


def _key(content: object) -> str:
    return json.dumps(content, sort_keys=True)


def _line(row: Mapping[str, object]) -> bytes:
    return json.dumps(row, ensure_ascii=False).encode() + b"\n"
