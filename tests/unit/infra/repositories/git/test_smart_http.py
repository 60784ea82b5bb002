"""A listing without git equals git's own, and everything that is not a plain listing is left to git."""

import asyncio
import base64
import gzip
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infra.ports.services import RefList
from infra.repositories.git import process, refs, smart_http
from infra.repositories.git.credentials import TokenCredential
from infra.repositories.git.mirrors import GitRepositories
from infra.repositories.git.smart_http import SmartHttp, read_answer
from infra.settings.git import LAPTOP
from schemas.errors import NotFound, Refused, RepositoryAway
from tests.kit.git_server import GitServer, git_server
from tests.kit.platform import git, make_workspace

LOGIN = "bot:secret"


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[GitServer]:
    make_workspace(tmp_path / "served" / "source")
    with git_server(tmp_path / "served") as serving:
        yield serving


@pytest.fixture
async def smart() -> AsyncIterator[SmartHttp]:
    async with SmartHttp(LAPTOP.addresses, schemes=("https", "http")) as opened:
        yield opened


@pytest.fixture
def by_git(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The addresses that git was asked to list."""
    asked: list[str] = []
    list_refs = refs.list_refs

    async def counted(source: process.GitSource) -> RefList:
        asked.append(source.url)
        return await list_refs(source)

    monkeypatch.setattr(refs, "list_refs", counted)
    return asked


async def test_the_listing_equals_that_of_git(server: GitServer, smart: SmartHttp) -> None:
    source = server.root / "source"
    url = server.url("source/.git")
    empty = server.root / "empty"
    git(server.root, "init", "-q", "--bare", "empty")
    steps: list[tuple[str, ...]] = [
        ("branch", "team/größe"),
        ("tag", "light"),
        ("tag", "-a", "-m", "x", "v1"),
        ("tag", "-a", "-m", "x", "v2", "v1"),
        ("update-ref", "refs/pull/1/head", "HEAD"),
        ("checkout", "-q", "--detach"),
        ("pack-refs", "--all"),
    ]
    for step in steps:
        git(source, *step)
        found = await smart.list_refs(url, None)
        told = git(source, "ls-remote", "--symref", str(source))
        assert found == refs.read_listing(told.encode(), url=url)
    found = await smart.list_refs(server.url(empty.name), None)
    assert found is not None
    assert (found.refs, found.default_branch) == ({}, None)


async def test_a_listing_starts_no_process(
    server: GitServer, smart: SmartHttp, by_git: list[str], tmp_path: Path
) -> None:
    repositories = GitRepositories(tmp_path / "mirrors", smart_http=smart, settings=LAPTOP)
    found = await repositories.list_refs("w", server.url("source/.git"), background=True)
    assert found.default_branch == "main"
    assert by_git == []


async def test_a_token_is_sent_to_its_address_and_no_redirect_gets_it(
    server: GitServer, smart: SmartHttp
) -> None:
    server.login = LOGIN
    credential = TokenCredential(*LOGIN.split(":"))
    url = server.url("source/.git")
    assert await smart.list_refs(url, None) is None
    assert await smart.list_refs(url, credential) is not None
    assert server.heard == [f"Basic {base64.b64encode(LOGIN.encode()).decode()}"]
    with git_server(server.root) as elsewhere:
        elsewhere.login = LOGIN
        server.moved_to = f"http://127.0.0.1:{elsewhere.port}"
        assert await smart.list_refs(url, credential) is None
        assert elsewhere.heard == []


async def test_a_failure_concludes_nothing_and_git_says_what_is_wrong(
    server: GitServer, smart: SmartHttp, by_git: list[str], tmp_path: Path
) -> None:
    repositories = GitRepositories(tmp_path / "mirrors", smart_http=smart, settings=LAPTOP)
    url = server.url("source/.git")
    server.status = 503
    with pytest.raises(RepositoryAway):
        await repositories.list_refs("w", url)
    server.status = 404
    with pytest.raises(NotFound):
        await repositories.list_refs("w", url)
    server.status = 200
    assert await repositories.list_refs("w", url)
    assert by_git == [url, url], "an address that git cannot list either is not left to git"


async def test_a_server_with_an_older_protocol_is_left_to_git(
    server: GitServer,
    smart: SmartHttp,
    by_git: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    posts: list[str] = []
    post = smart._post

    async def counted(url: str, headers: dict[str, str]) -> bytes | None:
        posts.append(url)
        return await post(url, {**headers, "Git-Protocol": "version=0"})

    monkeypatch.setattr(smart, "_post", counted)
    repositories = GitRepositories(tmp_path / "mirrors", smart_http=smart, settings=LAPTOP)
    url = server.url("source/.git")
    for _ in range(3):
        assert (await repositories.list_refs("w", url)).default_branch == "main"
    assert (len(by_git), len(posts)) == (3, 1)
    monkeypatch.setattr(smart_http, "MOST_LEFT", 1)
    smart.leave_to_git(server.url("other"))
    assert smart._left.keys() == {server.url("other")}


def packet(text: str) -> bytes:
    return f"{len(text.encode()) + 4:04x}".encode() + text.encode()


LINE = packet(f"{'a' * 40} refs/heads/main\n")
HEAD = packet(f"{'a' * 40} HEAD symref-target:refs/heads/main\n")
PLAIN = "Content-Type: application/x-git-upload-pack-result\r\n"


def answering(body: bytes, *, headers: str = PLAIN, status: str = "200 OK") -> bytes:
    length = f"Content-Length: {len(body)}\r\nConnection: close\r\n"
    return f"HTTP/1.1 {status}\r\n{headers}{length}\r\n".encode() + body


async def asked(answer: bytes, *, smart: SmartHttp, stays: bool = False) -> RefList | None:
    """The listing of a server that answers with these bytes, whatever it is asked. With `stays` the
    connection stays open after them."""

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"0000")
        writer.write(answer)
        if stays:
            await reader.read()
        writer.close()

    async with await asyncio.start_server(talk, "127.0.0.1", 0) as serving:
        port = serving.sockets[0].getsockname()[1]
        return await smart.list_refs(f"http://127.0.0.1:{port}/x.git", None)


async def test_a_plain_answer_is_read(smart: SmartHttp) -> None:
    found = await asked(answering(HEAD + LINE + b"0000"), smart=smart)
    assert found is not None
    assert (found.refs, found.default_branch) == ({"refs/heads/main": "a" * 40}, "main")


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"nonsense\r\n\r\n",
        answering(b""),
        answering(LINE),
        answering(LINE[:20]),
        answering(b"0003"),
        answering(b"ffff" + b"x" * 10),
        answering(b"-001" + LINE + b"0000"),
        answering(packet("ERR no\n") + b"0000"),
        answering(packet("word\n") + b"0000"),
        answering(LINE + b"0000", headers=""),
        answering(LINE + b"0000", headers="Content-Type: text/html\r\n"),
        answering(gzip.compress(LINE + b"0000"), headers=PLAIN + "Content-Encoding: gzip\r\n"),
        answering(LINE + b"0000", status="500 No"),
        answering(b"", status="302 Found", headers="Location: http://127.0.0.1:1/\r\n"),
    ],
)
async def test_everything_else_is_left_to_git(smart: SmartHttp, answer: bytes) -> None:
    assert await asked(answer, smart=smart) is None


async def test_an_answer_without_end_is_cut_at_the_limit_and_at_the_deadline(
    smart: SmartHttp, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(smart_http, "MOST_BYTES", 10 * len(LINE))
    assert await asked(answering(LINE * 11 + b"0000"), smart=smart) is None
    monkeypatch.setattr(smart_http, "DEADLINE_S", 0.2)
    endless = answering(LINE * 2 + b"0000")[:-4]
    async with asyncio.timeout(30):
        assert await asked(endless, smart=smart, stays=True) is None


def test_too_many_refs_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(refs, "MOST_REFS", 2)
    lines = b"".join(packet(f"{'a' * 40} refs/heads/b{number}\n") for number in range(3))
    with pytest.raises(Refused, match="3 branches and tags"):
        read_answer(lines + b"0000", url="x")


@given(
    st.binary(max_size=200)
    | st.lists(st.text(max_size=60)).map(lambda t: b"".join(map(packet, t)) + b"0000")
)
def test_nonsense_is_an_error_of_its_value_or_a_listing_of_safe_refs(answer: bytes) -> None:
    try:
        found = read_answer(answer, url="x")
    except ValueError:
        return
    assert all(refs.is_safe_ref(name) for name in found.refs)
