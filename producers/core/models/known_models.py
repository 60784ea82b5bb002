"""The base models that a run can start from without more being said: the scratch shapes, and the models
in this machine's cache of the hub."""

import asyncio
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from producers.core.models.hub import parse_object
from producers.core.models.model_facts import facts_of_config
from schemas.models.families import forward_pass
from schemas.models.scratch import describe_shapes

NO_CONFIG = "its config.json is not in the cache"


async def known_models() -> Sequence[Mapping[str, object]]:
    """The models as JSON: their name, kind, parameters, context, and how they are run."""
    cached = await asyncio.to_thread(lambda: list(_cached_models()))
    return [*describe_shapes(), *cached]


def _cached_models() -> Iterator[Mapping[str, object]]:
    """Models in the Hugging Face cache of the user who runs the server."""
    home = os.environ.get("HF_HOME") or _in_home(".cache/huggingface")
    cache = Path(os.environ.get("HF_HUB_CACHE") or f"{home}/hub")
    for found in sorted(cache.glob("models--*--*")) if cache.is_dir() else ():
        name = found.name.removeprefix("models--").replace("--", "/")
        config = _newest_config(found)
        facts = facts_of_config(config or {})
        runs = forward_pass(config) if config else None
        yield {
            "name": name,
            "kind": "hub",
            "parameters": facts.parameters,
            "context": facts.context,
            "runs": runs.runs if runs else None,
            "why": runs.why if runs else NO_CONFIG,
        }


def _newest_config(model: Path) -> Mapping[str, Any] | None:
    """The config.json of the newest snapshot of a cached model that has one."""
    files = sorted(model.glob("snapshots/*/config.json"), key=lambda f: f.lstat().st_mtime)
    for file in reversed(files):
        try:
            return parse_object(file.read_bytes())
        except OSError:
            continue
    return None


def _in_home(path: str) -> str:
    """A path in the home directory of this process's user. The user may have no home directory."""
    return os.path.expanduser(f"~/{path}")  # noqa: PTH111 - the other raises without a home
