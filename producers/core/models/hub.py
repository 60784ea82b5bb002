"""A model's config.json on the Hugging Face hub: from this machine's cache, or else from the hub
itself.

It is read when a run is submitted. So a name that the hub does not know, or a hub that cannot be
reached, is reported within seconds, and not later by a worker that retries. The environment variables
are those of huggingface_hub: HF_ENDPOINT, HF_TOKEN, HF_HOME, HF_HUB_CACHE, HF_HUB_OFFLINE.
"""

import asyncio
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx

from schemas.errors import InvalidConfig

ENDPOINT = "https://huggingface.co"
ANSWER_S = 4.0
"""How long the hub may take to answer, including redirects."""
MAX_CONFIG_BYTES = 4 << 20
OFFLINE = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
TRUE = ("1", "ON", "YES", "TRUE")
LICENCE = "license:"
"""How the tag of a model begins that names its licence."""
INSTEAD = "or give the absolute path of a directory that holds the model"

Config = Mapping[str, Any]


async def hub_config(name: str) -> Config:
    """The content of `name`'s config.json. Raises InvalidConfig when the hub has no such model, does not
    allow access or does not answer, or when the settings forbid asking it."""
    if (cached := await asyncio.to_thread(_read_cached, name)) is not None:
        return cached
    if (variable := offline()) is not None:
        raise InvalidConfig(
            f"the model {name} is not in this machine's cache ({_cache()}), and {variable} forbids to "
            f"ask {endpoint()}; download it first, {INSTEAD}"
        )
    try:
        async with asyncio.timeout(ANSWER_S):
            return await _fetch_config(endpoint(), name)
    except (TimeoutError, httpx.HTTPError, httpx.InvalidURL, OSError) as error:
        raise InvalidConfig(
            f"the model {name} is not in this machine's cache ({_cache()}), and {endpoint()} "
            f"{_failure(error)}; check the connection, set HF_ENDPOINT, {INSTEAD}"
        ) from error


async def hub_licence(name: str) -> str | None:
    """The licence of a model as the hub lists it; None when the hub does not say or does not answer."""
    if offline() is not None:
        return None
    try:
        async with asyncio.timeout(ANSWER_S), httpx.AsyncClient(timeout=ANSWER_S) as client:
            answer = await client.get(f"{endpoint()}/api/models/{name}", follow_redirects=True)
            answer.raise_for_status()
            tags = (parse_object(answer.content[:MAX_CONFIG_BYTES]) or {}).get("tags")
    except (TimeoutError, httpx.HTTPError, httpx.InvalidURL, OSError):
        return None
    listed = [tag for tag in tags if isinstance(tag, str)] if isinstance(tags, list) else []
    found = next((tag for tag in listed if tag.startswith(LICENCE)), None)
    return found.removeprefix(LICENCE)[:80] if found else None


def endpoint() -> str:
    """The URL of the hub."""
    return (os.environ.get("HF_ENDPOINT") or ENDPOINT).rstrip("/")


def offline() -> str | None:
    """The name of the environment variable that forbids asking the hub; None if none is set."""
    return next((v for v in OFFLINE if os.environ.get(v, "").upper() in TRUE), None)


async def _fetch_config(hub: str, name: str) -> Config:
    """Fetch config.json from the hub. Raises InvalidConfig when the hub refuses it, and httpx's errors
    when the hub cannot be reached."""
    token = os.environ.get("HF_TOKEN") or await asyncio.to_thread(_token)
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    url = f"{hub}/{name}/resolve/main/config.json"
    async with (
        httpx.AsyncClient(follow_redirects=True, timeout=ANSWER_S) as client,
        client.stream("GET", url, headers=headers) as answer,
    ):
        if answer.status_code in (401, 403, 404):
            raise InvalidConfig(_refusal(hub, name, answer, with_token=bool(token)))
        answer.raise_for_status()
        data = bytearray()
        async for chunk in answer.aiter_bytes():
            data += chunk
            if len(data) > MAX_CONFIG_BYTES:
                raise InvalidConfig(
                    f"the config.json of {name} has more than {MAX_CONFIG_BYTES} bytes; check the "
                    "model's name"
                )
    config = parse_object(bytes(data))
    if config is None:
        raise InvalidConfig(f"{url} is not a JSON object; check HF_ENDPOINT")
    return config


def _refusal(hub: str, name: str, answer: httpx.Response, *, with_token: bool) -> str:
    """Explain why the hub returned no config.json. It also returns 401 for a model that does not
    exist."""
    code = answer.headers.get("x-error-code", "")
    if code == "GatedRepo":
        return (
            f"the model {name} is gated: accept its terms at {hub}/{name}, then set HF_TOKEN for "
            "server and workers"
        )
    if code == "EntryNotFound":
        return (
            f"{hub}/{name} has no config.json, so Transformers cannot load it; choose another model"
        )
    token = "this HF_TOKEN may not read it" if with_token else "it is private (set HF_TOKEN)"
    return f"{hub} has no model {name}, or {token}; check the spelling, {INSTEAD}"


def _failure(error: Exception) -> str:
    if isinstance(error, httpx.HTTPStatusError):
        return f"answered {error.response.status_code}"
    if isinstance(error, TimeoutError | httpx.TimeoutException):
        return f"did not answer within {ANSWER_S:g} s"
    return f"cannot be reached ({error})"


def _home() -> Path:
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(os.environ.get("HF_HOME") or f"{cache}/huggingface").expanduser()


def _cache() -> Path:
    named = os.environ.get("HF_HUB_CACHE")
    return Path(named).expanduser() if named else _home() / "hub"


def _token() -> str | None:
    try:
        return (_home() / "token").read_text().strip() or None
    except OSError:
        return None


def _read_cached(name: str) -> Config | None:
    """The config.json of the latest downloaded revision, if there is one."""
    try:
        return parse_object(cached_file(name, "config.json").read_bytes())
    except OSError:
        return None


def cached_file(name: str, file: str) -> Path:
    """A file of the latest downloaded revision of a model. It may not exist. Raises OSError when no
    revision was downloaded."""
    place = _cache() / f"models--{name.replace('/', '--')}"
    revision = (place / "refs" / "main").read_text().strip()
    return place / "snapshots" / revision / file


def parse_object(data: bytes) -> Config | None:
    """JSON text as an object, or None when it is not one."""
    try:
        config = json.loads(data)
    except (ValueError, RecursionError):
        return None
    return config if isinstance(config, dict) else None
