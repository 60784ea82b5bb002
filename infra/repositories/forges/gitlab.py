"""GitLab, whose API has other paths, states and webhooks than GitHub and is asked here directly."""

import json
from typing import Any
from urllib.parse import quote, urlencode

from infra.repositories.forges.address import RepositoryAddress
from infra.repositories.forges.forge import MOST_TEXT, PushHook, ShownStatus
from infra.repositories.forges.github import GetToken, reading_answers
from infra.repositories.forges.transport import ForgeRefusal, Transport

STATES = {"pending": "pending", "success": "success", "failure": "failed", "error": "failed"}
PER_PAGE = 100
MOST_PAGES = 10


class GitLabForge:
    """`Forge` for a project on GitLab."""

    def __init__(self, transport: Transport, address: RepositoryAddress, token: GetToken) -> None:
        self._transport = transport
        self._base = f"{address.api('gitlab')}/projects/{quote(address.path, safe='')}"
        self._host = address.host
        self._token = token

    async def check(self) -> None:
        found = await self._call("GET", "")
        with reading_answers(self._host):
            str(found["path_with_namespace"])

    async def put_hook(self, hook: PushHook) -> str:
        body = {
            "url": hook.url,
            "token": hook.secret,
            "push_events": True,
            "tag_push_events": True,
            "enable_ssl_verification": True,
        }
        known = await self._hooks(hook.url)
        if not known:
            made = await self._call("POST", "/hooks", body)
            with reading_answers(self._host):
                return str(made["id"])
        first, *others = known
        await self._call("PUT", f"/hooks/{first}", body)
        for other in others:
            await self._call("DELETE", f"/hooks/{other}")
        return first

    async def delete_hook(self, url: str) -> bool:
        known = await self._hooks(url)
        for number in known:
            await self._call("DELETE", f"/hooks/{number}")
        return bool(known)

    async def post_status(self, sha: str, status: ShownStatus) -> bool:
        text, state = status.text[:MOST_TEXT], STATES[status.state]
        shown = await self._newest_status(sha, status.context)
        if shown == (state, text, status.link or ""):
            return False
        body = {"state": state, "name": status.context, "description": text}
        if status.link is not None:
            body["target_url"] = status.link
        try:
            await self._call("POST", f"/statuses/{quote(sha, safe='')}", body)
        except ForgeRefusal as refused:
            # GitLab takes no second status of the same state, though its text differs.
            if refused.answered == 400 and shown is not None and shown[0] == state:
                return False
            raise
        return True

    async def _newest_status(self, sha: str, context: str) -> tuple[str, str, str] | None:
        query = urlencode({"name": context, "per_page": PER_PAGE})
        found = await self._call(
            "GET", f"/repository/commits/{quote(sha, safe='')}/statuses?{query}"
        )
        with reading_answers(self._host):
            own = [one for one in found if one["name"] == context]
            if not own:
                return None
            newest = max(own, key=lambda one: int(one["id"]))
            return (
                newest["status"],
                newest.get("description") or "",
                newest.get("target_url") or "",
            )

    async def _hooks(self, url: str) -> list[str]:
        """The ids of the webhooks with this URL."""
        known: list[str] = []
        for page in range(1, MOST_PAGES + 1):
            found = await self._call("GET", f"/hooks?per_page={PER_PAGE}&page={page}")
            with reading_answers(self._host):
                known += [str(int(one["id"])) for one in found if one.get("url") == url]
                if len(found) < PER_PAGE:
                    break
        return known

    async def _call(self, method: str, path: str, body: Any = None) -> Any:
        headers = {"PRIVATE-TOKEN": await self._token(), "accept": "application/json"}
        data = b""
        if body is not None:
            headers["content-type"] = "application/json"
            data = json.dumps(body).encode()
        answer = await self._transport.send(method, self._base + path, headers=headers, body=data)
        with reading_answers(self._host):
            return answer.document()
