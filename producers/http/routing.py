"""Routes of the API. Each names the scope that an API key needs for it, and whether a key that is
bound to a workspace or an organisation may use it.

The guard has authenticated the sender before a route is found. The route checks its rights before
the request's body is read.
"""

from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Literal

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Mount, Route
from starlette.types import Receive, Scope, Send

from infra.ports.actor import Actor, ApiKeyScope
from producers.http.responses import problem

RouteScope = ApiKeyScope | Literal["any", "open"]
"""The scope of a route. `any` needs a valid API key with whatever scopes, and an open one needs none."""

Reach = Literal["workspace", "organisation", "installation"]
"""The things that a route is about. An API key that is bound to a workspace may use a route about
workspaces, which leaves out everything else, and no route about organisations or the installation as a
whole. One that is bound to an organisation may use all but those about the installation."""

Endpoint = Callable[[Request], Awaitable[Response]]


class ScopedRoute(Route):
    """A route that checks the rights of the sender."""

    def __init__(
        self,
        path: str,
        endpoint: Endpoint,
        *,
        scope: RouteScope,
        reach: Reach = "workspace",
        methods: Sequence[str] | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__(path, endpoint, methods=list(methods) if methods else None, name=name)
        self.scope = scope
        self.reach = reach

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        state = scope.setdefault("state", {})
        state["route"] = self.path
        reason = None if self.scope == "open" else self._reason_against(state["actor"], scope)
        if reason is not None:
            await self.refuse(reason, scope, receive, send)
            return
        await super().handle(scope, receive, send)

    async def refuse(self, detail: str, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer an actor that may not use this route."""
        refusal = problem(403, "FORBIDDEN", detail, headers={"Connection": "close"})
        await refusal(scope, receive, send)

    def _reason_against(self, actor: Actor, scope: Scope) -> str | None:
        """Why an actor may not use this route; None when it may."""
        if self.scope == "open":
            return None
        what = f"{scope['method']} {self.path}"
        if self.scope != "any" and not actor.may(self.scope):
            return (
                f"{what} needs an API key with the scope {self.scope}; this one has "
                f"{', '.join(sorted(actor.scopes)) or 'none'}; use another key (`headrace whoami` shows "
                "yours), or ask an owner of the organisation or the operator for one"
            )
        if self.reach != "workspace" and actor.workspace is not None:
            return (
                f"{what} is about all workspaces; this API key is bound to one of them; use one that "
                "is bound to no workspace"
            )
        if self.reach == "installation" and actor.is_confined:
            return (
                f"{what} is about all organisations; this API key is bound to one of them; ask the "
                "operator of the installation"
            )
        return None


def scoped_table(routes: Sequence[BaseRoute]) -> Sequence[BaseRoute]:
    """The same table. Raises TypeError when a route of it names no scope."""
    for _ in scoped_routes(routes):
        pass
    return routes


def scoped_routes(routes: Sequence[BaseRoute]) -> Iterator[ScopedRoute]:
    """All routes of a table. Raises TypeError for a route that names no scope."""
    for route in routes:
        if isinstance(route, Mount):
            yield from scoped_routes(route.routes)
        elif isinstance(route, ScopedRoute):
            yield route
        else:
            raise TypeError(f"{route!r} names no scope: make it a ScopedRoute")
