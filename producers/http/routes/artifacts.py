"""Versioned artifacts of an organisation: capabilities, tasks and models. A client announces a version,
sends its archive in parts by signed URLs, and publishes it."""

from collections.abc import Mapping
from typing import Literal, cast

from starlette.requests import Request
from starlette.responses import Response

from infra.blobs.uploads import MAX_BYTES
from infra.ports.actor import own_organisation
from infra.readmodel.registry import ArtifactFilter, ArtifactJson
from producers.core.registry.publishing import (
    ArtifactKey,
    PublishedArtifact,
    archive_name,
    artifact_key,
    artifact_kind,
)
from producers.http.requests import JsonBody, body_of, own_address
from producers.http.responses import ApiResponse, flag, page_of, page_response
from producers.http.routes.access.organisations import organisation_id
from producers.http.routes.datasets import parts_in, plan_json
from producers.http.routes.runs import services
from producers.http.routing import ScopedRoute
from schemas.errors import InvalidConfig, Issue, NotFound
from schemas.ids import ArtifactKind, SemanticVersion

NAMED = ("kind", "name", "version", "organisation")
SORTS = ("name", "created_at")


def to_json(found: PublishedArtifact) -> Mapping[str, object]:
    """A version of an artifact as JSON."""
    event = found.event
    return {
        "id": event.artifact,
        "organisation": event.organisation,
        "kind": event.kind,
        "name": event.artifact_name,
        "version": event.semver,
        "is_prerelease": SemanticVersion.parse(event.semver).is_prerelease,
        "sha256": event.content.sha256,
        "size": event.content.size,
        "num_files": event.num_files,
        "unpacked_bytes": event.unpacked_bytes,
        "summary": event.summary,
        "published_by": event.published_by,
        "created_at": found.recorded.time,
    }


async def announce(request: Request) -> Response:
    """Expect the archive of a version, or answer that the version is published with the same archive."""
    body = await body_of(request, (*NAMED, "file_size", "sha256"))
    core = services(request)
    key = await _key_of(request, body)
    size = body.integer("file_size", default=0, least=1, most=MAX_BYTES)
    begun = await core.artifact_registry.begin(key, size, body.text("sha256"))
    if isinstance(begun, PublishedArtifact):
        return ApiResponse({"artifact": to_json(begun), "upload": None})
    plan = await core.artifact_registry.plan(begun, address=own_address(request))
    upload = {"id": begun.id, **plan_json(plan)}
    return ApiResponse({"artifact": None, "upload": upload}, status_code=201)


async def publish(request: Request) -> Response:
    """Publish a version whose archive has arrived."""
    body = await body_of(request, (*NAMED, "upload", "parts"))
    core = services(request)
    parts = parts_in(body.values.get("parts"), number="part_number", etag="etag")
    key = await _key_of(request, body)
    found = await core.artifact_registry.publish(key, body.text("upload"), parts)
    return ApiResponse({"artifact": to_json(found)}, status_code=201)


async def index(request: Request) -> Response:
    """A page of artifacts, each with its latest version."""
    page, query = page_of(request), request.query_params
    kind, sort = query.get("kind") or None, query.get("sort") or "created_at"
    if sort not in SORTS:
        message = f"must be {' or '.join(SORTS)}, got {sort[:40]!r}"
        raise InvalidConfig(f"sort {message}", issues=(Issue("sort", message),))
    chosen = ArtifactFilter(
        organisation=await _organisation_of(request, query.get("organisation")),
        kind=None if kind is None else artifact_kind(kind),
        search=query.get("search") or None,
        sort=cast(Literal["name", "created_at"], sort),
        is_ascending=flag(request, "ascending"),
    )
    rows, total = await services(request).readmodel.artifacts.page(page, chosen)
    return page_response("artifacts", rows, total, page)


async def show(request: Request) -> Response:
    """A version with its manifest and its files."""
    found = await _find(request)
    detail = await services(request).artifact_registry.detail(found.event)
    return ApiResponse({"artifact": {**to_json(found), **detail}})


async def versions(request: Request) -> Response:
    """The versions of an artifact, the highest first."""
    kind, name = _kind_in_path(request), request.path_params["ref"]
    organisation = await _organisation_of(request, request.query_params.get("organisation"))
    rows: list[ArtifactJson] = await services(request).readmodel.artifacts.versions(
        organisation, kind, name
    )
    if not rows:
        raise NotFound(
            f"there is no {kind} {name[:140]!r}; list them with `headrace artifact list`"
        )
    return ApiResponse({"versions": rows})


async def download_url(request: Request) -> Response:
    """A signed URL by which the archive of a version can be read without an API key."""
    event = (await _find(request)).event
    link = await services(request).transfers.download_url(
        f"/artifacts/{event.artifact}", archive_name(event), address=own_address(request)
    )
    return ApiResponse(
        {"url": link.url, "expires_in": link.expires_in, "file_name": link.file_name}
    )


async def withdraw(request: Request) -> Response:
    """Withdraw a version that nothing uses."""
    core, kind, ref = services(request), _kind_in_path(request), request.path_params["ref"]
    organisation = await _organisation_of(request, request.query_params.get("organisation"))
    event, cursor = await core.artifact_registry.withdraw(organisation, kind, ref)
    await core.readmodel.caught_up(cursor)
    return ApiResponse({"artifact": {"id": event.artifact, "name": event.full_name}})


async def _find(request: Request) -> PublishedArtifact:
    organisation = await _organisation_of(request, request.query_params.get("organisation"))
    kind, ref = _kind_in_path(request), request.path_params["ref"]
    return await services(request).artifact_registry.find(organisation, kind, ref)


def _kind_in_path(request: Request) -> ArtifactKind:
    try:
        return artifact_kind(request.path_params["kind"])
    except InvalidConfig as error:
        raise NotFound(f"there is nothing here: {error.message}") from None


async def _key_of(request: Request, body: JsonBody) -> ArtifactKey:
    organisation = await _organisation_of(request, body.optional("organisation"))
    return artifact_key(organisation, body.text("kind"), body.text("name"), body.text("version"))


async def _organisation_of(request: Request, ref: str | None) -> str:
    """The organisation (id) that a request names, or else that of the sender. Raises NotFound."""
    return await organisation_id(request, ref or None) or own_organisation()


ROUTES = [
    ScopedRoute("/artifacts", index, scope="read"),
    ScopedRoute("/artifacts", publish, scope="submit", methods=["POST"]),
    ScopedRoute("/artifacts/uploads", announce, scope="submit", methods=["POST"]),
    ScopedRoute("/artifacts/{kind}/{ref}", show, scope="read"),
    ScopedRoute(
        "/artifacts/{kind}/{ref}", withdraw, scope="admin", reach="organisation", methods=["DELETE"]
    ),
    ScopedRoute("/artifacts/{kind}/{ref}/versions", versions, scope="read"),
    ScopedRoute("/artifacts/{kind}/{ref}/url", download_url, scope="read"),
]
