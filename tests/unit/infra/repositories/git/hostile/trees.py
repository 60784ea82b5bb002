"""Trees that attack whoever lists, unpacks or checks them out. Each kind says what must come of it."""

import unicodedata
from collections.abc import Callable
from dataclasses import dataclass

from tests.kit.raw_repository import DIRECTORY, EXECUTABLE, FILE, LINK, MODULE, RawRepository

PAYLOAD = b"#!/bin/sh\ntouch owned\n"


@dataclass(frozen=True)
class Kind:
    """A hostile repository. Its newest commit is refused with a message that matches `says`, or its
    snapshot has exactly the files in `holds`."""

    make: Callable[[RawRepository], object]
    says: str | None = None
    holds: dict[str, bytes] | None = None


def of_entry(mode: str, name: bytes | str, says: str | None) -> Kind:
    """A tree with one entry of this mode and name."""
    raw = name.encode() if isinstance(name, str) else name

    def make(repo: RawRepository) -> None:
        sha = repo.blob(PAYLOAD)
        if mode == DIRECTORY:
            sha = repo.tree([(FILE, b"config", sha)])
        repo.publish(repo.tree([(mode, raw, sha)]))

    holds = {raw.decode(): PAYLOAD} if says is None else None
    return Kind(make, says, holds)


def of_path(path: str, says: str) -> Kind:
    return Kind(lambda repo: repo.publish(repo.nest(path, repo.blob(PAYLOAD))), says)


def of_blob(data: bytes, says: str) -> Kind:
    return Kind(lambda repo: repo.publish(repo.tree([(FILE, b"f", repo.blob(data))])), says)


def wide(repo: RawRepository) -> None:
    blob = repo.blob()
    repo.publish(repo.tree((FILE, b"%07d" % number, blob) for number in range(1_000_000)))


def bomb(repo: RawRepository, *, leaf: str) -> None:
    """10^10 entries out of ten objects."""
    tree = leaf
    for _ in range(10):
        tree = repo.tree((DIRECTORY, b"%d" % number, tree) for number in range(10))
    repo.publish(tree)


def heavy(repo: RawRepository) -> None:
    """Two files that are one object of 101 MiB, which takes 100 KiB of a pack."""
    blob = repo.blob(bytes(101 << 20))
    repo.publish(repo.tree([(FILE, b"a", blob), (FILE, b"b", blob)]))


def link_and_file(repo: RawRepository) -> None:
    """A link to a directory outside, and a file below the same name."""
    inside = repo.tree([(FILE, b"authorized_keys", repo.blob(PAYLOAD))])
    repo.publish(repo.tree([(LINK, b"d", repo.blob("/root/.ssh")), (DIRECTORY, b"d", inside)]))


def names(*given: str) -> Callable[[RawRepository], object]:
    def make(repo: RawRepository) -> None:
        blob = repo.blob(PAYLOAD)
        repo.publish(repo.tree((FILE, name, blob) for name in sorted(n.encode() for n in given)))

    return make


def missing(repo: RawRepository) -> None:
    repo.publish(repo.tree([(FILE, b"f", "1" * 40)]))


def other_kind(mode: str) -> Callable[[RawRepository], object]:
    """An entry whose object is of another kind than its mode says."""

    def make(repo: RawRepository) -> None:
        blob = repo.blob(PAYLOAD)
        sha = blob if mode == DIRECTORY else repo.tree([(FILE, b"f", blob)])
        repo.publish(repo.tree([(mode, b"f", sha)]))

    return make


def twice(repo: RawRepository) -> None:
    repo.publish(repo.tree([(FILE, b"f", repo.blob("a")), (FILE, b"f", repo.blob("b"))]))


def unsorted(repo: RawRepository) -> None:
    blob = repo.blob()
    repo.publish(repo.tree([(FILE, b"z", blob), (FILE, b"a", blob)]))


def truncated(repo: RawRepository) -> None:
    repo.publish(repo.put("tree", b"100644 f\0" + b"\1" * 7))


def harmless(name: str, text: bytes) -> Kind:
    """A file that steers git's own filters and must come out as it is."""
    return Kind(
        lambda repo: repo.publish(repo.tree([(FILE, name.encode(), repo.blob(text))])),
        holds={name: text},
    )


NFC, NFD = (unicodedata.normalize(form, "größe") for form in ("NFC", "NFD"))
BROKEN = r"broken objects|cannot use what|does not answer|is not"

TREES: dict[str, Kind] = {
    "a million files in one tree": Kind(wide, "more than 10000 files"),
    "10^10 files": Kind(
        lambda r: bomb(r, leaf=r.tree([(FILE, b"f", r.blob())])), "more than 10000"
    ),
    "10^10 empty directories": Kind(lambda r: bomb(r, leaf=r.tree([])), "more than 10000"),
    "10,000 levels": of_path("/".join("d" * 10_000), "levels deep|bytes; shorten|does not answer"),
    "33 levels": of_path("/".join("d" * 33), "33 levels deep"),
    "a name of 1 MB": of_entry(FILE, b"n" * 1_000_000, "path of more than 1024 bytes"),
    "a path of 1,025 bytes": of_path("/".join(["d" * 204] * 5 + ["f"]), "more than 1024|255"),
    "a name of 256 bytes": of_entry(FILE, b"n" * 256, "more than 255 bytes"),
    "200 MiB out of nothing": Kind(heavy, "more than 200 MiB|more than 10000 files"),
    "a symbolic link": of_entry(LINK, "link", "symbolic link"),
    "a link and a file below it": Kind(link_and_file, BROKEN + "|symbolic link"),
    "a submodule": of_entry(MODULE, "module", "submodule"),
    ".git as a directory": of_entry(DIRECTORY, ".git", r"\.git|broken"),
    ".GIT": of_entry(DIRECTORY, ".GIT", r"\.git|broken"),
    ".git with a space": of_entry(DIRECTORY, ".git ", r"\.git|broken"),
    ".git with a dot": of_entry(DIRECTORY, ".git.", r"\.git|broken"),
    "git~1": of_entry(DIRECTORY, "git~1", r"\.git|broken"),
    ".git with an ignored character": of_entry(DIRECTORY, ".g\u200cit", "shown|broken"),
    ".git as a stream": of_entry(DIRECTORY, ".git::$INDEX_ALLOCATION", r"\.git|broken"),
    ".gitmodules": of_entry(FILE, ".gitmodules", r"\.git|broken"),
    "two dots": of_entry(DIRECTORY, "..", "not a path|broken"),
    "one dot": of_entry(DIRECTORY, ".", "not a path|broken"),
    "an empty name": of_entry(FILE, "", "not a path|broken|cannot use"),
    "a slash in a name": of_entry(FILE, "a/../../b", "not a path|broken"),
    "an absolute name": of_entry(FILE, "/etc/cron.d/x", "not a path|broken"),
    "a backslash": of_entry(FILE, "..\\..\\b", "not a path|broken"),
    "a line break in a name": of_entry(FILE, "a\nb", "cannot be shown"),
    "terminal escapes in a name": of_entry(FILE, "\x1b]0;owned\x07", "cannot be shown"),
    "a name that reads backwards": of_entry(FILE, "a\u202eyp.exe", "cannot be shown"),
    "a name that is not UTF-8": of_entry(FILE, b"\xff\xfe", "not a UTF-8"),
    "a surrogate": of_entry(FILE, b"\xed\xa0\x80", "not a UTF-8"),
    "names that differ by case": Kind(names("Readme", "readme"), "one name on some systems"),
    "names that differ by form": Kind(names(NFC, NFD), "one name on some systems"),
    "a name like an option": of_entry(FILE, "--upload-pack=touch owned", None),
    "a name of a device": of_entry(FILE, "CON", None),
    "a setuid mode": of_entry("104755", "f", None),
    "a padded mode": of_entry("0100644", "f", BROKEN + "|plain"),
    "a mode of a device": of_entry("060000", "f", BROKEN),
    "a tree as a file": Kind(other_kind(FILE), ".*"),
    "a file as a tree": Kind(other_kind(DIRECTORY), ".*"),
    "a missing file": Kind(missing, ".*"),
    "a name twice": Kind(twice, BROKEN),
    "an unsorted tree": Kind(unsorted, BROKEN),
    "a truncated tree": Kind(truncated, ".*"),
    "a pointer of Git LFS": of_blob(b"version https://git-lfs.github.com/spec/v1\noid x\n", "LFS"),
    "filters in .gitattributes": harmless(
        ".gitattributes", b"* filter=evil export-subst ident text eol=crlf merge=evil diff=evil\n"
    ),
    "a poisoned .mailmap": harmless(".mailmap", b"<" + b"a" * 100_000 + b"> \x1b[2J <t@e.org>\n"),
    "an executable file": Kind(
        lambda repo: repo.publish(repo.tree([(EXECUTABLE, b"run", repo.blob(PAYLOAD))])),
        holds={"run": PAYLOAD},
    ),
}
