"""Verifications of runs: request one, show one."""

from collections.abc import Mapping
from dataclasses import asdict

from starlette.requests import Request
from starlette.responses import Response

from producers.core.history.verification import Verification
from producers.http.requests import body_of, cause_of
from producers.http.responses import ApiResponse
from producers.http.routes.runs import services
from producers.http.routing import ScopedRoute


def to_json(found: Verification) -> Mapping[str, object]:
    """A verification as JSON."""
    findings = [finding.model_dump() for finding in found.findings]
    return {**asdict(found), "findings": findings}


async def verify(request: Request) -> Response:
    ref = request.path_params["ref"]
    await body_of(request, ())
    verification = await services(request).verifications.request(
        ref, cause=cause_of(request, f"verify/{ref}")
    )
    return ApiResponse({"verification": to_json(verification)}, status_code=202)


async def show(request: Request) -> Response:
    found = await services(request).verifications.find_verification(request.path_params["id"])
    return ApiResponse({"verification": to_json(found)})


ROUTES = [
    ScopedRoute("/runs/{ref}/verify", verify, scope="control", methods=["POST"]),
    ScopedRoute("/verifications/{id}", show, scope="read"),
]
