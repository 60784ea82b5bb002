"""A client that keeps the cookies of the dashboard and says where its requests come from, as a browser
does."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx

from tests.kit.application import API_KEY, Application

HERE = "http://127.0.0.1"


async def sign_in(browser: httpx.AsyncClient, api_key: str, following: str = "/") -> httpx.Response:
    return await browser.post("/login", data={"api_key": api_key, "next": following})


@asynccontextmanager
async def signed_in(app: Application, api_key: str = API_KEY) -> AsyncIterator[httpx.AsyncClient]:
    """A browser with a session of the administrator, or of another API key, until the block ends.
    An error of the application is raised."""
    transport = httpx.ASGITransport(app.app, raise_app_exceptions=True)
    async with httpx.AsyncClient(
        transport=transport, base_url=HERE, headers={"Origin": HERE}
    ) as client:
        await sign_in(client, api_key)
        yield client


def form_key_in(text: str) -> str:
    """The key that the forms of a page hold."""
    return text.partition('name="form_key" value="')[2].partition('"')[0]
