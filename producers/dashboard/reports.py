"""Counts what browsers report: code, styles and addresses of a page that its headers forbid.

Every report is a mistake of ours, or an attack that did not succeed. Nobody needs a session to report.
"""

import logging

from starlette.requests import Request
from starlette.responses import Response

from infra.rate_limited_log import RateLimit
from producers.http.browsers import REPORTS
from producers.http.routes.runs import services
from producers.http.routing import ScopedRoute

logger = logging.getLogger(__name__)
logger.addFilter(RateLimit())

LARGEST_REPORT = 16 << 10
LOGGED = 500


async def take(request: Request) -> Response:
    """Count a report, and log its beginning once a minute."""
    data = bytearray()
    async for chunk in request.stream():
        data += chunk[: LARGEST_REPORT - len(data)]
        if len(data) >= LARGEST_REPORT:
            break
    services(request).page_reports.add()
    text = data.decode("utf-8", "replace")[:LOGGED]
    logger.warning("a browser refused a part of a page: %r", text)
    return Response(status_code=204, headers={"Connection": "close"})


ROUTES = [ScopedRoute(REPORTS, take, scope="open", methods=["POST"])]
