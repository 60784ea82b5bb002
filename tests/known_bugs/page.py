"""docs/known_bugs.md, generated from the known bugs: `python -m tests.known_bugs.page`."""

from pathlib import Path

from tests.known_bugs import (
    architectures,
    distillation,
    engines,
    losses,
    preferences,
    rewards,
    tokens,
)
from tests.known_bugs.known_bug import KnownBug

GROUPS = {
    "Rewards and advantages": rewards,
    "Losses": losses,
    "Preferences": preferences,
    "Distillation": distillation,
    "Tokens, masks, packing": tokens,
    "Architectures": architectures,
    "Sampler and optimizer": engines,
}
KNOWN_BUGS: tuple[KnownBug, ...] = tuple(e for group in GROUPS.values() for e in group.KNOWN_BUGS)
PAGE = Path(__file__).resolve().parents[2] / "docs" / "known_bugs.md"

HEAD = """# Known bugs

This page lists bugs that public trainers had, each with the thread that reported it. For each bug, a
test puts the bug into our code as a mutation of one function. The named test must fail with the
mutation and pass without it (`tests/known_bugs/test_known_bugs.py`).

When we hear of another bug, it gets an entry in `tests/known_bugs/` and, if no test detects it, a new
test. `python -m tests.known_bugs.page` then writes this page.
"""


def markdown() -> str:
    """The page."""
    lines = [HEAD]
    for title, group in GROUPS.items():
        lines += [
            f"## {title}",
            "",
            "| bug | seen in | in our code | killed by |",
            "|---|---|---|---|",
        ]
        lines += [_row(known_bug) for known_bug in group.KNOWN_BUGS]
        lines.append("")
    return "\n".join(lines)


def _row(known_bug: KnownBug) -> str:
    repository, _, number = known_bug.seen.partition("#")
    link = f"[{known_bug.seen}](https://github.com/{repository}/issues/{number})"
    return f"| {known_bug.bug} | {link} | `{known_bug.code}` | `{known_bug.test}` |"


if __name__ == "__main__":
    PAGE.write_text(markdown())
