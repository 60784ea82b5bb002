"""Tags and notes that people give to runs."""

from collections.abc import Callable, Sequence

from infra.ports.actor import acting
from infra.readmodel.registry import RunNote, RunNotes
from producers.core.lookup import Lookup
from schemas.errors import InvalidConfig, Issue

LONGEST_TAG = 40
MOST_TAGS = 20
LONGEST_NOTE = 4000
SEPARATORS = (" ", ",", '"')


def check_tags(tags: Sequence[str]) -> tuple[str, ...]:
    """The tags in alphabetical order, each once. Raises InvalidConfig when one is not a tag, or when
    there are too many."""
    for tag in tags:
        if not 0 < len(tag) <= LONGEST_TAG or not tag.isprintable() or set(tag) & set(SEPARATORS):
            raise _invalid(
                "tags",
                f"{tag[: LONGEST_TAG + 1]!r} is not a tag; write 1 to {LONGEST_TAG} characters "
                "without spaces, commas and quotes",
            )
    found = tuple(sorted(set(tags)))
    if len(found) > MOST_TAGS:
        raise _invalid("tags", f"{len(found)} tags are too many; a run has at most {MOST_TAGS}")
    return found


def check_note(note: str) -> str:
    """The note without space around it. Raises InvalidConfig when it is too long, or has characters that
    no text has."""
    text = note.replace("\r\n", "\n").strip()
    if len(text) > LONGEST_NOTE:
        raise _invalid("note", f"the note has {len(text)} characters; write at most {LONGEST_NOTE}")
    if "\0" in text or any("\ud800" <= character <= "\udfff" for character in text):
        raise _invalid("note", "the note has a NUL character or half a character; remove it")
    return text


class Notes:
    """Changes the tags and notes of runs that the task may see. All methods raise NotFound and
    InvalidConfig."""

    def __init__(self, lookup: Lookup, notes: RunNotes) -> None:
        self._lookup = lookup
        self._notes = notes

    async def tag(self, ref: str, *, add: Sequence[str], remove: Sequence[str]) -> str:
        """Add and remove tags. Returns the run's id."""
        added = check_tags(add)
        return await self._change(
            ref,
            lambda now: RunNote(check_tags([*set(now.tags) - set(remove), *added]), now.note),
        )

    async def write(self, ref: str, note: str) -> str:
        """Replace the note; an empty one removes it. Returns the run's id."""
        text = check_note(note)
        return await self._change(ref, lambda now: RunNote(now.tags, text))

    async def replace(self, ref: str, *, tags: Sequence[str], note: str) -> str:
        """Replace the tags and the note. Returns the run's id."""
        kept = RunNote(check_tags(tags), check_note(note))
        return await self._change(ref, lambda _: kept)

    async def _change(self, ref: str, change: Callable[[RunNote], RunNote]) -> str:
        run = (await self._lookup.run(ref)).run
        actor = acting()
        await self._notes.change(run, change, by=actor.owner if actor else None)
        return run


def _invalid(key: str, message: str) -> InvalidConfig:
    return InvalidConfig(message, issues=(Issue(key, message),))
