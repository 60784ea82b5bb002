"""A git server over TLS that lies. The first part of a URL's path says how.

It runs in a process of its own, so that its work is not that of the process under test:
`python -m tests.kit.hostile_git_server ROOT CERTIFICATE KEY LOG` prints its port. `ROOT/source` is the
repository that its true answers show. LOG gets a line of JSON for each request.
"""

import asyncio
import gzip
import json
import os
import ssl
import sys
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from tests.kit import hostile_packs as packs

RESULT = "application/x-git-upload-pack-result"
ADVERT = "application/x-git-upload-pack-advertisement"
OUTSIDE = "https://127.0.0.1:{canary}"
HOUR_S = 3600.0
SHA = "7" * 40


@dataclass(frozen=True)
class Request:
    """A request, and the true answer to it (its head and its content)."""

    method: str
    path: str
    headers: Mapping[str, str]
    body: bytes
    root: Path
    canary: str

    @property
    def kind(self) -> str:
        return self.path.split("/")[1]

    @property
    def is_fetch(self) -> bool:
        return b"command=fetch" in self._plain

    @property
    def is_listing(self) -> bool:
        return b"command=ls-refs" in self._plain

    @property
    def _plain(self) -> bytes:
        is_packed = self.headers.get("content-encoding") == "gzip"
        return gzip.decompress(self.body) if is_packed else self.body

    @property
    def type(self) -> str:
        return ADVERT if self.method == "GET" else RESULT

    async def truth(self) -> tuple[dict[str, str], bytes]:
        path, _, query = self.path.partition("?")
        process = await asyncio.create_subprocess_exec(
            "git", "http-backend",
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
            env={
                "PATH": os.environ["PATH"],
                "GIT_PROJECT_ROOT": str(self.root),
                "GIT_HTTP_EXPORT_ALL": "1",
                "GIT_CONFIG_COUNT": "1",
                "GIT_CONFIG_KEY_0": "safe.directory",
                "GIT_CONFIG_VALUE_0": "*",
                "GIT_PROTOCOL": self.headers.get("git-protocol", ""),
                "REQUEST_METHOD": self.method,
                "PATH_INFO": "/" + path.split("/", 2)[2],
                "QUERY_STRING": query,
                "CONTENT_TYPE": self.headers.get("content-type", ""),
                "HTTP_CONTENT_ENCODING": self.headers.get("content-encoding", ""),
                "CONTENT_LENGTH": str(len(self.body)),
            },
        )  # fmt: skip
        said, _ = await process.communicate(self.body)
        head, _, content = said.partition(b"\r\n\r\n")
        lines = (line.partition(": ") for line in head.decode().splitlines())
        return {name: value for name, _, value in lines}, content


@dataclass
class Answer:
    """An answer. Parts of `more` follow the content, and then the connection ends."""

    content: bytes = b""
    type: str = RESULT
    status: str = "200 OK"
    headers: tuple[str, ...] = ()
    more: AsyncIterator[bytes] | None = None
    raw: bool = field(default=False)


Lie = Callable[[Request], Answer | None]
"""Returns the answer to a request, or None for the true one."""


async def repeat(data: bytes, *, every_s: float = 0.0) -> AsyncIterator[bytes]:
    while True:
        yield data
        await asyncio.sleep(every_s)


def redirect(location: str, *, only: str | None = None) -> Lie:
    def lie(request: Request) -> Answer | None:
        if only is not None and request.method != only:
            return None
        place = location.format(canary=request.canary, rest=request.path)
        return Answer(status="302 Found", headers=(f"Location: {place}",), type="text/plain")

    return lie


def on_listing(answer: Callable[[], Answer]) -> Lie:
    """A true beginning, and then a lie about the refs."""
    return lambda request: answer() if request.is_listing else None


def on_fetch(answer: Callable[[], Answer]) -> Lie:
    return lambda request: answer() if request.is_fetch else None


def on_begin(answer: Callable[[], Answer]) -> Lie:
    return lambda request: answer() if request.method == "GET" else None


def always(answer: Callable[[], Answer]) -> Lie:
    return lambda request: answer()


def refs(*lines: str) -> Lie:
    return on_listing(lambda: Answer(packs.listing(*lines)))


def sends(made: Callable[[], bytes]) -> Lie:
    return on_fetch(lambda: Answer(packs.transfer(made())))


def endless_pack() -> Answer:
    blob = packs.entry(packs.BLOB, os.urandom(1 << 19))
    begin = packs.packet("packfile\n") + packs.band(packs.beginning(1 << 20))
    return Answer(begin, more=repeat(packs.band(blob)))


def bomb(content: Callable[[], bytes]) -> Callable[[], Answer]:
    packed = cache(lambda: gzip.compress(content(), 6))
    return lambda: Answer(packed(), headers=("Content-Encoding: gzip",))


def changing(request: Request) -> Answer | None:
    """Another commit in each listing, which nobody can fetch."""
    if request.is_listing:
        sha = os.urandom(20).hex()
        return Answer(
            packs.listing(f"{sha} HEAD symref-target:refs/heads/main", f"{sha} refs/heads/main")
        )
    return None


def wrong_type(request: Request) -> Answer | None:
    return Answer(packs.advertisement(), type="text/html") if request.method == "GET" else None


def dumb(request: Request) -> Answer | None:
    """A server without git's own protocol, whose objects are on other hosts."""
    if "info/refs" in request.path:
        return Answer(f"{SHA}\trefs/heads/main\n".encode(), type="text/plain")
    if "alternates" in request.path:
        return Answer(f"https://127.0.0.1:{request.canary}/o\n".encode(), type="text/plain")
    if request.path.endswith("/HEAD"):
        return Answer(b"ref: refs/heads/main\n", type="text/plain")
    return Answer(status="404 Not Found", type="text/plain")


def moved(request: Request) -> Answer | None:
    """The repository is at another host, where it is served truly."""
    if request.headers.get("host", "").startswith("rebinds."):
        return None
    port = request.headers["host"].rpartition(":")[2]
    return redirect(f"https://rebinds.example.org:{port}{request.path}")(request)


REST = "/info/refs?service=git-upload-pack"
LINE = packs.packet(f"{SHA} refs/heads/" + "b" * 200 + "\n")

LIES: dict[str, Lie] = {
    "true": lambda request: None,
    "redirect-loopback": redirect(OUTSIDE + "{rest}"),
    "redirect-http": redirect("http://127.0.0.1:{canary}{rest}"),
    "redirect-mapped": redirect("https://[::ffff:127.0.0.1]:{canary}{rest}"),
    "redirect-number": redirect("https://2130706433:{canary}{rest}"),
    "redirect-short": redirect("https://127.1:{canary}{rest}"),
    "redirect-any": redirect("https://0.0.0.0:{canary}{rest}"),
    "redirect-metadata": redirect("https://169.254.169.254{rest}"),
    "redirect-rebinding": redirect("https://rebinds.example.org:{canary}{rest}"),
    "redirect-relative": redirect("//127.0.0.1:{canary}{rest}"),
    "redirect-file": redirect("file:///etc/passwd"),
    "redirect-ssh": redirect("ssh://127.0.0.1:{canary}/x" + REST),
    "redirect-ext": redirect("ext::sh -c 'touch /tmp/owned' " + REST),
    "redirect-gopher": redirect("gopher://127.0.0.1:{canary}/_x"),
    "redirect-option": redirect("--upload-pack=touch" + REST),
    "redirect-user": redirect("https://git.example.org@127.0.0.1:{canary}{rest}"),
    "redirect-backslash": redirect("https://127.0.0.1:{canary}\\@git.example.org{rest}"),
    "redirect-escapes": redirect("https://127.0.0.1:{canary}/\x1b[2J{rest}"),
    "redirect-loop": redirect("{rest}"),
    "redirect-post": redirect(OUTSIDE + "{rest}", only="POST"),
    "redirect-empty": redirect(""),
    "moved": moved,
    "endless-pack": on_fetch(endless_pack),
    "endless-refs": on_listing(lambda: Answer(more=repeat(LINE * 100))),
    "endless-begin": on_begin(
        lambda: Answer(packs.advertisement()[:-4], more=repeat(LINE * 100), type=ADVERT)
    ),
    "endless-messages": on_fetch(
        lambda: Answer(
            packs.packet("packfile\n"), more=repeat(packs.band(b"\x1b[2Jowned\n" * 5000, number=2))
        )
    ),
    "endless-nothing": on_fetch(
        lambda: Answer(packs.packet("packfile\n"), more=repeat(b"0005\x02"))
    ),
    "endless-header": always(
        lambda: Answer(b"HTTP/1.1 200 OK\r\n", more=repeat(b"X: y\r\n"), raw=True)
    ),
    "endless-continue": always(
        lambda: Answer(more=repeat(b"HTTP/1.1 100 Continue\r\n\r\n" * 100), raw=True)
    ),
    "silence": always(lambda: Answer(more=repeat(b"", every_s=1.0), raw=True)),
    "drip-refs": on_listing(lambda: Answer(more=repeat(b"0", every_s=0.1))),
    "drip-pack": on_fetch(lambda: Answer(more=repeat(b"0", every_s=0.1))),
    "huge-refs": on_listing(lambda: Answer(LINE * 200_000 + packs.FLUSH)),
    "controls": refs(f"{SHA} refs/heads/a\x07b", f"{SHA} refs/heads/\x1b]0;owned\x07"),
    "options": refs(f"{SHA} refs/heads/--upload-pack=touch", f"{SHA} refs/heads/-x"),
    "climbing": refs(f"{SHA} refs/heads/../../../etc/x", f"{SHA} /etc/passwd"),
    "head-option": refs(
        f"{SHA} HEAD symref-target:refs/heads/--output=x", f"{SHA} refs/heads/main"
    ),
    "forged-line": refs(f"{SHA} refs/heads/x\u2028{'8' * 40}\trefs/heads/main"),
    "no-sha": refs("zz refs/heads/main", " refs/heads/main", "refs/heads/main"),
    "html": always(lambda: Answer(b"<html>login</html>", type="text/html")),
    "wrong-type": wrong_type,
    "gzip-refs": on_listing(bomb(lambda: LINE * 300_000)),
    "gzip-begin": on_begin(bomb(lambda: packs.advertisement()[:-4] + LINE * 300_000)),
    "gzip-pack": on_fetch(bomb(lambda: packs.transfer(bytes(200 << 20)))),
    "length-letters": on_listing(lambda: Answer(b"zzzz" + LINE)),
    "length-one": on_listing(lambda: Answer(b"0001000200030000")),
    "length-beyond": on_listing(lambda: Answer(b"ffff" + b"x" * 100)),
    "cut": on_fetch(lambda: Answer(packs.transfer(packs.inflating_blob(1))[:900])),
    "error": on_listing(lambda: Answer(packs.packet("ERR \x1b[2J\x1b]0;owned\x07 no\n"))),
    "error-band": on_fetch(
        lambda: Answer(packs.packet("packfile\n") + packs.band(b"\x1b[2Jno\n", number=3))
    ),
    "changing": changing,
    "wrong-commit": sends(lambda: packs.pack([packs.entry(packs.BLOB, b"other")])),
    "empty-pack": sends(lambda: packs.pack([])),
    "no-pack": sends(lambda: b"nonsense" * 100),
    "wrong-trailer": sends(lambda: packs.pack([packs.entry(packs.BLOB, b"x")], trailer=b"t" * 20)),
    "wrong-count": sends(lambda: packs.pack([packs.entry(packs.BLOB, b"x")], count=0xFFFFFFFF)),
    "wrong-size": sends(lambda: packs.pack([packs.entry(packs.BLOB, b"x", size=1 << 40)])),
    "bomb-of-deltas": sends(packs.bomb_of_deltas),
    "ring-of-deltas": sends(packs.ring_of_deltas),
    "inflating-blob": sends(cache(lambda: packs.inflating_blob(600))),
    "bad-tree": sends(lambda: packs.pack([packs.entry(packs.TREE, b"100644 ../x\0" + b"\1" * 20)])),
    "pack-elsewhere": on_fetch(
        lambda: Answer(
            packs.packet("packfile-uris\n")
            + packs.packet(f"{SHA} file:///etc/passwd\n")
            + packs.DELIMITER
            + packs.transfer(packs.pack([]))
        )
    ),
    "sections": on_fetch(
        lambda: Answer(packs.packet("acknowledgments\n") * 50 + packs.packet("wanted-refs\n"))
    ),
    "shallow": on_fetch(
        lambda: Answer(packs.packet("shallow-info\n") + packs.packet("shallow ../x\n") + b"0001")
    ),
    "version-9": on_begin(
        lambda: Answer(packs.advertisement().replace(b"version 2", b"version 9"), type=ADVERT)
    ),
    "other-hash": on_begin(
        lambda: Answer(
            packs.advertisement("agent=x", "ls-refs", "fetch", "object-format=sha256"), type=ADVERT
        )
    ),
    "bundle": on_begin(
        lambda: Answer(
            packs.advertisement(
                "bundle-uri", "ls-refs", "fetch=packfile-uris", "object-format=sha1"
            ),
            type=ADVERT,
        )
    ),
    "login-loop": always(
        lambda: Answer(
            status="401 No",
            headers=('WWW-Authenticate: Basic realm="\x1b[2J"', "WWW-Authenticate: Negotiate"),
        )
    ),
    "cookie": lambda request: None,
    "big-header": always(lambda: Answer(headers=("X: " + "x" * 500_000,))),
    "no-http": always(lambda: Answer(b"\x00\xff\x16\x03 nonsense\r\n\r\n", raw=True)),
    "status": always(lambda: Answer(b"HTTP/1.1 99999999999 x\r\n\r\n", raw=True)),
    "negative": always(
        lambda: Answer(b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n" + LINE, raw=True)
    ),
    "dumb": dumb,
}


class HostileGitServer:
    """Serves until its process ends."""

    def __init__(self, root: Path, log: Path) -> None:
        self._root = root
        self._log = log

    async def talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer one request, and close the connection."""
        try:
            request = await self._read(reader)
            answer = LIES[request.kind](request)
            if answer is None:
                head, content = await request.truth()
                status = head.pop("Status", "200 OK")
                told = tuple(f"{n}: {v}" for n, v in head.items() if n != "Content-Type")
                answer = Answer(content, head.get("Content-Type", ""), status, told)
            if request.kind == "cookie":
                answer.headers = (*answer.headers, "Set-Cookie: track=1; Path=/")
            await self._send(writer, answer)
        except (ConnectionError, asyncio.IncompleteReadError, ssl.SSLError, KeyError):
            pass
        finally:
            writer.close()

    async def _read(self, reader: asyncio.StreamReader) -> Request:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        first, *lines = head.strip().split("\r\n")
        method, path, _ = first.split(" ")
        pairs = (line.partition(": ") for line in lines)
        headers = {name.lower(): value for name, _, value in pairs}
        body = await _body(reader, headers)
        noted = {"path": path, **{n: headers.get(n) for n in ("host", "authorization", "cookie")}}
        with self._log.open("a") as log:
            log.write(json.dumps(noted) + "\n")
        canary = (self._root / "canary-port").read_text()
        return Request(method, path, headers, body, self._root, canary)

    async def _send(self, writer: asyncio.StreamWriter, answer: Answer) -> None:
        if not answer.raw:
            lines = [f"HTTP/1.1 {answer.status}", f"Content-Type: {answer.type}", *answer.headers]
            lines.append("Connection: close")
            if answer.more is None:
                lines.append(f"Content-Length: {len(answer.content)}")
            writer.write("\r\n".join([*lines, "", ""]).encode("latin-1", errors="replace"))
        writer.write(answer.content)
        await writer.drain()
        if answer.more is not None:
            async with asyncio.timeout(HOUR_S):
                async for part in answer.more:
                    writer.write(part)
                    await writer.drain()


async def _body(reader: asyncio.StreamReader, headers: Mapping[str, str]) -> bytes:
    if headers.get("transfer-encoding") != "chunked":
        return await reader.readexactly(int(headers.get("content-length", "0")))
    whole = b""
    while size := int(await reader.readline(), 16):
        whole += (await reader.readexactly(size + 2))[:-2]
    await reader.readline()
    return whole


async def main(root: str, certificate: str, key: str, log: str) -> None:
    """Serve on a free port, and print it."""
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(certificate, key)
    hostile = HostileGitServer(Path(root), Path(log))
    server = await asyncio.start_server(hostile.talk, "127.0.0.1", 0, ssl=tls)
    sys.stdout.write(f"{server.sockets[0].getsockname()[1]}\n")
    sys.stdout.flush()
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
