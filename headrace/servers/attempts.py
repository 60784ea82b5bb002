"""The common terms of all generations of the protocol: an attempt, its result, and how it can fail."""

import json
import math
from dataclasses import dataclass
from typing import Any, Literal

Json = dict[str, Any]
"""A JSON object. Its values are checked where they are used."""

Category = Literal["timeout", "raised", "invalid", "process", "again"]
"""The kinds of failures: too slow, an error of the server's user code, a wrong request or answer, the
server itself, and failures that say nothing about the sample, which is then made again."""

LONGEST_TEXT = 2000

CATEGORIES: dict[str, Category] = {
    "timeout": "timeout",
    "validation_error": "invalid",
    "lease_expired": "again",
}
"""The categories of the protocol that are not errors of the server's user code."""


class AttemptFailed(Exception):
    """The attempt has no result, and the message says why."""

    def __init__(self, category: Category, message: str) -> None:
        super().__init__(message)
        self.category: Category = category
        self.message = message[:LONGEST_TEXT]


@dataclass(frozen=True)
class ServedAttempt:
    """One attempt that a server shall make. `chat_url` is the endpoint of the policy for it, which takes
    `api_key`. The server grades too, so it gets the label."""

    name: str
    messages: list[Json]
    label: str | None
    metadata: Json
    chat_url: str
    api_key: str
    agent_timeout_s: float
    grader_timeout_s: float


@dataclass(frozen=True)
class ServerGrade:
    """The reward of an attempt. Without a reward, `problem` says why."""

    reward: float | None
    problem: str | None = None


def chat_messages(prompt: list[Json]) -> list[Json]:
    """Return the prompt in the form of OpenAI's chat completions."""
    return [_chat_message(message) for message in prompt]


def _chat_message(message: Json) -> Json:
    chat = {name: value for name, value in message.items() if name != "tool_calls"}
    if calls := message.get("tool_calls"):
        chat["tool_calls"] = [
            {
                "type": "function",
                "id": call["id"],
                "function": {"name": call["name"], "arguments": call["arguments"]},
            }
            for call in calls
        ]
    return chat


def grade_of(sample: object) -> ServerGrade:
    """Return the grade in a sample of the protocol. Raises AttemptFailed when it is not a sample."""
    if not isinstance(sample, dict):
        raise AttemptFailed("invalid", "the rollout server answered success without a sample")
    if sample.get("remove_sample") is True:
        return ServerGrade(None, "the rollout server removed this sample")
    reward = sample.get("reward")
    if reward is None:
        return ServerGrade(
            None,
            "the rollout server returned no reward; give its backend a grader, and the dataset's row a "
            "label or metadata",
        )
    if isinstance(reward, bool) or not isinstance(reward, int | float):
        kind = type(reward).__name__
        return ServerGrade(
            None, f"the rollout server returned {kind} as the reward; return a number"
        )
    return _finite(reward)


def mean_grade(samples: object) -> ServerGrade:
    """Return the grade of an attempt with several samples: the mean of those that have one, and were not
    removed. Raises AttemptFailed when there are no samples."""
    if not isinstance(samples, dict) or not samples:
        raise AttemptFailed("invalid", "the rollout server graded no sample of this rollout")
    removed = "the rollout server removed this sample"
    grades = [grade for each in samples.values() if (grade := grade_of(each)).problem != removed]
    if not grades:
        return ServerGrade(None, removed)
    rewards = [grade.reward for grade in grades if grade.reward is not None]
    if len(rewards) < len(grades):
        return next(grade for grade in grades if grade.reward is None)
    return _finite(math.fsum(rewards) / len(rewards))


def _finite(reward: float) -> ServerGrade:
    try:
        if math.isfinite(reward):
            return ServerGrade(float(reward))
    except OverflowError:
        pass
    return ServerGrade(
        None,
        f"the rollout server returned {str(reward)[:80]} as the reward; return a finite number",
    )


def failure_of(answer: Json, *, status: str) -> AttemptFailed:
    """Return the failure that a server reports."""
    category = str(answer.get("err_category") or "")
    text = str(answer.get("err_message") or "it gave no reason")
    what = f"the rollout server reports {status}"
    if category:
        what += f" ({category[:80]})"
    return AttemptFailed(CATEGORIES.get(category, "raised"), f"{what}: {text}")


def parse_object(body: bytes, *, of: str) -> Json:
    """Return the JSON object in a body. Raises AttemptFailed when it holds something else."""
    try:
        found = json.loads(body)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        excerpt = body[:200].decode(errors="replace")
        raise AttemptFailed(
            "process",
            f"the rollout server answered {of} with {excerpt!r}, which is not a JSON object",
        )
    return found
