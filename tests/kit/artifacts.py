"""Archives of artifacts, and how a client publishes them over HTTP."""

import gzip
import hashlib
import io
import tarfile
from collections.abc import Mapping, Sequence
from typing import Any

import httpx

from tests.kit.application import API_KEY, Application

TASK = "name: {name}\nversion: {version}\ninstruction: Find the flag.\nverification: {{method: flag}}\n"


def packed(
    files: Mapping[str, bytes | str], members: Sequence[tuple[tarfile.TarInfo, bytes]] = ()
) -> bytes:
    """A tar.gz with these files, and then these members. The same files give the same bytes."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for path, content in files.items():
            data = content.encode() if isinstance(content, str) else content
            info = tarfile.TarInfo(path)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
        for info, data in members:
            archive.addfile(info, io.BytesIO(data))
    return gzip.compress(out.getvalue(), mtime=0)


def task_archive(version: str = "1.0.0", *, name: str = "flags", **files: str) -> bytes:
    """The archive of a task."""
    return packed({"task.yaml": TASK.format(name=name, version=version), **files})


def named(version: str = "1.0.0", *, name: str = "flags", kind: str = "task") -> dict[str, str]:
    """The fields of a request that name a version."""
    return {"kind": kind, "name": name, "version": version}


async def announce(
    app: Application, body: Mapping[str, Any], data: bytes, *, api_key: str = API_KEY
) -> httpx.Response:
    """Announce the archive of a version."""
    sha256 = hashlib.sha256(data).hexdigest()
    return await app.api.post(
        "/api/v1/artifacts/uploads",
        json={**body, "file_size": len(data), "sha256": sha256},
        headers={"Authorization": f"Bearer {api_key}"},
    )


async def signed(app: Application, method: str, url: str, **content: Any) -> httpx.Response:
    """The response to a request by a signed URL, which sends no API key."""
    transport = httpx.ASGITransport(app.app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport) as bare:
        return await bare.request(method, url, **content)


async def send_parts(app: Application, plan: Mapping[str, Any], data: bytes) -> None:
    """Send the parts of an archive that have not arrived, by their signed URLs."""
    for part in plan["parts"]:
        start = (part["part_number"] - 1) * plan["part_size"]
        piece = data[start : start + part["size"]]
        put = await signed(app, "PUT", part["url"], content=piece)
        assert put.status_code == 200, put.text


async def push(
    app: Application, body: Mapping[str, Any], data: bytes, *, api_key: str = API_KEY
) -> httpx.Response:
    """Publish a version as `headrace artifact push` does. Returns the last answer."""
    begun = await announce(app, body, data, api_key=api_key)
    if begun.status_code != 201:
        return begun
    plan = begun.json()["upload"]
    await send_parts(app, plan, data)
    return await app.api.post(
        "/api/v1/artifacts",
        json={**body, "upload": plan["id"]},
        headers={"Authorization": f"Bearer {api_key}"},
    )
