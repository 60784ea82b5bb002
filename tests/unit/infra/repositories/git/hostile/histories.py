"""Commits, tags, refs and configurations that attack whoever fetches and reads them."""

import os
from collections.abc import Callable

from tests.kit.raw_repository import FILE, WHO, RawRepository
from tests.unit.infra.repositories.git.hostile.trees import Kind

PLAIN = {"f": b"x\n"}
ANY = ".*"


def plain_tree(repo: RawRepository) -> str:
    return repo.tree([(FILE, b"f", repo.blob())])


def publish(repo: RawRepository, **made: bytes) -> str:
    return repo.publish(plain_tree(repo), **made)


def of_message(message: bytes, *, head: bytes = b"") -> Kind:
    return Kind(lambda repo: publish(repo, message=message, head=head), holds=PLAIN)


def of_config(text: str, *, says: str | None = None) -> Kind:
    """A configuration of the repository itself. Every command in it would make the file `owned`."""

    def make(repo: RawRepository) -> None:
        publish(repo)
        repo.configure(text.replace("OWN", f"touch {repo.root.parent / 'canary' / 'owned'}"))

    return Kind(make, says, holds=None if says else PLAIN)


def of_refs(*names: str, says: str | None = None) -> Kind:
    """Packed refs with these names, besides `main`."""

    def make(repo: RawRepository) -> None:
        sha = publish(repo)
        lines = "".join(f"{sha} {name}\n" for name in names)
        (repo.root / "packed-refs").write_bytes(lines.encode(errors="surrogateescape"))

    return Kind(make, says, holds=None if says else PLAIN)


def hooks(repo: RawRepository) -> None:
    publish(repo)
    for name in (
        "post-checkout",
        "post-upload-pack",
        "reference-transaction",
        "fsmonitor-watchman",
    ):
        path = repo.root / "hooks" / name
        path.write_text(f"#!/bin/sh\ntouch {repo.root.parent / 'canary' / 'owned'}\n")
        path.chmod(0o755)


def tag_chain(repo: RawRepository) -> None:
    """A tag of a tag of a tag, 500 times."""
    sha, kind = publish(repo), "commit"
    for number in range(500):
        text = f"object {sha}\ntype {kind}\ntag t{number}\ntagger {WHO}\n\nx\n"
        sha, kind = repo.put("tag", text.encode()), "tag"
    repo.point("refs/tags/deep", sha)


def head_of(text: str) -> Callable[[RawRepository], object]:
    def make(repo: RawRepository) -> None:
        publish(repo)
        (repo.root / "HEAD").write_text(text)

    return make


def main_is(kind: str) -> Callable[[RawRepository], object]:
    """`main` leads to something that is not a commit."""

    def make(repo: RawRepository) -> None:
        sha = repo.blob() if kind == "blob" else plain_tree(repo)
        repo.point("refs/heads/main", sha)

    return make


def linked_head(repo: RawRepository) -> None:
    publish(repo)
    (repo.root / "HEAD").unlink()
    (repo.root / "HEAD").symlink_to("/etc/hostname")


def alternates(repo: RawRepository) -> None:
    """Objects of another directory of the server."""
    publish(repo)
    (repo.root / "objects" / "info").mkdir()
    (repo.root / "objects" / "info" / "alternates").write_text("/etc\n/proc/self/root\n../../..\n")


def http_alternates(repo: RawRepository) -> None:
    publish(repo)
    (repo.root / "objects" / "info").mkdir()
    (repo.root / "objects" / "info" / "http-alternates").write_text("http://127.0.0.1:1/o/\n")


def replaced(repo: RawRepository) -> None:
    """A replacement of the newest commit by another one."""
    sha = publish(repo)
    other = repo.commit(repo.tree([(FILE, b"evil", repo.blob())]))
    repo.point(f"refs/replace/{sha}", other)


def grafted(repo: RawRepository) -> None:
    sha = publish(repo)
    (repo.root / "info").mkdir()
    (repo.root / "info" / "grafts").write_text(f"{sha} {'2' * 40}\n")
    (repo.root / "shallow").write_text(f"{sha}\n")


def parentless(repo: RawRepository) -> None:
    sha = repo.commit(plain_tree(repo), parents=["3" * 40])
    repo.point("refs/heads/main", sha)


def treeless(repo: RawRepository) -> None:
    repo.publish("4" * 40)


def authorless(repo: RawRepository) -> None:
    sha = repo.put("commit", f"tree {plain_tree(repo)}\nauthor x\n\nm\n".encode())
    repo.point("refs/heads/main", sha)


def corrupt(repo: RawRepository) -> None:
    """A file whose bytes do not have the id under which they are stored."""
    publish(repo)
    sha = repo.blob()
    other = repo.blob("something else\n")
    places = [repo.root / "objects" / one[:2] / one[2:] for one in (sha, other)]
    places[0].write_bytes(places[1].read_bytes())


def many_refs(repo: RawRepository) -> None:
    sha = publish(repo)
    lines = "".join(f"{sha} refs/heads/b{number:06d}\n" for number in range(100_000))
    (repo.root / "packed-refs").write_text(
        "# pack-refs with: peeled fully-peeled sorted \n" + lines
    )


def common_directory(repo: RawRepository) -> None:
    publish(repo)
    (repo.root / "commondir").write_text("/root/.ssh\n")


def tag_as_branch(repo: RawRepository) -> None:
    """`main` leads to a tag, which git itself would refuse to write there."""
    text = f"object {publish(repo)}\ntype commit\ntag t\ntagger {WHO}\n\nx\n"
    repo.point("refs/heads/main", repo.put("tag", text.encode()))


def main_holds(text: str) -> Kind:
    """The file of the ref `main` has this text."""

    def make(repo: RawRepository) -> None:
        publish(repo)
        (repo.root / "refs" / "heads" / "main").write_text(text)

    return Kind(make, "branch main|not our ref|does not give out|cannot use")


def object_is_a_directory(repo: RawRepository) -> None:
    sha = publish(repo)
    path = repo.root / "objects" / sha[:2] / sha[2:]
    path.unlink()
    path.mkdir()


def pipe_at(name: str) -> Kind:
    """A named pipe, which git opens and waits for."""

    def make(repo: RawRepository) -> None:
        publish(repo)
        path = repo.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        os.mkfifo(path)

    return Kind(make, "named pipe")


def false_depth(repo: RawRepository) -> None:
    publish(repo)
    (repo.root / "shallow").write_text("not a commit\n")


LAZY = """
[core]
\trepositoryformatversion = 1
[extensions]
\tpartialClone = evil
[remote "evil"]
\tpromisor = true
\turl = ext::sh -c 'OWN'
\tuploadpack = OWN
[protocol]
\tallow = always
[protocol "ext"]
\tallow = always
"""
COMMANDS = """
[core]
\tfsmonitor = OWN
\tsshCommand = OWN
\tpager = OWN
\teditor = OWN
\taskPass = OWN
\talternateRefsCommand = OWN
\tgitProxy = OWN
\thooksPath = hooks
[uploadpack]
\tpackObjectsHook = OWN
[credential]
\thelper = !OWN
[diff]
\texternal = OWN
[filter "evil"]
\tsmudge = OWN
\tclean = OWN
\tprocess = OWN
\trequired = true
[gpg]
\tprogram = OWN
[alias]
\tupload-pack = !OWN
[url "ext::sh -c OWN"]
\tinsteadOf = https://
"""

HISTORIES: dict[str, Kind] = {
    "a message of 100 MB": of_message(b"m" * 100_000_000),
    "a message of terminal escapes": of_message(b"\x1b]0;owned\x07\x1b[2J\r\n"),
    "a message in an unknown encoding": of_message(b"\xff\xfe", head=b"encoding UTF-7-OWN\n"),
    "a signature of 1 MB": of_message(b"m\n", head=b"gpgsig " + b"a" * 1_000_000 + b"\n"),
    "a header that repeats": of_message(b"m\n", head=b"mergetag x\n" * 10_000),
    "commands in the configuration": of_config(COMMANDS),
    "an included configuration": of_config("[include]\n\tpath = /etc/passwd\n", says=ANY),
    "a remote that is fetched on demand": of_config(LAZY),
    "hooks": Kind(hooks, holds=PLAIN),
    "a tag of 500 tags": Kind(tag_chain, holds=PLAIN),
    "refs like options": of_refs("refs/heads/--upload-pack=touch owned", "refs/heads/-x"),
    "refs with line ends of Unicode": of_refs(f"refs/heads/x\u2028{'5' * 40}\trefs/heads/main"),
    "refs with terminal escapes": of_refs("refs/heads/\x1b[2J", "refs/heads/\x9b31m"),
    "refs that climb": of_refs("refs/heads/../../../../etc/x", "refs/../HEAD", says=ANY),
    "refs that contradict": of_refs("refs/heads/main/below", "refs/heads/MAIN"),
    "a ref of 10,000 characters": of_refs("refs/heads/" + "r" * 10_000),
    "100,000 branches": Kind(many_refs, holds=PLAIN),
    "a default branch like an option": Kind(
        head_of("ref: refs/heads/--output=owned\n"), holds=PLAIN
    ),
    "a default branch outside": Kind(head_of("ref: ../../../../etc/passwd\n"), ANY),
    "a default branch that is a link": Kind(linked_head, ANY),
    "a default branch without a commit": Kind(head_of("ref: refs/heads/unborn\n"), holds=PLAIN),
    "a branch that is a file": Kind(main_is("blob"), ANY),
    "a branch that is a tree": Kind(main_is("tree"), ANY),
    "objects of other directories": Kind(alternates, holds=PLAIN),
    "objects of other hosts": Kind(http_alternates, holds=PLAIN),
    "a replaced commit": Kind(replaced, holds=PLAIN),
    "grafts and a false depth": Kind(grafted, holds=PLAIN),
    "a missing parent": Kind(parentless, holds=PLAIN),
    "a missing tree": Kind(treeless, ANY),
    "a commit without a committer": Kind(authorless, "broken objects"),
    "bytes of another object": Kind(corrupt, ANY),
    "a branch that is a tag": Kind(tag_as_branch, "does not lead to a commit"),
    "a branch of a commit that is missing": main_holds("7" * 40 + "\n"),
    "a branch of no commit": main_holds("z" * 40 + "\n"),
    "a branch of NULs": main_holds("\0" * 40),
    "a branch that is a link outside": main_holds("ref: /etc/passwd\n"),
    "a branch that leads to itself": main_holds("ref: refs/heads/main\n"),
    "a commit that is a directory": Kind(object_is_a_directory, "cannot use"),
    "a default branch that is a pipe": pipe_at("HEAD"),
    "a configuration that is a pipe": pipe_at("config"),
    "a branch that is a pipe": pipe_at("refs/heads/main"),
    "objects of a pipe": pipe_at("objects/info/alternates"),
    "a depth that is not one": Kind(false_depth, "bad shallow line"),
    "a configuration that is not one": of_config("[core\n", says="bad config line"),
    "a version of the future": of_config("[core]\nrepositoryformatversion = 99\n", says="99"),
    "an unknown extension": of_config(
        "[core]\n\trepositoryformatversion = 1\n[extensions]\n\trefStorage = x\n", says="x|ref"
    ),
    "ids of 64 digits": of_config("[extensions]\n\tobjectFormat = sha256\n", says="extension"),
    "hidden refs": of_config("[transfer]\n\thideRefs = refs\n", says="no branch main"),
    "nothing at all": Kind(lambda repo: None, "no branch main"),
    "files of another directory": Kind(common_directory, ANY),
}
