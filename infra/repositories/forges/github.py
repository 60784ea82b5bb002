"""GitHub, and Gitea and Forgejo, whose API follows GitHub's.

gidgethub makes the requests (headers, URL templates, JSON, pages). Statuses of refusal never reach it:
`transport` classifies them first. See docs/decisions/0013-call-forges-with-gidgethub.md.
"""

from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from gidgethub.abc import GitHubAPI

from infra.repositories.forges.address import RepositoryAddress
from infra.repositories.forges.forge import MOST_TEXT, PushHook, ShownStatus
from infra.repositories.forges.transport import Transport
from schemas.errors import ForgeAway

AGENT = "headrace"
MOST_PAGES = 20
KNOWN_TYPES = ("content-type", "link")

GetToken = Callable[[], Awaitable[str]]


class ForgeRequests(GitHubAPI):
    """gidgethub over our transport."""

    def __init__(self, transport: Transport, base: str) -> None:
        super().__init__(AGENT, base_url=base)
        self._transport = transport

    async def _request(
        self, method: str, url: str, headers: Mapping[str, str], body: bytes = b""
    ) -> tuple[int, Mapping[str, str], bytes]:
        answer = await self._transport.send(method, url, headers=headers, body=body)
        kept = {name: answer.headers[name] for name in KNOWN_TYPES if name in answer.headers}
        return 200 if answer.body else 204, kept, answer.body

    async def sleep(self, seconds: float) -> None:
        raise NotImplementedError("requests to forges wait as effects, and never here")


class GitHubForge:
    """`Forge` for a repository on GitHub."""

    events: tuple[str, ...] = ("push",)
    kind = "web"

    def __init__(
        self, requests: ForgeRequests, address: RepositoryAddress, token: GetToken
    ) -> None:
        self._requests = requests
        self._names = {"owner": address.owner, "name": address.name}
        self._token = token
        self._host = address.host

    async def check(self) -> None:
        found = await self._get("/repos/{owner}/{name}")
        with self._reading():
            str(found["full_name"])

    async def put_hook(self, hook: PushHook) -> str:
        known = [one for one in await self._hooks() if _url_of(one) == hook.url]
        if not known:
            return await self._make_hook(hook)
        with self._reading():
            first, *others = (str(one["id"]) for one in known)
        await self._send("patch", "/repos/{owner}/{name}/hooks/{id}", self._body(hook), id=first)
        for other in others:
            await self._delete(other)
        return first

    async def delete_hook(self, url: str) -> bool:
        known = [one for one in await self._hooks() if _url_of(one) == url]
        for one in known:
            with self._reading():
                number = str(one["id"])
            await self._delete(number)
        return bool(known)

    async def post_status(self, sha: str, status: ShownStatus) -> bool:
        text = status.text[:MOST_TEXT]
        shown = await self._newest_status(sha, status.context)
        if shown == (status.state, text, status.link or ""):
            return False
        body = {"state": status.state, "context": status.context, "description": text}
        if status.link is not None:
            body["target_url"] = status.link
        await self._send("post", "/repos/{owner}/{name}/statuses/{sha}", body, sha=sha)
        return True

    async def _newest_status(self, sha: str, context: str) -> tuple[str, str, str] | None:
        """State, text and link of the newest status of a context; None when there is none."""
        found = await self._get(
            "/repos/{owner}/{name}/commits/{sha}/status?per_page=100&limit=50", sha=sha
        )
        with self._reading():
            for one in found.get("statuses") or ():
                if one.get("context") == context:
                    state = one.get("state") or one.get("status")
                    return state, one.get("description") or "", one.get("target_url") or ""
        return None

    async def _make_hook(self, hook: PushHook) -> str:
        body = {"name": self.kind, "type": self.kind, **self._body(hook)}
        made = await self._send("post", "/repos/{owner}/{name}/hooks", body)
        with self._reading():
            return str(made["id"])

    def _body(self, hook: PushHook) -> dict[str, Any]:
        config = {"url": hook.url, "content_type": "json", "secret": hook.secret}
        return {"active": True, "events": list(self.events), "config": config}

    async def _hooks(self) -> list[Any]:
        """The webhooks of the repository, at most MOST_PAGES pages of them."""
        known: list[Any] = []
        for page in range(1, MOST_PAGES + 1):
            path = f"/repos/{{owner}}/{{name}}/hooks?per_page=50&limit=50&page={page}"
            with self._reading():
                found = list(await self._get(path))
            known += found
            if not found:
                break
        return known

    async def _get(self, path: str, **names: str) -> Any:
        with self._reading():
            return await self._requests.getitem(
                path, {**self._names, **names}, oauth_token=await self._token()
            )

    async def _send(self, method: str, path: str, data: Any, **names: str) -> Any:
        with self._reading():
            send = getattr(self._requests, method)
            return await send(
                path, {**self._names, **names}, data=data, oauth_token=await self._token()
            )

    async def _delete(self, number: str) -> None:
        with self._reading():
            await self._requests.delete(
                "/repos/{owner}/{name}/hooks/{id}",
                {**self._names, "id": number},
                oauth_token=await self._token(),
            )

    @contextmanager
    def _reading(self) -> Iterator[None]:
        """Inside the block, an answer that is not one of this API raises ForgeAway."""
        with reading_answers(self._host):
            yield


class GiteaForge(GitHubForge):
    """`Forge` for a repository on Gitea or Forgejo."""

    events = ("push", "create", "delete")
    kind = "gitea"

    async def put_hook(self, hook: PushHook) -> str:
        """Make the webhook, then delete the ones with the same URL: Gitea changes no secret of an
        existing webhook. For a moment there are two, and deliveries that come twice change nothing."""
        known = [one for one in await self._hooks() if _url_of(one) == hook.url]
        made = await self._make_hook(hook)
        for one in known:
            with self._reading():
                number = str(one["id"])
            await self._delete(number)
        return made


@contextmanager
def reading_answers(host: str) -> Iterator[None]:
    """Inside the block, an answer that is not one of the forge's API raises ForgeAway."""
    try:
        yield
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise ForgeAway(
            f"the answer of {host} is not one of a forge's API; check the address of the repository "
            "and --forge"
        ) from error


def _url_of(hook: Any) -> str | None:
    config = hook.get("config")
    return config.get("url") if isinstance(config, dict) else None
