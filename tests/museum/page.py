"""docs/museum.md, made from the exhibits: `python -m tests.museum.page`."""

from pathlib import Path

from tests.museum import engines, losses, rewards, tokens
from tests.museum.exhibit import Exhibit

ROOMS = {
    "Rewards and advantages": rewards,
    "Losses": losses,
    "Tokens, masks, packing": tokens,
    "Sampler and optimizer": engines,
}
EXHIBITS: tuple[Exhibit, ...] = tuple(e for room in ROOMS.values() for e in room.EXHIBITS)
PAGE = Path(__file__).resolve().parents[2] / "docs" / "museum.md"

HEAD = """# The museum

Bugs that public trainers really had, or were found to have, in the thread that is named. Each is put
into our code as a mutation of one function, and a test must fail with it and pass without it:
`tests/museum/test_museum.py`. A bug that we hear of gets an exhibit in `tests/museum/` and, where no
test kills it, a test; then `python -m tests.museum.page` writes this page.
"""


def markdown() -> str:
    """The page."""
    lines = [HEAD]
    for title, room in ROOMS.items():
        lines += [
            f"## {title}",
            "",
            "| bug | seen in | in our code | killed by |",
            "|---|---|---|---|",
        ]
        lines += [_row(exhibit) for exhibit in room.EXHIBITS]
        lines.append("")
    return "\n".join(lines)


def _row(exhibit: Exhibit) -> str:
    repository, _, number = exhibit.seen.partition("#")
    link = f"[{exhibit.seen}](https://github.com/{repository}/issues/{number})"
    return f"| {exhibit.bug} | {link} | `{exhibit.code}` | `{exhibit.test}` |"


if __name__ == "__main__":
    PAGE.write_text(markdown())
