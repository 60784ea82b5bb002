"""The text of a refusal, as the event about a push or a trigger holds it."""

from collections.abc import Sequence

from infra.spine.runtime.error_excerpt import excerpt
from schemas.errors import Issue

MOST_ISSUES = 5
"""The most issues that are recorded."""


def describe_refusal(message: str, issues: Sequence[Issue]) -> str:
    """The message, which quotes the first issue, and a line for each of the next ones."""
    return "\n".join((excerpt(message), *map(_line, issues[1:MOST_ISSUES])))


def _line(issue: Issue) -> str:
    meant = f"; did you mean {issue.did_you_mean}?" if issue.did_you_mean else ""
    return excerpt(f"{issue.key}: {issue.message}{meant}")
