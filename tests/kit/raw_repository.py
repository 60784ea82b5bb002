"""A bare git repository whose objects and files are written byte by byte, so that it can hold what git
itself would refuse to make."""

import hashlib
import zlib
from collections.abc import Iterable, Sequence
from pathlib import Path

TreeEntry = tuple[str, bytes, str]
"""A mode, a name and an object's id."""

FILE, EXECUTABLE, LINK, DIRECTORY, MODULE = "100644", "100755", "120000", "40000", "160000"
WHO = "t <t@example.org> 1700000000 +0000"


class RawRepository:
    """A repository at `root`, with the branch `main` as its default."""

    def __init__(self, root: Path) -> None:
        self.root = root
        for name in ("objects", "refs/heads", "refs/tags", "hooks"):
            (root / name).mkdir(parents=True)
        (root / "HEAD").write_text("ref: refs/heads/main\n")
        self.configure("[core]\n\trepositoryformatversion = 0\n\tbare = true\n")

    def configure(self, text: str) -> None:
        """Append to the repository's own configuration."""
        with (self.root / "config").open("a") as config:
            config.write(text)

    def put(self, kind: str, data: bytes) -> str:
        """Write an object, and return its id."""
        whole = f"{kind} {len(data)}\0".encode() + data
        sha = hashlib.sha1(whole, usedforsecurity=False).hexdigest()
        path = self.root / "objects" / sha[:2] / sha[2:]
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(zlib.compress(whole, 1))
        return sha

    def blob(self, data: bytes | str = b"x\n") -> str:
        return self.put("blob", data.encode() if isinstance(data, str) else data)

    def tree(self, entries: Iterable[TreeEntry]) -> str:
        """Write a tree of these entries, in this order."""
        return self.put("tree", pack_entries(entries))

    def commit(
        self,
        tree: str,
        *,
        parents: Sequence[str] = (),
        message: bytes = b"made\n",
        head: bytes = b"",
    ) -> str:
        """Write a commit. `head` are further lines of its header."""
        lines = "".join(f"parent {sha}\n" for sha in parents)
        begin = f"tree {tree}\n{lines}author {WHO}\ncommitter {WHO}\n".encode()
        return self.put("commit", begin + head + b"\n" + message)

    def point(self, name: str, sha: str) -> None:
        """Write a ref."""
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{sha}\n")

    def publish(self, tree: str, **made: bytes) -> str:
        """Make a commit of this tree the newest one of `main`."""
        sha = self.commit(tree, **made)  # type: ignore[arg-type]  # head and message are bytes
        self.point("refs/heads/main", sha)
        return sha

    def nest(self, path: str, sha: str, *, mode: str = FILE) -> str:
        """Write the trees of a path that leads to one object. Returns the outermost tree."""
        for part in reversed(path.split("/")):
            sha, mode = self.tree([(mode, part.encode(), sha)]), DIRECTORY
        return sha


def pack_entries(entries: Iterable[TreeEntry]) -> bytes:
    """The content of a tree object."""
    return b"".join(
        b"%s %s\0%s" % (mode.encode(), name, bytes.fromhex(sha)) for mode, name, sha in entries
    )
