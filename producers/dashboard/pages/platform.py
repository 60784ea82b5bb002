"""The platform: workers, waiting work, the bus, the horizon, and dead letters."""

import asyncio

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from infra.readmodel.disks import disks
from infra.readmodel.platform import oldest_waiting_s
from infra.readmodel.wait_reasons import describe_holder
from producers.dashboard.forms import read_session_form
from producers.dashboard.rendering import html
from producers.dashboard.routing import PageRoute
from producers.http.auth import actor_of
from producers.http.responses import page_of
from producers.http.routes.platform import own_version, status
from producers.http.routes.runs import services, waiting_for


async def show(request: Request) -> Response:
    core, page = services(request), page_of(request)
    platform = core.readmodel.platform
    effects = await platform.effects()
    letters, total = await core.readmodel.letters.page(page, all_of_them=False)
    return html(
        request,
        "platform.html",
        {
            "version": own_version(),
            "workers": await platform.workers(),
            "effects": effects,
            "lag": await platform.lag(),
            "bus": await platform.bus("kafka" if core.settings.kafka else "log"),
            "horizon_age_s": await platform.horizon_age_s(),
            "holders": [describe_holder(one) for one in await core.readmodel.waits.holders()],
            "oldest_s": oldest_waiting_s(effects),
            "waits": await waiting_for(request, None),
            "runs": await platform.run_counts(),
            "disks": await asyncio.to_thread(disks, core.settings.directories),
            "database_bytes": await platform.database_bytes(),
            "letters": letters if actor_of(request).may("admin") else [],
            "may_redrive": actor_of(request).may("admin"),
            "total": total,
            "page": page,
        },
    )


async def redrive(request: Request) -> Response:
    """Let a consumer process a dead letter again, and go back to the page."""
    await read_session_form(request)
    core = services(request)
    recorded = await core.dead_letters.redrive(request.path_params["ref"])
    await core.readmodel.caught_up(recorded.cursor)
    return RedirectResponse("/platform", status_code=303)


ROUTES = [
    PageRoute("/platform", show, scope="read", reach="installation"),
    PageRoute("/platform.json", status, scope="read", reach="installation"),
    PageRoute(
        "/platform/dead-letters/{ref}/redrive",
        redrive,
        scope="admin",
        reach="installation",
        methods=["POST"],
    ),
]
