"""The files of an evaluation: which there are, and the signed URLs by which the client reads them."""

from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from producers.core.datasets.transfers import DOWNLOAD_S
from producers.core.workspaces import Workspace
from producers.dialects.osmosis.requests import Wire, answer, read_body, services
from producers.dialects.osmosis.scope import in_workspace, route
from producers.http.requests import own_address
from producers.http.routes.evaluation_files import list_files
from producers.http.routes.evaluations import find_evaluation

MOST_URLS = 500


class FileWire(Wire):
    path: str
    size: int


class TotalsWire(Wire):
    files: int
    bytes: int


class FileManifest(Wire):
    files: list[FileWire]
    totals: TotalsWire


class WantedFile(Wire):
    path: str = Field(min_length=1, max_length=1000)


class WantedFiles(Wire):
    items: list[WantedFile] = Field(min_length=1, max_length=MOST_URLS)


class FileUrl(Wire):
    path: str
    url: str


class FileUrls(Wire):
    items: list[FileUrl]
    expires_in: int = int(DOWNLOAD_S)


async def manifest(request: Request, workspace: Workspace) -> Response:
    """Return the files of some types, and of attempts those at some rows, with their exact sizes."""
    del workspace
    found = await list_files(request, await find_evaluation(request, request.path_params["ref"]))
    totals = TotalsWire(files=len(found), bytes=sum(one.size for one in found))
    return answer(
        FileManifest(files=[FileWire(path=one.path, size=one.size) for one in found], totals=totals)
    )


async def download_urls(request: Request, workspace: Workspace) -> Response:
    """Return a URL for each file. Reading a path that is not a file answers 404."""
    del workspace
    found = await find_evaluation(request, request.path_params["ref"])
    wanted = await read_body(request, WantedFiles)
    transfers, address = services(request).transfers, own_address(request)
    urls = []
    for one in wanted.items:
        place = f"/evals/{found['id']}/{one.path}"
        link = await transfers.download_url(place, one.path, address=address)
        urls.append(FileUrl(path=one.path, url=link.url))
    return answer(FileUrls(items=urls))


ROUTES = [
    route("/eval-runs/{ref}/samples/manifest", in_workspace(manifest), scope="read"),
    route(
        "/eval-runs/{ref}/samples/download-urls",
        in_workspace(download_urls),
        scope="read",
        methods=("POST",),
    ),
]
