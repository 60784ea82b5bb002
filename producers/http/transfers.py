"""Bytes in and out by signed URLs. The guard has checked the URL: its method, its path and its time."""

from collections.abc import AsyncIterator

from starlette.requests import Request
from starlette.responses import Response

from infra.identity.signed_urls import BadSignedUrl, Grant
from infra.ports.actor import visible_organisation
from producers.core.datasets import registration
from producers.core.registry.publishing import archive_name
from producers.http.auth import actor_of
from producers.http.downloads import download_range
from producers.http.routes.runs import services
from producers.http.routing import ScopedRoute
from schemas.errors import InvalidConfig, Issue, NotFound


async def put_part(request: Request) -> Response:
    """Store a part of an upload, and answer its ETag."""
    core, number = services(request), request.path_params["part"]
    upload = await core.transfers.find(request.path_params["upload"])
    if not number.isascii() or not number.isdigit() or len(number) > 6:
        raise NotFound(f"upload {upload.id} has no part {number[:20]}")
    length = _declared_length(request, grant_of(request))
    await core.quotas.take_bytes(actor_of(request), length)
    part = await core.transfers.uploads.receive(upload, int(number), _pieces(request))
    return Response(status_code=200, headers={"ETag": f'"{part.etag}"'})


async def get_dataset(request: Request) -> Response:
    """The file of a dataset as it was uploaded, or the range of it that is asked for."""
    registered = await registration.find(
        services(request).log, services(request).readmodel.names, request.path_params["ref"]
    )
    return await download_range(request, registered.original, registered.file_name)


async def get_artifact(request: Request) -> Response:
    """The archive of a version of an artifact, or the range of it that is asked for."""
    ref = request.path_params["ref"]
    found = await services(request).artifact_registry.find_id(ref)
    if found is None or visible_organisation() not in (None, found.organisation):
        raise NotFound(f"there is no artifact {ref[:80]}; list them with `headrace artifact list`")
    return await download_range(request, found.content, archive_name(found))


def grant_of(request: Request) -> Grant:
    """The grant of the signed URL of a request."""
    grant: Grant = request.state.grant
    return grant


def _declared_length(request: Request, grant: Grant) -> int:
    """The length of the body, which is that of the URL. Raises BadSignedUrl for another one."""
    if grant.length is None:
        raise BadSignedUrl("this signed URL names no length, and takes no body; ask for a new one")
    text = request.headers.get("content-length")
    if text is None and "transfer-encoding" not in request.headers:
        text = "0"
    if text is not None and text != str(grant.length):
        message = f"must have exactly {grant.length} bytes, as its signed URL says, got {text[:20]}"
        raise InvalidConfig(f"the body {message}", issues=(Issue("body", message),))
    return grant.length


async def _pieces(request: Request) -> AsyncIterator[bytes]:
    async for piece in request.stream():
        if piece:
            yield piece


ROUTES = [
    ScopedRoute("/transfers/uploads/{upload}/{part}", put_part, scope="open", methods=["PUT"]),
    ScopedRoute("/transfers/datasets/{ref}", get_dataset, scope="open"),
    ScopedRoute("/transfers/artifacts/{ref}", get_artifact, scope="open"),
]
