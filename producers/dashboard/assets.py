"""The files that pages load: styles, our script, and the libraries in `static/vendor/`.

The address of a file holds a digest of its content, so a browser may keep it permanently.
"""

import hashlib
from functools import cache
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response

from producers.http.routing import ScopedRoute
from schemas.errors import NotFound

STATIC = Path(__file__).parent / "static"
MEDIA_TYPES = {".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}


@cache
def _files() -> dict[str, tuple[bytes, str, str]]:
    """The content, the digest and the media type of each file, by name. They are read once."""
    return {
        str(path.relative_to(STATIC)): (
            data := path.read_bytes(),
            hashlib.sha256(data).hexdigest()[:12],
            MEDIA_TYPES[path.suffix],
        )
        for path in sorted(STATIC.rglob("*"))
        if path.suffix in MEDIA_TYPES
    }


def asset_url(name: str) -> str:
    """The address of a file."""
    return f"/static/{name}?v={_files()[name][1]}"


async def _asset(request: Request) -> Response:
    name = request.path_params["name"]
    if name not in _files():
        raise NotFound(f"there is no file {name[:100]!r}")
    data, digest, kind = _files()[name]
    headers = {
        "Cache-Control": "public, max-age=31536000, immutable",
        "ETag": f'"{digest}"',
        "X-Content-Type-Options": "nosniff",
    }
    if request.headers.get("if-none-match") == headers["ETag"]:
        return Response(status_code=304, headers=headers)
    return Response(data, media_type=kind, headers=headers)


ROUTES = [ScopedRoute("/static/{name:path}", _asset, scope="open")]
