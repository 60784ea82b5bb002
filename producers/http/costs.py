"""The cost ledger: what runs, workspaces, users and steps cost."""

from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from infra.costs.ledger import COST_KEYS, CostKey, total_of
from producers.core.lookup import Lookup
from producers.http.responses import ApiResponse, number
from producers.http.routes.runs import services
from producers.http.routing import ScopedRoute
from schemas.costs.prices import Prices
from schemas.errors import InvalidConfig, Issue, NotFound

UNITS = {"h": timedelta(hours=1), "d": timedelta(days=1), "w": timedelta(weeks=1)}
MOST_DIGITS = 5
MOST_LINES = 100_000
"""The most lines of one answer, so that a table of the steps of a long run is whole."""


async def index(request: Request) -> Response:
    """The costs by `by`, of one `run` or since some time (`since=7d`). Money is null where a price is
    missing."""
    return ApiResponse(await cost_document(request))


async def cost_document(request: Request) -> Mapping[str, Any]:
    """The document that answers a request for costs. Raises InvalidConfig and NotFound."""
    core = services(request)
    by = _key_of(request)
    ref = request.query_params.get("run")
    run = await _find_owner(core.lookup, ref) if ref else None
    if by == "sample" and run is None:
        raise InvalidConfig("costs by sample are those of one run; name the run too")
    since = since_of(request.query_params.get("since"), await core.log.clock_time())
    prices = Prices.of(core.settings.prices)
    found = await core.readmodel.costs.lines(by, runs=[run] if run else None, since=since)
    gains = await core.readmodel.costs.gains([line.key for line in found] if by == "run" else [])
    most = number(request, "limit", default=1000, least=1, most=MOST_LINES)
    return {
        "by": by,
        "since": since,
        "prices": prices.model_dump(mode="json"),
        "lines": [line.as_json(prices, gain=gains.get(line.key)) for line in found[:most]],
        "num_lines": len(found),
        "total": total_of(found).as_json(prices),
    }


async def _find_owner(lookup: Lookup, ref: str) -> str:
    """The id of a run, or of an evaluation, which has a line among those of runs. Raises NotFound."""
    try:
        return (await lookup.run(ref)).run
    except NotFound:
        try:
            return (await lookup.evaluation(ref)).evaluation
        except NotFound:
            pass
        raise


def _key_of(request: Request) -> CostKey:
    text = request.query_params.get("by") or "run"
    found = next((key for key in COST_KEYS if key == text), None)
    if found is None:
        message = f"must be one of {', '.join(COST_KEYS)}, got {text[:20]!r}"
        raise InvalidConfig(f"by {message}", issues=(Issue("by", message),))
    return found


def since_of(text: str | None, now: datetime) -> datetime | None:
    """The time that `7d`, `12h` or `2w` before now means, or a time in ISO 8601; None for no text.
    Raises InvalidConfig for anything else."""
    if not text:
        return None
    amount, unit = text[:-1], UNITS.get(text[-1])
    if unit is not None and amount.isascii() and amount.isdigit() and len(amount) <= MOST_DIGITS:
        return now - int(amount) * unit
    try:
        found = datetime.fromisoformat(text)
        found = found if found.tzinfo else found.replace(tzinfo=now.tzinfo)
        found.astimezone(UTC)  # as the database reads it, which has no year 0
    except (ValueError, OverflowError):
        message = f"must be a time such as 7d, 12h, 2w or 2026-11-01, got {text[:30]!r}"
        raise InvalidConfig(f"since {message}", issues=(Issue("since", message),)) from None
    return found


ROUTES = [ScopedRoute("/cost", index, scope="read")]
