"""`GET /runs/{ref}/trace?sample=ID`: the eight hops of a sample."""

from starlette.requests import Request
from starlette.responses import Response

from producers.core.history.trace import trace
from producers.http.responses import ApiResponse
from producers.http.routes.runs import services
from producers.http.routing import ScopedRoute
from schemas.errors import InvalidConfig, Issue


async def hops(request: Request) -> Response:
    sample = request.query_params.get("sample")
    if not sample:
        raise InvalidConfig(
            "sample is missing from the query; give it, like ?sample=ID",
            issues=(Issue("sample", "is missing from the query; give it, like ?sample=ID"),),
        )
    run = await services(request).lookup.whole_run(request.path_params["ref"])
    found = await trace(services(request).log, run, sample)
    return ApiResponse({"sample": sample, "hops": [hop.to_json() for hop in found]})


ROUTES = [ScopedRoute("/runs/{ref}/trace", hops, scope="read")]
