"""Servers that accept and never answer hold up the questions about themselves."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

from infra.repositories.git.mirrors import AT_ONCE, AT_ONCE_OF_ONE, GitRepositories
from schemas.specs import CommitSpec
from tests.kit.platform import PATIENCE

SOON_S = 5 * PATIENCE
"""Much less than the minute after which git gives a silent server up."""


async def _say_nothing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        await reader.read()
    finally:
        writer.close()


@asynccontextmanager
async def silent_servers(count: int) -> AsyncIterator[Sequence[str]]:
    """The addresses of repositories on servers that never answer."""
    async with AsyncExitStack() as stack:
        servers = [await asyncio.start_server(_say_nothing, "127.0.0.1", 0) for _ in range(count)]
        for server in servers:
            stack.callback(server.close)
        yield [f"http://127.0.0.1:{one.sockets[0].getsockname()[1]}/r.git" for one in servers]


@asynccontextmanager
async def checking(repositories: GitRepositories, urls: Sequence[str]) -> AsyncIterator[None]:
    """Inside the block, these repositories are being checked."""
    tasks = [asyncio.create_task(repositories.check(url)) for url in urls]
    await asyncio.sleep(0.5)
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def test_a_silent_repository_holds_up_the_check_of_no_other(
    repositories: GitRepositories, source: Path
) -> None:
    async with (
        silent_servers(1) as (url,),
        checking(repositories, [url] * (2 * AT_ONCE_OF_ONE)),
        asyncio.timeout(SOON_S),
    ):
        assert await repositories.check(str(source)) == "main"


async def test_checks_of_many_silent_repositories_hold_up_no_workspace(
    repositories: GitRepositories, source: Path
) -> None:
    async with (
        silent_servers(AT_ONCE) as urls,
        checking(repositories, urls),
        asyncio.timeout(SOON_S),
    ):
        assert await repositories.fetch("w", CommitSpec(url=str(source)))
